"""Decoding token by token without the transformers modules: few, large operations on weights laid out for few rows.

The text decoders of Qwen2.5-VL and Qwen3-VL differ in their biases and in the norm of each head; a response token has
the same rotary position along all three axes, so that its rotation is the ordinary one. A prompt's keys and values are
read once for all rows of its group, each row adds its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmrl.vlm.prefix import Prefix

if TYPE_CHECKING:
    from mmrl.vlm.policy import VlmPolicy

__all__ = ["LeanBatch", "LeanWeights", "lean_obstacle", "lean_weights"]

BLOCK = 64
"""Steps that room is made for at a time; then twice as many."""


@dataclass(frozen=True)
class LeanLayer:
    """Weights of one decoder layer, each (in, out)."""

    qkv: tuple[Tensor, ...]
    """Queries, keys and values, in as many pieces as there are copies to avoid."""
    qkv_bias: Tensor | None
    """(out,)."""
    head_norm: Tensor | None
    """(H + Hk, d), scale of each query and key head; None without head norms."""
    out: Tensor
    out_bias: Tensor | None
    gate_up: tuple[Tensor, ...]
    down: Tensor
    norm_attention: Tensor
    """(H,), as the next."""
    norm_mlp: Tensor


@dataclass(frozen=True)
class LeanWeights:
    """A text decoder in the precision that it computes in."""

    layers: tuple[LeanLayer, ...]
    embedding: Tensor
    """(V, H)."""
    norm: Tensor
    head: Tensor
    """(H, V)."""
    frequencies: Tensor
    """(d / 2,) float32, radians a position."""
    rotary_scale: float
    """Factor on the rotation's cosine and sine."""
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def lean_obstacle(policy: VlmPolicy) -> str | None:
    """Why a policy's tokens cannot be decoded here.

    Args:
        policy: the model.

    Returns:
        The reason, or None where they can.
    """
    network = policy.network
    text = network.config.text_config
    if network.config.model_type not in FAMILIES:
        return f"{network.config.model_type} is not one of {', '.join(FAMILIES)}"
    if not policy.shares_prefix:
        return "the policy does not share prompts"
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return "some layers attend over a sliding window"
    if text.hidden_act != "silu":
        return f"the activation is {text.hidden_act}, not silu"
    if text.rope_parameters["rope_type"] == "dynamic" or text.rope_parameters["rope_type"] == "longrope":
        return "the rotary frequencies depend on the length"
    model = network.model.language_model
    if type(model.embed_tokens) is not nn.Embedding or type(network.lm_head) is not nn.Linear:
        return "the embedding or the head is not an ordinary layer"
    reasons = (_linear_obstacle(linear) for layer in model.layers for linear in _linears(layer))
    return next((reason for reason in reasons if reason is not None), None)


def lean_weights(policy: VlmPolicy) -> LeanWeights:
    """The policy's weights, laid out anew only where they changed since the last call.

    Args:
        policy: a policy without a `lean_obstacle`.

    Returns:
        Weights with the active adapters added, in the dtype of autocast where it is on.
    """
    network = policy.network
    dtype = _compute_dtype(network.lm_head.weight)
    state = (dtype, *_state(network))
    known = CACHE.get(policy)
    if known is None or known[0] != state:
        CACHE.pop(policy, None)  # before the new copies are made: they need the memory
        with torch.no_grad(), torch.autocast(policy.device.type, enabled=False):
            known = CACHE[policy] = (state, _lay_out(network, dtype))
    return known[1]


