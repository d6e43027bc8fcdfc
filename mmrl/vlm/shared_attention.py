"""Packed rows of prompts and of responses, and the language model's attention over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.vlm.joined_attention import joined_attention

ATTENTION_NAME = "mmrl_shared_prefix"
"""Name under which transformers finds the attention function."""


def register_attention() -> str:
    """Make the attention function known to transformers.

    All prompts of a batch pass the language model end to end in one row, all responses in another, so no layer computes
    padding; only inside attention do they become padded tables. The attention layers get the layout as the argument
    `shared`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return ATTENTION_NAME


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared: PromptRow | ResponseRow | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if shared is not None:
        return shared.attend(module.layer_idx, query, key, value, options.get("scaling")), None
    from transformers import AttentionInterface

    q, k, v = _workable(query, key, value)
    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(q.dtype)
    with _no_autocast(q):
        out, _ = AttentionInterface()["sdpa"](module, q, k, v, attention_mask, **options)
    return out.to(query.dtype), None


def _workable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in one precision that attention kernels can be trusted with.

    Under autocast rotated keys are float32 and values low precision. On the CPU low precision is avoided: its
    backward kernel needs instructions that some virtual machines announce and then refuse, which ends the process.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        tensors = tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
    low = tensors[0].dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if device == "cpu" and low else tensors[0].dtype
    return tuple(x.to(dtype) for x in tensors)


def _no_autocast(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, enabled=False)


@dataclass(frozen=True)
class PackedIndex:
    """Indices from a packed row to a padded table, and back."""

    index: Tensor | None
    """Table of token numbers, 0 on padding; None where the table without padding is the row itself."""
    inverse: Tensor | None
    """(M,) place of each token in the flattened table."""
    real: Tensor | None
    """Bool table, False on padding; None where nothing is padded."""
    shape: tuple[int, ...]
    """Shape of the table."""

    def gather(self, x: Tensor) -> Tensor:
        """Tokens (M, ...) as a table (*shape, ...)."""
        return x.unflatten(0, self.shape) if self.index is None else x[self.index]

    def scatter(self, table: Tensor) -> Tensor:
        """The table's tokens (*shape, ...) as a row (M, ...)."""
        flat = table.flatten(0, len(self.shape) - 1)
        return flat if self.inverse is None else flat[self.inverse]


def prompt_index(lengths: Tensor) -> PackedIndex:
    """Index of N prompts of `lengths` (N,), packed one after another, in a table (N, P)."""
    count, width = len(lengths), int(lengths.max())
    if bool((lengths == width).all()):
        return PackedIndex(None, None, None, (count, width))
    column = torch.arange(width, device=lengths.device)
    real = column < lengths[:, None]
    starts = lengths.cumsum(0) - lengths
    index = (starts[:, None] + column).masked_fill(~real, 0)
    return PackedIndex(index, torch.nonzero(real.flatten()).flatten(), real, (count, width))


def response_index(lengths: Tensor, group: Tensor, prompts: int) -> PackedIndex:
    """Index of B responses of `lengths` (B,) to the prompts `group` (B,), packed, in a table (N, G, T)."""
    sizes = torch.bincount(group, minlength=prompts)
    width, most = int(lengths.max()), int(sizes.max())
    shape = (prompts, most, width)
    in_order = bool((group == torch.arange(len(group), device=group.device) // most).all())
    if in_order and len(group) == prompts * most and bool((lengths == width).all()):
        return PackedIndex(None, None, None, shape)
    order = torch.argsort(group, stable=True)
    rank = torch.empty_like(group)
    rank[order] = torch.arange(len(group), device=group.device) - (sizes.cumsum(0) - sizes)[group[order]]
    row = torch.full((prompts, most), -1, dtype=torch.int64, device=group.device)
    row[group, rank] = torch.arange(len(group), device=group.device)
    column = torch.arange(width, device=group.device)
    real = (row >= 0)[..., None] & (column < lengths[row.clamp(min=0)][..., None])
    starts = (lengths.cumsum(0) - lengths)[row.clamp(min=0)]
    index = (starts[..., None] + column).masked_fill(~real, 0)
    inverse = torch.empty(int(lengths.sum()), dtype=torch.int64, device=group.device)
    inverse[index[real]] = torch.nonzero(real.flatten()).flatten()
    return PackedIndex(index, inverse, real, shape)


@dataclass
class PromptRow:
    """N prompts in one row: each attends to itself, causally, and leaves its keys and values."""

    places: PackedIndex
    keys: dict[int, Tensor] = field(default_factory=dict)
    """By layer: (N, Hk, P, d), rotary applied."""
    values: dict[int, Tensor] = field(default_factory=dict)
    """By layer: (N, Hk, P, d)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention (1, M, H, d) of a layer for query (1, H, M, d), key and value (1, Hk, M, d), rotary applied."""
        q, k, v = (self.places.gather(x[0].transpose(0, 1)).transpose(1, 2) for x in _workable(query, key, value))
        if layer not in self.keys:  # a recomputed layer must not replace what the responses already read
            self.keys[layer], self.values[layer] = k, v
        with _no_autocast(q):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return self.places.scatter(out.transpose(1, 2))[None].to(query.dtype)


@dataclass
class ResponseRow:
    """B responses in one row: each attends to its prompt and, causally, to itself."""

    places: PackedIndex
    prompt_real: Tensor | None
    """(N, P) bool, False on the padding of the prompts; None where they are equally long."""
    keys: list[Tensor]
    """By layer: (N, Hk, P, d) of the prompts, rotary applied."""
    values: list[Tensor]
    """By layer: (N, Hk, P, d)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention (1, M, H, d) of a layer for query (1, H, M, d), key and value (1, Hk, M, d), rotary applied.

        Gradient: into query, key and value, and into the prompts' keys and values, there summed over the group.
        """
        own = [self.places.gather(x[0].transpose(0, 1)) for x in (query, key, value)]
        q, k, v, prompt_k, prompt_v = _workable(*own, self.keys[layer], self.values[layer])
        size = query.shape[-1] ** -0.5 if scale is None else scale
        with _no_autocast(query):
            out = joined_attention(q, k, v, prompt_k, prompt_v, self.prompt_real, size)
        return self.places.scatter(out)[None].to(query.dtype)
