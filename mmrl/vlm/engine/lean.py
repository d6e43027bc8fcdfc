"""The weights of a text decoder as the lean decoder reads them: few large matrices, norms in half the operations.

The text decoders of Qwen, Llama and Mistral differ in their biases and in the norm of each head. Shapes: b rows, V
tokens known, H width of a state, d width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from mmrl.vlm.engine.vlm_policy import VlmPolicy


@dataclass(frozen=True)
class LeanNorm:
    """RMS norm as x / hypot(|x|, sqrt(n eps)) times weight times sqrt(n), in half as many operations as usual."""

    scale: Tensor
    """(..., n) float32, weight times sqrt(n)."""
    floor: Tensor
    """() float32, sqrt(n eps)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last axis of x (b, ..., n), to float32."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, torch.hypot(size, self.floor)).mul_(self.scale)


@dataclass(frozen=True)
class LeanLinear:
    """A linear layer with its low-rank adapters."""

    weight: Tensor
    """(out, in)."""
    bias: Tensor | None = None
    """(out,)."""
    low: Tensor | None = None
    """(r, in), all active adapters; None without."""
    high: Tensor | None = None
    """(out, r), with the adapters' scale."""
    blocks: Tensor | None = None
    """(n, in, BLOCK), the weight viewed as n matrices; None if it is multiplied as a whole."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows (b, in) to (b, out)."""
        if self.blocks is None or not FEW_ROWS[0] <= x.shape[0] <= FEW_ROWS[1]:
            result = functional.linear(x, self.weight, self.bias)
        else:
            result = self.multiply_blocks(x).transpose(0, 1).reshape(x.shape[0], -1)
            result = result if self.bias is None else result.add_(self.bias)
        if self.low is not None and self.high is not None:
            inner = functional.linear(x.to(self.low.dtype), self.low)
            result.add_(functional.linear(inner, self.high))
        return result

    def multiply_blocks(self, x: Tensor) -> Tensor:
        """(n, b, BLOCK), products of rows (b, in) with the blocks."""
        assert self.blocks is not None
        return torch.bmm(x.expand(self.blocks.shape[0], -1, -1), self.blocks)


@dataclass(frozen=True)
class LeanMlp:
    """down(silu(gate(x)) * up(x))."""

    gate: LeanLinear
    up: LeanLinear
    down: LeanLinear

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows (b, H) to (b, H)."""
        plain = self.gate.blocks is not None and self.gate.low is None and self.up.low is None
        if not plain or not FEW_ROWS[0] <= x.shape[0] <= FEW_ROWS[1]:
            return self.down(functional.silu(self.gate(x), inplace=True).mul_(self.up(x)))
        inner = functional.silu(self.gate.multiply_blocks(x), inplace=True).mul_(self.up.multiply_blocks(x))
        return self.down(inner.transpose(0, 1).reshape(x.shape[0], -1))


@dataclass(frozen=True)
class ModuleMlp:
    """The modules of a mixture of experts, in the precision that they are called in elsewhere."""

    module: Any
    cast: torch.dtype | None
    """Precision of autocast; None without."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows (b, H) to (b, H)."""
        with torch.autocast(x.device.type, dtype=self.cast, enabled=self.cast is not None):
            return self.module(x[None])[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LeanLayer:
    """Weights of one decoder layer."""

    norm_attention: LeanNorm
    qkv: LeanLinear
    """Heads of the queries, then of the keys, then of the values."""
    norm_heads: LeanNorm | None
    """Norm of each query and key head (heads + kv_heads, d); None without."""
    out: LeanLinear
    norm_mlp: LeanNorm
    mlp: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LeanWeights:
    """A text decoder in the precision that it computes in."""

    embedding: Tensor
    """(V, H)."""
    layers: tuple[LeanLayer, ...]
    norm: LeanNorm
    head: LeanLinear
    frequencies: Tensor
    """(d / 2,) float32, radians a position."""
    rotary_scale: float
    """Factor on the rotation's cosine and sine."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Precision of the decoder layers' matrix products, and of the keys and values that they leave."""


def unsupported_reason(policy: VlmPolicy) -> str | None:
    """Reason why a policy cannot sample with the lean decoder."""
    network = policy.network
    text, model = network.config.get_text_config(), network.get_decoder()
    if type(model).__name__ not in DECODERS:
        return f"the architecture is {text.model_type}"
    if policy.generic is None and not policy.shares_prefix:
        return "prompts are not shared"
    kinds = getattr(text, "layer_types", None) or [getattr(text, "sliding_window", None) and "sliding_attention"]
    if "sliding_attention" in kinds:
        return "some layers attend through a sliding window"
    if text.hidden_act != "silu":
        return f"the activation is {text.hidden_act}"
    if text.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "the rotary frequencies depend on the length"
    if type(model.embed_tokens) is not nn.Embedding or type(network.get_output_embeddings()) is not nn.Linear:
        return "the embedding or the head is not an ordinary layer"
    if model.embed_tokens.weight.dtype is torch.float64:
        return "the weights are float64"
    if not policy.head.plain:
        return "the logits are not the product of states and head"
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        for linear in [*linears, *([mlp.gate_proj, mlp.up_proj, mlp.down_proj] if _is_gated(mlp) else [])]:
            if reason := _unsupported_linear(linear):
                return reason
    return None


def lean_weights(policy: VlmPolicy) -> LeanWeights:
    """The weights that a policy's tokens are drawn with, as they are now."""
    network = policy.network
    model, text = network.get_decoder(), network.config.get_text_config()
    kind, embedding = policy.device.type, model.embed_tokens.weight
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return LeanWeights(
            embedding=embedding.detach(),
            layers=tuple(_layer(layer, cast) for layer in model.layers),
            norm=_norm([model.norm.weight], model.norm),
            head=_linear([network.get_output_embeddings()], embedding.dtype),
            frequencies=model.rotary_emb.inv_freq.float(),
            rotary_scale=float(model.rotary_emb.attention_scaling),
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=model.layers[0].self_attn.head_dim,
            dtype=cast or embedding.dtype,
        )


def _layer(layer: Any, cast: torch.dtype | None) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    mapping: Callable[[Tensor], Tensor] = ModuleMlp(mlp, cast)
    if _is_gated(mlp):
        mapping = LeanMlp(*(_linear([linear], cast) for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)))
    norm_heads = None
    if hasattr(attention, "q_norm"):  # Qwen3 and Qwen3-VL
        pairs = ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
        weights = [norm.weight.expand(linear.out_features // attention.head_dim, -1) for norm, linear in pairs]
        norm_heads = _norm(weights, attention.q_norm)
    return LeanLayer(
        norm_attention=_norm([layer.input_layernorm.weight], layer.input_layernorm),
        qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], cast),
        norm_heads=norm_heads,
        out=_linear([attention.o_proj], cast),
        norm_mlp=_norm([layer.post_attention_layernorm.weight], layer.post_attention_layernorm),
        mlp=mapping,
    )