class LeanBatch:
    """Rows that are decoded together.

    Args:
        weights: the decoder.
        prefix: what N prompts left, without history.
        prompt: (b,) int64, ascending, the prompt of each row; each of the N has a row.
        steps: most tokens that will be read.
        banned: (K,) int64, tokens that cannot be drawn.
    """

    def __init__(self, weights: LeanWeights, prefix: Prefix, prompt: Tensor, steps: int, banned: Tensor) -> None:
        self.weights = weights
        self.banned = banned
        self.step = 0
        self.steps = steps
        self.room = 0
        self.next_position = prefix.next_position
        self.lengths = prefix.lengths
        self.prefix_keys = [_side_by_side(x.transpose(2, 3)) for x in prefix.keys]
        self.prefix_values = [_side_by_side(x) for x in prefix.values]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._arrange(prompt)

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some, and prompts without a row.

        Args:
            index: (n,) int64, ascending.
        """
        prompt, before = self.prompt[index], self.slot[index]
        live, prompt = torch.unique_consecutive(prompt, return_inverse=True)
        if len(live) < len(self.lengths):
            self.next_position, self.lengths = self.next_position[live], self.lengths[live]
            self.prefix_keys = [_select_groups(x, live, self.weights.kv_heads) for x in self.prefix_keys]
            self.prefix_values = [_select_groups(x, live, self.weights.kv_heads) for x in self.prefix_values]
        width = self.places
        keys, values, room = self.keys, self.values, self.room
        self._arrange(prompt)
        source = torch.zeros(len(live) * self.places, dtype=torch.int64, device=index.device)
        source[self.slot] = before
        group, place = (source // width).view(-1, 1, self.places), (source % width).view(-1, 1, self.places)
        head = torch.arange(self.weights.kv_heads, device=index.device)[None, :, None]
        shape = (-1, self.weights.kv_heads, width, room, self.weights.head_dim)

        def move(x: Tensor) -> Tensor:
            return x.view(shape)[group, head, place].flatten(0, 2)

        self.keys, self.values = [move(x) for x in keys], [move(x) for x in values]

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row.

        Args:
            token: (b,) int64.

        Returns:
            (b, H), the states that predict the next.
        """
        if self.step == self.room:
            self._make_room()
        weights = self.weights
        with torch.autocast(token.device.type, enabled=False):
            self._begin_step()
            hidden = functional.embedding(token, weights.embedding)
            for number, layer in enumerate(weights.layers):
                x = self._normalise(hidden, layer.norm_attention)
                _project(x, layer.qkv, layer.qkv_bias, self.qkv)
                _add_product(hidden, self._attend(number, layer), layer.out)
                if layer.out_bias is not None:
                    hidden.add_(layer.out_bias)
                x = self._normalise(hidden, layer.norm_mlp)
                _project(x, layer.gate_up, None, self.gate_up)
                gate, up = self.gate_up.chunk(2, -1)
                _add_product(hidden, functional.silu(gate, inplace=True).mul_(up), layer.down)
            self.step += 1
            return _rms_norm(hidden, weights.norm, weights.eps)

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of the next token.

        Args:
            states: (b, H).
            temperature: logits are divided by it.

        Returns:
            (b, V) float32.
        """
        with torch.autocast(states.device.type, enabled=False):
            logits = torch.mm(states, self.weights.head).float()
        if temperature != 1.0:
            logits.div_(temperature)
        return logits.index_fill_(1, self.banned, float("-inf")).log_softmax(-1)

    def _arrange(self, prompt: Tensor) -> None:
        """Give each row a slot: the rows of a prompt lie side by side, in as many places as the largest group has."""
        weights, device = self.weights, prompt.device
        self.prompt = prompt
        rows = torch.arange(len(prompt), device=device)
        counts = torch.bincount(prompt, minlength=len(self.lengths))
        self.places = int(counts.max())
        self.slot = prompt * self.places + rows - (counts.cumsum(0) - counts)[prompt]
        groups, slots = len(self.lengths), len(self.lengths) * self.places
        self.ragged = slots != len(prompt)
        if self.ragged:
            self.row_of_slot = torch.zeros(slots, dtype=torch.int64, device=device).index_copy_(0, self.slot, rows)
        width = self.prefix_keys[0].shape[2]
        real = torch.arange(width, device=device) < self.lengths[:, None]
        self.bias = None if bool(real.all()) else torch.zeros_like(real, dtype=torch.float32)
        if self.bias is not None:
            self.bias = self.bias.masked_fill_(~real, float("-inf"))[:, None]
        d, heads, kv_heads = weights.head_dim, weights.heads, weights.kv_heads
        layer, dtype = weights.layers[0], weights.layers[0].out.dtype
        self.qkv = torch.empty(len(prompt), (heads + 2 * kv_heads) * d, dtype=dtype, device=device)
        self.gate_up = torch.empty(len(prompt), 2 * layer.down.shape[0], dtype=dtype, device=device)
        self.rotated = torch.empty(len(prompt), heads + kv_heads, d, device=device)
        self.queries = torch.empty(groups, kv_heads, self.places, heads // kv_heads, d, device=device)
        self.context = torch.empty_like(self.queries)
        if self.room:
            self._rotate_block()

    def _make_room(self) -> None:
        room = min(max(BLOCK, 2 * self.room), self.steps)
        shape = (len(self.lengths) * self.weights.kv_heads * self.places, room, self.weights.head_dim)
        for name in ("keys", "values"):
            before = getattr(self, name)
            after = [torch.empty(shape, device=self.prompt.device) for _ in self.weights.layers]
            for old, new in zip(before, after, strict=False):
                new[:, : self.step] = old[:, : self.step]
            setattr(self, name, after)
        self.room = room
        self.scores = None
        self._rotate_block()

    def _rotate_block(self) -> None:
        """Cosine and sine of all steps that there is room for."""
        weights = self.weights
        steps = torch.arange(self.room, device=self.prompt.device)
        position = steps[:, None] + self.next_position[self.prompt][None]
        angle = position.float()[:, :, None, None] * weights.frequencies
        self.cosine = torch.cat([angle.cos(), angle.cos()], -1) * weights.rotary_scale
        self.sine = angle.sin() * weights.rotary_scale

    def _begin_step(self) -> None:
        """Scores of one step lie without gaps, so that their softmax needs no copy."""
        heads, width = self.weights.heads // self.weights.kv_heads, self.prefix_keys[0].shape[2]
        batch = len(self.lengths) * self.weights.kv_heads
        columns = width + self.step + 1
        self.scores = torch.empty(batch, self.places * heads, columns, device=self.prompt.device)
        self.prefix_scores = self.scores[..., :width]
        self.own_scores = self.scores.view(batch * self.places, heads, columns)[..., width:]

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(hidden, weight, self.weights.eps).to(self.qkv.dtype)

    def _attend(self, number: int, layer: LeanLayer) -> Tensor:
        """(b, heads * d): attention of each row over its prompt and its own tokens, in float32."""
        weights = self.weights
        d, heads, kv_heads, groups = weights.head_dim, weights.heads, weights.kv_heads, len(self.lengths)
        rotated, new_values = self._rotate(layer), self.qkv[:, -kv_heads * d :].unflatten(1, (kv_heads, d))
        if self.ragged:
            rotated, new_values = rotated[self.row_of_slot], new_values[self.row_of_slot]
        shape = (groups, self.places, kv_heads, -1, d)
        torch.mul(rotated[:, :heads].view(shape).transpose(1, 2), d**-0.5, out=self.queries)
        keys, values = self.keys[number], self.values[number]
        place = (groups, kv_heads, self.places, self.room, d)
        keys.view(place)[:, :, :, self.step] = rotated[:, heads:].unflatten(0, shape[:2]).transpose(1, 2)
        values.view(place)[:, :, :, self.step] = new_values.unflatten(0, shape[:2]).transpose(1, 2)
        together, own = (groups * kv_heads, -1, d), (groups * kv_heads * self.places, -1, d)
        torch.bmm(self.queries.view(together), self.prefix_keys[number], out=self.prefix_scores)
        if self.bias is not None:
            self.prefix_scores.unflatten(0, (groups, -1)).flatten(1, 2).add_(self.bias)
        torch.bmm(self.queries.view(own), keys[:, : self.step + 1].transpose(1, 2), out=self.own_scores)
        torch.softmax(self.scores, -1, out=self.scores)
        torch.bmm(self.prefix_scores, self.prefix_values[number], out=self.context.view(together))
        self.context.view(own).baddbmm_(self.own_scores, values[:, : self.step + 1])
        result = self.context.transpose(1, 2).reshape(groups * self.places, heads * d)
        result = result[self.slot] if self.ragged else result
        return result.to(self.qkv.dtype)

    def _rotate(self, layer: LeanLayer) -> Tensor:
        """(b, heads + kv_heads, d) float32, rotated queries and keys."""
        weights = self.weights
        count, half = weights.heads + weights.kv_heads, weights.head_dim // 2
        x = self.qkv[:, : count * weights.head_dim].unflatten(1, (count, weights.head_dim))
        if layer.head_norm is not None:
            x = _rms_norm(x, None, weights.eps).mul_(layer.head_norm)
        sine = self.sine[self.step]
        torch.mul(x, self.cosine[self.step], out=self.rotated)
        self.rotated[..., :half].addcmul_(x[..., half:], sine, value=-1)
        self.rotated[..., half:].addcmul_(x[..., :half], sine)
        return self.rotated


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def _project(x: Tensor, pieces: tuple[Tensor, ...], bias: Tensor | None, out: Tensor) -> None:
    start = 0
    for piece in pieces:
        stop = start + piece.shape[1]
        if bias is None:
            torch.mm(x, piece, out=out[:, start:stop])
        else:
            torch.addmm(bias[start:stop], x, piece, out=out[:, start:stop])
        start = stop


def _add_product(hidden: Tensor, x: Tensor, weight: Tensor) -> None:
    if x.dtype == hidden.dtype:
        hidden.addmm_(x, weight)
    else:
        hidden.add_(torch.mm(x, weight))


def _side_by_side(x: Tensor) -> Tensor:
    """(N * Hk, ...) float32, without gaps."""
    return x.flatten(0, 1).float().contiguous()


def _select_groups(x: Tensor, live: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(0, (-1, kv_heads))[live].flatten(0, 1)


def _compute_dtype(weight: Tensor) -> torch.dtype:
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _linears(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


def _linear_obstacle(linear: Any) -> str | None:
    """Why a layer is not a plain matrix with plain low-rank adapters."""
    if type(linear) is nn.Linear:
        return None
    if type(getattr(linear, "base_layer", None)) is not nn.Linear or not hasattr(linear, "lora_A"):
        return f"a {type(linear).__name__} stands where a linear layer is expected"
    if linear.lora_variant or any(linear.lora_bias.values()):
        return "the adapters are of a variant of LoRA"
    return None


def _adapters(linear: Any) -> list[str]:
    """Adapters that the layer's output gets beside its weight."""
    if not hasattr(linear, "base_layer") or linear.disable_adapters or linear.merged:
        return []
    return [name for name in linear.active_adapters if name in linear.lora_A]


