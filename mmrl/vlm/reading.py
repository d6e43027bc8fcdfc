"""What the model reads to score responses: rows of tokens behind prompts, with the tokens whose scores are wanted.

A response is usually one row behind the prompt of its group. One that goes on behind other prompts, because its history
lost its oldest pictures, is several rows: each is read behind its own prompt and holds the tokens from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.vlm.packing import PackedRows
from mmrl.vlm.payload import Insert, Prompt, VlmPayload, join_prompts
from mmrl.vlm.rotary import TEXT


@dataclass
class Reading:
    """R rows of at most T tokens behind N prompts, and M tokens of them that are scored."""

    prompts: list[Prompt]
    """N prompts."""
    view: str
    """Form of the prompts."""
    group: Tensor
    """(R,) int64, the prompt of each row."""
    tokens: Tensor
    """(R, T) int64."""
    lengths: Tensor
    """(R,) int64, tokens of each row that the model reads: those before the last one that is scored."""
    row: Tensor
    """(M,) int64, row of each scored token."""
    step: Tensor
    """(M,) int64, its place in the row."""
    inserts: list[tuple[Insert, ...]]
    """What the rows hold that was not sampled, as far as it is read; empty where no row holds anything."""

    @property
    def targets(self) -> Tensor:
        """(M,) int64, the scored tokens."""
        return self.tokens[self.row, self.step]


def make_reading(payload: VlmPayload, view: str, group: Tensor, mask: Tensor) -> Reading:
    """Lay the responses out as rows.

    Args:
        payload: prompts of N groups and responses of B rows.
        view: "original" or a key of the payload's views.
        group: (B,) int64.
        mask: (B, T) float, 1 on the tokens that are scored.
    """
    device = group.device
    responses = payload.response_ids[:, : mask.shape[1]].to(device)
    row, step = torch.nonzero(mask, as_tuple=True)
    inserts = payload.inserts
    prompts = payload.prompts_of(view)
    if any(payload.contexts):
        first, starts, group, prompts = _rows_of_contexts(payload, prompts, group)
        shifted = starts[:, None] + torch.arange(responses.shape[1], device=device)
        response = torch.repeat_interleave(first.diff())
        responses = responses[response].gather(1, shifted.clamp(max=responses.shape[1] - 1))
        row, step = _places_in_contexts(first, starts, row, step)
        inserts = [
            _within(inserts, number, start) for number, start in zip(response.tolist(), starts.tolist(), strict=True)
        ]
    # the last token of a row is predicted but predicts nothing
    lengths = torch.zeros(len(responses), dtype=torch.int64, device=device).scatter_reduce_(0, row, step, "amax")
    if any(inserts):
        pairs = zip(inserts, lengths.tolist(), strict=True)
        inserts = [tuple(insert for insert in own if insert.start < length) for own, length in pairs]
    return Reading(list(prompts), view, group, responses, lengths, row, step, inserts if any(inserts) else [])


def pack_reading(reading: Reading, first_position: Tensor) -> PackedRows:
    """Lay the rows end to end in one row, with their pictures.

    Args:
        reading: R rows.
        first_position: (R,) int64, rotary position of each row's first token.
    """
    device = reading.tokens.device
    column = torch.arange(reading.tokens.shape[1], device=device)
    read = column < reading.lengths[:, None]
    ids = reading.tokens[read][None]
    if not reading.inserts:
        positions = (first_position[:, None] + column)[read].expand(3, 1, -1)
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return PackedRows(ids, positions, torch.zeros_like(ids, dtype=torch.bool), nothing)
    starts = first_position.tolist()
    rows = [
        _positions(length, start, inserts)
        for length, start, inserts in zip(reading.lengths.tolist(), starts, reading.inserts, strict=True)
    ]
    visual = torch.cat([types for _, types in rows]).to(device)[None] != TEXT
    return PackedRows(
        ids=ids,
        positions=torch.cat([positions for positions, _ in rows], 1)[:, None].to(device),
        visual=visual,
        features=torch.arange(int(visual.sum()), device=device),
    )


def joined_rows(reading: Reading) -> list[Prompt]:
    """Each row behind its prompt as one prompt, as far as it is read."""
    tokens, groups, lengths = reading.tokens.cpu(), reading.group.tolist(), reading.lengths.tolist()
    inserts = reading.inserts or [()] * len(groups)
    return [
        join_prompts([reading.prompts[group], *split_row(row[:length], own)])
        for row, group, length, own in zip(tokens, groups, lengths, inserts, strict=True)
    ]


def split_row(tokens: Tensor, inserts: Sequence[Insert]) -> list[Prompt]:
    """A row (T,) of tokens as prompts: what was sampled as text, and the inserts between."""
    parts, place = [], 0
    for insert in inserts:
        parts += [text_prompt(tokens[place : insert.start]), insert.prompt]
        place = insert.stop
    return [part for part in (*parts, text_prompt(tokens[place:])) if len(part)]


def text_prompt(tokens: Tensor) -> Prompt:
    """Tokens (T,) without pictures as a prompt; its positions begin at 0."""
    positions = torch.arange(len(tokens)).expand(3, -1)
    return Prompt(tokens, torch.full_like(tokens, TEXT), positions, len(tokens), None, None)


def _positions(length: int, start: int, inserts: Sequence[Insert]) -> tuple[Tensor, Tensor]:
    """Rotary positions (3, length) and token types (length,) of a row."""
    positions = start + torch.arange(length).repeat(3, 1)
    types = torch.full((length,), TEXT)
    for insert in inserts:
        own = slice(insert.start, insert.stop)
        offset = int(positions[0, insert.start]) - int(insert.prompt.position_ids.min())
        positions[:, own] = insert.prompt.position_ids + offset
        types[own] = insert.prompt.mm_token_type_ids
        behind = length - insert.stop
        positions[:, insert.stop :] = insert.prompt.next_position + offset + torch.arange(behind)
    return positions, types


def _rows_of_contexts(
    payload: VlmPayload, prompts: Sequence[Prompt], group: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Prompt]]:
    """A row for each response, and one for each of its contexts behind it.

    Returns:
        (B + 1,) the first row of each response and the number of rows, (R,) the place in the response where each row
        starts, (R,) the prompt of each row, and all prompts.
    """
    prompts, starts, groups, first = list(prompts), [], [], [0]
    for own, contexts in zip(group.tolist(), payload.contexts, strict=True):
        starts += [0, *(context.start for context in contexts)]
        groups += [own, *range(len(prompts), len(prompts) + len(contexts))]
        prompts += [context.prompt for context in contexts]
        first.append(len(starts))
    tables = (torch.tensor(table, device=group.device) for table in (first, starts, groups))
    return *tables, prompts  # type: ignore[return-value]


def _places_in_contexts(first: Tensor, starts: Tensor, row: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place of the tokens (M,) once each response is cut into its contexts."""
    response = torch.repeat_interleave(first.diff())
    width = int(max(starts.max(), step.max() if len(step) else 0)) + 1
    # rows in order of response and start: the last one that starts at the token or before it
    found = torch.searchsorted(response * width + starts, row * width + step, right=True) - 1
    return found, step - starts[found]


def _within(inserts: Sequence[tuple[Insert, ...]], response: int, start: int) -> tuple[Insert, ...]:
    """The inserts of a response behind some token, with their places counted from there."""
    own = inserts[response] if inserts else ()
    return tuple(Insert(insert.start - start, insert.prompt) for insert in own if insert.start >= start)
