"""Lay out prompt and response tokens for one forward pass, without a loop over rows.

With shared prompts, all prompts are packed in one row without padding, and all responses in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.vlm.data.prompt import Insert, Prompt, VlmPayload, join_prompts
from mmrl.vlm.families.family import TEXT


@dataclass
class PackedRows:
    """Rows end to end, M tokens, as the language model reads them."""

    ids: Tensor
    """(1, M) int64."""
    positions: Tensor
    """(3, 1, M) int64."""
    types: Tensor
    """(1, M) int64, 0 for text, 1 for images, 2 for videos."""
    mixed: dict[str, Tensor] = field(default_factory=dict)
    """Soft tokens to read instead of sampled tokens, (1, M, ...); see `VlmPayload`."""


def pack_prompts(prompts: Sequence[Prompt], device: torch.device) -> PackedRows:
    """Concatenate prompts into one row; each keeps its own positions."""
    return PackedRows(
        ids=to_device(torch.cat([prompt.input_ids for prompt in prompts])[None], device),
        positions=to_device(torch.cat([prompt.position_ids for prompt in prompts], 1)[:, None], device),
        types=to_device(torch.cat([prompt.mm_token_type_ids for prompt in prompts])[None], device),
    )


@dataclass
class Reading:
    """R rows of at most T tokens that follow N prompts, and the M tokens in them that are scored.

    A response is usually one row after the prompt of its group. If the history lost its oldest images along the way,
    the response continues after a different prompt, in another row; each row starts at the first token read after
    its prompt.
    """

    prompts: list[Prompt]
    """N prompts."""
    view: str
    """Form of the prompts."""
    group: Tensor
    """(R,) int64, the prompt of each row."""
    tokens: Tensor
    """(R, T) int64."""
    lengths: Tensor
    """(R,) int64, number of tokens of each row that the model reads: all before the last scored one."""
    row: Tensor
    """(M,) int64, row of each scored token."""
    step: Tensor
    """(M,) int64, its index in the row."""
    inserts: list[tuple[Insert, ...]]
    """Parts of the rows that were not sampled, if they are read; empty if no row has any."""
    mixed: dict[str, Tensor]
    """Soft tokens to read instead of sampled tokens; see `VlmPayload`."""
    host_group: Tensor
    """`group` on the host."""
    host_lengths: Tensor
    """`lengths` on the host."""

    @property
    def targets(self) -> Tensor:
        """(M,) int64, the scored tokens."""
        return self.tokens[self.row, self.step]


def make_reading(
    payload: VlmPayload, view: str, group: Tensor, mask: Tensor, device: torch.device | None = None
) -> Reading:
    """Lay out the responses of the groups `group` (B,) after a view of their prompts, on a device.

    `mask` (B, T) is 1 on scored tokens; both are on the host, where the rows are laid out.
    """
    device = device or group.device
    responses = payload.response_ids[:, : mask.shape[1]].to(device)
    row, step = torch.nonzero(mask, as_tuple=True)
    inserts, prompts = payload.inserts, payload.prompts_of(view)
    if any(payload.contexts):
        # a response whose history was cut continues behind other prompts: it becomes several rows, and its tokens
        # are renumbered from the start of the row that holds them
        first, starts, group, prompts = _rows_of_contexts(payload, prompts, group)
        shifted = (starts[:, None] + torch.arange(responses.shape[1])).clamp(max=responses.shape[1] - 1)
        response = torch.repeat_interleave(first.diff())  # of each row
        responses = responses[to_device(response, device)].gather(1, to_device(shifted, device))
        # rows in order of response and start: a token belongs to the last one that starts at it or before it
        # (response, step) pairs become single sorted numbers, so that one search serves all tokens
        width = int(max(starts.max(), step.max() if len(step) else 0)) + 1
        row = torch.searchsorted(response * width + starts, row * width + step, right=True) - 1
        step = step - starts[row]
        inserts = [
            tuple(
                Insert(insert.start - start, insert.prompt)
                for insert in (inserts[number] if inserts else ())
                if insert.start >= start
            )
            for number, start in zip(response.tolist(), starts.tolist(), strict=True)
        ]
    # the last scored token of a row is predicted but predicts nothing, so its index is also the number of tokens read
    lengths = torch.zeros(len(responses), dtype=torch.int64).scatter_reduce_(0, row, step, "amax")
    if any(inserts):
        pairs = zip(inserts, lengths.tolist(), strict=True)
        # what comes after the last scored token is not read, and its images need not be encoded
        inserts = [tuple(insert for insert in own if insert.start < length) for own, length in pairs]
    read, row, step, owner = (to_device(x, device) for x in (lengths, row, step, group))
    inserts = inserts if any(inserts) else []
    mixed = {name: value.to(device) for name, value in payload.mixed.items()}
    return Reading(list(prompts), view, owner, responses, read, row, step, inserts, mixed, group, lengths)


def pack_reading(reading: Reading, rows: Tensor, device: torch.device) -> PackedRows:
    """Concatenate what is read of rows (n,) int64, on the host; each row continues the positions of its prompt."""
    lengths = reading.host_lengths[rows]
    local, column = torch.nonzero(torch.arange(reading.tokens.shape[1]) < lengths[:, None], as_tuple=True)
    groups = reading.host_group[rows].tolist()
    first = torch.tensor([reading.prompts[group].next_position for group in groups])
    positions, types = (first[local] + column).expand(3, -1), torch.full_like(column, TEXT)
    if reading.inserts:
        parts = zip(lengths.tolist(), first.tolist(), (reading.inserts[row] for row in rows.tolist()), strict=True)
        found = [_positions(*part) for part in parts]
        positions, types = torch.cat([own for own, _ in found], 1), torch.cat([own for _, own in found])
    row, column = to_device(rows[local], device), to_device(column, device)
    return PackedRows(
        ids=reading.tokens[row, column][None],
        positions=to_device(positions[:, None], device),
        types=to_device(types[None], device),
        mixed={name: value[row, column][None] for name, value in reading.mixed.items()},
    )


def joined_rows(reading: Reading) -> list[Prompt]:
    """Join each prompt with the tokens of its row that are read, as one prompt."""
    tokens, groups, lengths = reading.tokens.cpu(), reading.host_group.tolist(), reading.host_lengths.tolist()
    inserts = reading.inserts or [()] * len(groups)
    return [
        join_prompts([reading.prompts[group], *split_row(row[:length], own)])
        for row, group, length, own in zip(tokens, groups, lengths, inserts, strict=True)
    ]


def split_row(tokens: Tensor, inserts: Sequence[Insert]) -> list[Prompt]:
    """Split a row (T,) of tokens into prompts: sampled text and inserts in order."""
    parts, start = [], 0
    for insert in inserts:
        parts += [text_prompt(tokens[start : insert.start]), insert.prompt]
        start = insert.stop
    return [part for part in (*parts, text_prompt(tokens[start:])) if len(part)]


def text_prompt(tokens: Tensor) -> Prompt:
    """A prompt of text tokens (T,) without images, at positions from 0."""
    positions = torch.arange(len(tokens)).expand(3, -1)
    return Prompt(tokens, torch.full_like(tokens, TEXT), positions, len(tokens))


def _positions(length: int, start: int, inserts: Sequence[Insert]) -> tuple[Tensor, Tensor]:
    """Rotary positions (3, length) and token types (length,) of a row."""
    positions = start + torch.arange(length).repeat(3, 1)
    types = torch.full((length,), TEXT)
    for insert in inserts:
        own = slice(insert.start, insert.stop)
        # the insert counts from its own start; it is moved to where the row has come to by now
        offset = int(positions[0, insert.start]) - int(insert.prompt.position_ids.min())
        positions[:, own] = insert.prompt.position_ids + offset
        types[own] = insert.prompt.mm_token_type_ids
        # an image spans fewer positions than tokens, so everything behind it moves
        positions[:, insert.stop :] = insert.prompt.next_position + offset + torch.arange(length - insert.stop)
    return positions, types


def _rows_of_contexts(
    payload: VlmPayload, prompts: Sequence[Prompt], group: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Prompt]]:
    """One row for each response, followed by one for each of its contexts.

    Returns the first row of each response and the number of rows (B + 1,), the index in the response at which each row
    starts (R,), the prompt of each row (R,), and all prompts.
    """
    prompts, starts, groups, first = list(prompts), [], [], [0]
    # prompts of contexts are appended behind those of the groups, whose indices therefore stay valid
    for own, contexts in zip(group.tolist(), payload.contexts, strict=True):
        starts += [0, *(context.start for context in contexts)]
        groups += [own, *range(len(prompts), len(prompts) + len(contexts))]
        prompts += [context.prompt for context in contexts]
        first.append(len(starts))
    tables = (torch.tensor(table, device=group.device) for table in (first, starts, groups))
    return *tables, prompts  # type: ignore[return-value]