def _is_gated(mlp: Any) -> bool:
    return hasattr(mlp, "gate_proj")  # else a mixture of experts


def _norm(weights: Sequence[Tensor], norm: Any) -> LeanNorm:
    weight = torch.cat(list(weights)).float()
    size = weight.shape[-1]
    return LeanNorm(scale=weight * size**0.5, floor=weight.new_tensor((size * norm.variance_epsilon) ** 0.5))


def _linear(linears: Sequence[Any], cast: torch.dtype | None) -> LeanLinear:
    """Layers with the same input as one layer."""
    bases = [_base(linear) for linear in linears]
    biases = [base.bias for base in bases if base.bias is not None]
    low, high = _low_rank(linears)
    weight = _join([base.weight for base in bases], cast)
    # on a CPU MKL multiplies a few rows with a large matrix at two thirds of its speed for a batch of matrices
    slow = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LARGE
    return LeanLinear(
        weight=weight,
        bias=_join(biases, cast) if biases else None,
        low=None if low is None else _join([low], cast),
        high=None if high is None else _join([high], cast),
        blocks=weight.unflatten(0, (-1, BLOCK)).transpose(1, 2) if slow and weight.shape[0] % BLOCK == 0 else None,
    )


def _join(parts: Sequence[Tensor], cast: torch.dtype | None) -> Tensor:
    whole = (torch.cat(list(parts)) if len(parts) > 1 else parts[0]).detach()
    return whole if cast is None else whole.to(cast)


def _low_rank(linears: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
    """Active adapters of layers with the same input: (r, in) of all, and (out, r), each for its own outputs."""
    low, high = [], []
    for linear in linears:
        names = _adapters(linear)
        low += [linear.lora_A[name].weight for name in names]
        wide = [linear.lora_B[name].weight * linear.scaling[name] for name in names]
        high.append(torch.cat(wide, 1) if wide else _base(linear).weight.new_zeros(linear.out_features, 0))
    return (torch.cat(low), torch.block_diag(*high)) if low else (None, None)


def _unsupported_linear(linear: Any) -> str | None:
    if type(linear) is nn.Linear:
        return None
    if type(_base(linear)) is not nn.Linear or not hasattr(linear, "lora_A"):
        return f"a {type(linear).__name__} replaces a linear layer"
    if linear.lora_variant or any(linear.lora_bias.values()):
        return "the adapters are of a variant of LoRA"
    return None


def _base(linear: Any) -> Any:
    return getattr(linear, "base_layer", linear)


def _adapters(linear: Any) -> list[str]:
    """Adapters whose output the layer adds to that of its weight."""
    if not hasattr(linear, "base_layer") or linear.disable_adapters or linear.merged:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


BLOCK = 64
"""Rows of a matrix in one product of a batch."""
LARGE = 2**18
"""Elements of a matrix from which on blocks pay."""
FEW_ROWS = (5, 15)
"""Fewest and most rows for which they pay."""

DECODERS = (
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
    "Qwen3MoeModel",
    "Qwen2VLTextModel",
    "Qwen2_5_VLTextModel",
    "Qwen3VLTextModel",
    "Qwen3VLMoeTextModel",
)
"""Classes of transformers' text decoders that compute what `LeanLayer` does."""
