"""Rows of prompt and response tokens for one forward pass, built without a loop over rows.

Flat rows are a prompt followed directly by its response, padded only on the right. No token that counts comes
after a pad, so the causal mask alone keeps padding out and no attention mask is needed. Where prompts are shared,
all prompts stand in one row without padding, and all responses in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.vlm.payload import Prompt


@dataclass
class PromptTable:
    """N prompts, one a row, right-padded to the longest, P tokens."""

    ids: Tensor
    """(N, P) int64."""
    positions: Tensor
    """(3, N, P) int64."""
    feature: Tensor
    """(N, P) int64, row of the feature table that a token is replaced by; -1 for text and padding."""
    lengths: Tensor
    """(N,) int64."""
    next_position: Tensor
    """(N,) int64, rotary position of the first response token."""


@dataclass
class PackedRows:
    """B rows of L tokens as the language model reads them."""

    ids: Tensor
    """(B, L) int64."""
    positions: Tensor
    """(3, B, L) int64."""
    visual: Tensor
    """(B, L) bool, tokens that stand for a feature of the vision tower."""
    features: Tensor
    """(n,) int64, row of the feature table for each True of `visual`, row by row."""


def tabulate(prompts: Sequence[Prompt], pad_id: int, device: torch.device) -> PromptTable:
    """Prompts as a padded table."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), pad_id)
    types = torch.zeros((len(prompts), width), dtype=torch.int64)
    positions = torch.zeros((3, len(prompts), width), dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        ids[index, : len(prompt)] = prompt.input_ids
        types[index, : len(prompt)] = prompt.mm_token_type_ids
        positions[:, index, : len(prompt)] = prompt.position_ids
    visual = types > 0
    numbers = visual.flatten().cumsum(0).view_as(types) - 1
    return PromptTable(
        ids=ids.to(device),
        positions=positions.to(device),
        feature=numbers.masked_fill(~visual, -1).to(device),
        lengths=torch.tensor([len(prompt) for prompt in prompts], device=device),
        next_position=torch.tensor([prompt.next_position for prompt in prompts], device=device),
    )


def pack_rows(table: PromptTable, group: Tensor, responses: Tensor, lengths: Tensor, pad_id: int) -> PackedRows:
    """Put each row's response (B, T) int64, of which `lengths` (B,) are read, behind the prompt `group` (B,)."""
    prompt_lengths = table.lengths[group][:, None]
    width = int((prompt_lengths[:, 0] + lengths).max())
    column = torch.arange(width, device=group.device)[None]
    in_prompt = column < prompt_lengths
    offset = column - prompt_lengths  # token of the response
    # every column is looked up in both tables, clamped to where they have one, and the right one is chosen
    inner = column.clamp(max=table.ids.shape[1] - 1).expand(len(group), -1)
    ids = table.ids[group].gather(1, inner)
    if responses.shape[1]:
        tail = responses.gather(1, offset.clamp(0, responses.shape[1] - 1))
        ids = torch.where(in_prompt, ids, tail)
    ids = ids.masked_fill(offset >= lengths[:, None], pad_id)
    prompt_positions = table.positions[:, group].gather(2, inner[None].expand(3, -1, -1))
    positions = torch.where(in_prompt, prompt_positions, table.next_position[group][:, None] + offset)
    feature = table.feature[group].gather(1, inner).masked_fill(~in_prompt, -1)
    visual = feature >= 0
    return PackedRows(ids=ids, positions=positions, visual=visual, features=feature[visual])


def pack_prompts(prompts: Sequence[Prompt], device: torch.device) -> PackedRows:
    """Prompts end to end in one row."""
    visual = torch.cat([prompt.mm_token_type_ids for prompt in prompts]) > 0
    return PackedRows(
        ids=torch.cat([prompt.input_ids for prompt in prompts])[None].to(device),
        positions=torch.cat([prompt.position_ids for prompt in prompts], 1)[:, None].to(device),
        visual=visual[None].to(device),
        features=torch.arange(int(visual.sum()), device=device),
    )


def pack_responses(responses: Tensor, lengths: Tensor, first_position: Tensor) -> PackedRows:
    """Responses (B, T) end to end in one row: `lengths` (B,) tokens of each, rotary positions from `first_position`."""
    column = torch.arange(responses.shape[1], device=responses.device)
    read = column < lengths[:, None]
    ids = responses[read][None]
    positions = (first_position[:, None] + column)[read].expand(3, 1, -1)
    nothing = torch.zeros(0, dtype=torch.int64, device=ids.device)
    return PackedRows(ids, positions, torch.zeros_like(ids, dtype=torch.bool), nothing)