def _matrix(linear: Any) -> Tensor:
    """(out, in) weight with the active adapters added."""
    weight: Tensor = getattr(linear, "base_layer", linear).weight
    names = _adapters(linear)
    if not names:
        return weight
    total = weight.float()
    for name in names:
        low, high = linear.lora_A[name].weight.float(), linear.lora_B[name].weight.float()
        total = torch.addmm(total, high, low, alpha=linear.scaling[name])
    return total


def _lay_out(network: Any, dtype: torch.dtype) -> LeanWeights:
    model = network.model.language_model
    rotary, attention = model.rotary_emb, model.layers[0].self_attn
    head_dim = attention.head_dim
    embedding = model.embed_tokens.weight
    return LeanWeights(
        layers=tuple(_lay_out_layer(layer, dtype) for layer in model.layers),
        embedding=embedding.detach(),
        norm=model.norm.weight.detach(),
        head=_stored([network.lm_head.weight], embedding.dtype)[0],
        frequencies=rotary.inv_freq.float(),
        rotary_scale=float(rotary.attention_scaling),
        heads=network.config.text_config.num_attention_heads,
        kv_heads=network.config.text_config.num_key_value_heads,
        head_dim=head_dim,
        eps=model.norm.variance_epsilon,
    )


def _lay_out_layer(layer: Any, dtype: torch.dtype) -> LeanLayer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    return LeanLayer(
        qkv=_stored([_matrix(part) for part in parts], dtype),
        qkv_bias=_bias(parts, dtype),
        head_norm=_head_norm(attention),
        out=_stored([_matrix(attention.o_proj)], dtype)[0],
        out_bias=_bias([attention.o_proj], dtype),
        gate_up=_stored([_matrix(mlp.gate_proj), _matrix(mlp.up_proj)], dtype),
        down=_stored([_matrix(mlp.down_proj)], dtype)[0],
        norm_attention=layer.input_layernorm.weight.detach(),
        norm_mlp=layer.post_attention_layernorm.weight.detach(),
    )


