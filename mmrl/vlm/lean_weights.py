"""The weights of a text decoder as the lean decoder reads them: no copy where the model's own tensors will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy

__all__ = ["LeanLayer", "LeanLinear", "LeanWeights", "lean_obstacle", "lean_weights", "multiply"]


@dataclass(frozen=True)
class LeanLinear:
    """A linear layer with the low-rank adapters beside it."""

    weight: Tensor
    """(out, in)."""
    bias: Tensor | None
    """(out,)."""
    low: Tensor | None
    """(r, in), all active adapters; None without."""
    high: Tensor | None
    """(out, r), with the adapters' scale."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows (b, in) to (b, out)."""
        result = multiply(x, self.weight, self.bias)
        if self.low is not None and self.high is not None:
            inner = functional.linear(x.to(self.low.dtype), self.low)
            result.add_(functional.linear(inner, self.high))
        return result


@dataclass(frozen=True)
class LeanLayer:
    """Weights of one decoder layer."""

    qkv: LeanLinear
    """Heads of the queries, then of the keys, then of the values."""
    head_norm: Tensor | None
    """(heads + kv_heads, d), scale of each query and key head; None without head norms."""
    out: LeanLinear
    gate: LeanLinear
    up: LeanLinear
    down: LeanLinear
    norm_attention: Tensor
    """(H,)."""
    norm_mlp: Tensor
    """(H,)."""


@dataclass(frozen=True)
class LeanWeights:
    """A text decoder in the precision that it computes in."""

    layers: tuple[LeanLayer, ...]
    embedding: Tensor
    """(V, H)."""
    norm: Tensor
    """(H,)."""
    head: Tensor
    """(V, H)."""
    frequencies: Tensor
    """(d / 2,) float32, radians a position."""
    rotary_scale: float
    """Factor on the rotation's cosine and sine."""
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: torch.dtype
    """Of what the linear layers multiply."""


def lean_obstacle(policy: VlmPolicy) -> str | None:
    """Why a policy's tokens cannot be drawn with the lean decoder.

    Args:
        policy: the model.

    Returns:
        The reason, or None where they can.
    """
    network = policy.network
    text = network.config.text_config
    if network.config.model_type not in FAMILIES:
        return f"the architecture is {network.config.model_type}"
    if not policy.shares_prefix:
        return "prompts are not shared"
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return "some layers attend through a sliding window"
    if text.hidden_act != "silu":
        return f"the activation is {text.hidden_act}"
    if text.rope_parameters["rope_type"] in ("dynamic", "longrope"):
        return "the rotary frequencies depend on the length"
    model = network.model.language_model
    if type(model.embed_tokens) is not nn.Embedding or type(network.lm_head) is not nn.Linear:
        return "the embedding or the head is not an ordinary layer"
    reasons = (_linear_obstacle(linear) for layer in model.layers for linear in _linears(layer))
    return next((reason for reason in reasons if reason is not None), None)


def lean_weights(policy: VlmPolicy) -> LeanWeights:
    """The weights that a policy's tokens are drawn with, as they are now.

    Args:
        policy: a policy without a `lean_obstacle`.

    Returns:
        Weights in the dtype of autocast where it is on, with the adapters that are active.
    """
    network = policy.network
    model = network.model.language_model
    kind, embedding = policy.device.type, model.embed_tokens.weight
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return LeanWeights(
            layers=tuple(_layer(layer, cast) for layer in model.layers),
            embedding=embedding.detach(),
            norm=model.norm.weight.detach(),
            head=network.lm_head.weight.detach().to(embedding.dtype),
            frequencies=model.rotary_emb.inv_freq.float(),
            rotary_scale=float(model.rotary_emb.attention_scaling),
            heads=network.config.text_config.num_attention_heads,
            kv_heads=network.config.text_config.num_key_value_heads,
            head_dim=model.layers[0].self_attn.head_dim,
            eps=model.norm.variance_epsilon,
            dtype=cast or embedding.dtype,
        )


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map rows by a matrix.

    On a CPU MKL multiplies a handful of rows with a large matrix at about two thirds of its speed, except in a batch
    of products, and blocks of the matrix's rows are such a batch.

    Args:
        x: (b, in).
        weight: (out, in).
        bias: (out,) or None.

    Returns:
        (b, out).
    """
    few = x.device.type == "cpu" and x.dtype == torch.float32 and FEW_ROWS[0] <= x.shape[0] <= FEW_ROWS[1]
    if not few or weight.numel() < LARGE or weight.shape[0] % BLOCK:
        return functional.linear(x, weight, bias)
    blocks = weight.unflatten(0, (-1, BLOCK)).transpose(1, 2)
    result = torch.bmm(x.expand(blocks.shape[0], -1, -1), blocks).transpose(0, 1).reshape(x.shape[0], -1)
    return result if bias is None else result.add_(bias)


def _layer(layer: Any, cast: torch.dtype | None) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return LeanLayer(
        qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], cast),
        head_norm=_head_norm(attention),
        out=_linear([attention.o_proj], cast),
        gate=_linear([mlp.gate_proj], cast),
        up=_linear([mlp.up_proj], cast),
        down=_linear([mlp.down_proj], cast),
        norm_attention=layer.input_layernorm.weight.detach(),
        norm_mlp=layer.post_attention_layernorm.weight.detach(),
    )


def _linear(linears: Sequence[Any], cast: torch.dtype | None) -> LeanLinear:
    """Layers with the same input as one layer."""
    bases = [_base(linear) for linear in linears]
    biases = [base.bias for base in bases if base.bias is not None]
    low, high = _low_rank(linears)
    return LeanLinear(
        weight=_join([base.weight for base in bases], cast),
        bias=_join(biases, cast) if biases else None,
        low=None if low is None else _join([low], cast),
        high=None if high is None else _join([high], cast),
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


def _head_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    norms = ((attention.q_norm, attention.q_proj), (attention.k_norm, attention.k_proj))
    return torch.cat([norm.weight.expand(x.out_features // attention.head_dim, -1) for norm, x in norms]).detach()


def _linears(layer: Any) -> tuple[Any, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def _linear_obstacle(linear: Any) -> str | None:
    if type(linear) is nn.Linear:
        return None
    if type(_base(linear)) is not nn.Linear or not hasattr(linear, "lora_A"):
        return f"a {type(linear).__name__} stands in a linear layer's place"
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
FEW_ROWS = (5, 15)
LARGE = 2**18
"""Elements from which on the blocks pay."""

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