def _bias(linears: Sequence[Any], dtype: torch.dtype) -> Tensor | None:
    biases = [getattr(linear, "base_layer", linear).bias for linear in linears]
    return None if biases[0] is None else torch.cat(biases).detach().to(dtype)


def _head_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // attention.head_dim
    kv_heads = attention.k_proj.out_features // attention.head_dim
    queries = attention.q_norm.weight.expand(heads, -1)
    return torch.cat([queries, attention.k_norm.weight.expand(kv_heads, -1)]).detach()


def _stored(matrices: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Transposed (out, in) matrices: on a CPU one copy that few rows are multiplied with fast, elsewhere views."""
    if matrices[0].device.type != "cpu":
        return tuple(matrix.detach().to(dtype).t() for matrix in matrices)
    joined = torch.cat(list(matrices)) if len(matrices) > 1 else matrices[0]
    return (joined.detach().to(dtype).t().contiguous(),)


def _state(network: Any) -> tuple[Any, ...]:
    """What changes whenever a weight of the text decoder, or which adapters are on, changes."""
    model = network.model.language_model
    parameters = [*model.parameters(), network.lm_head.weight]
    adapters = tuple(
        (name, linear.scaling[name])
        for layer in model.layers
        for linear in _linears(layer)
        for name in _adapters(linear)
    )
    return (
        sum(parameter._version for parameter in parameters),
        tuple(parameter.data_ptr() for parameter in parameters),
        adapters,
    )


CACHE: weakref.WeakKeyDictionary[VlmPolicy, tuple[Any, LeanWeights]] = weakref.WeakKeyDictionary()

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
