"""What rows of a multi-turn rollout have read so far, so that no turn reads it again.

A turn appends to the keys and values of its row: what the row was given since the last turn passes the vision tower and
the language model once, and what it then samples is appended as the decoder leaves it. Nothing is ever dropped from the
middle; a row whose history is cut starts again with another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.vlm.packing import PackedRows, pack_prompts
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.prefix import Prefix
from mmrl.vlm.shared_attention import ResponseRow, response_index
from mmrl.vlm.vision import gather_features


@dataclass
class _KeepingRow(ResponseRow):
    """Rows that leave their keys and values, packed."""

    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """By layer: keys with rotary applied and values (M, Hk, d)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """See `ResponseRow`."""
        self.own.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return super().attend(layer, query, key, value, scale)


class Histories:
    """Keys, values and last states of B rows, each as long as it happens to be."""

    def __init__(self, policy: VlmPolicy, rows: int) -> None:
        self._policy = policy
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        device = policy.device
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """(B,) int64, tokens that each row has read."""
        self.next_position = torch.zeros(rows, dtype=torch.int64, device=device)
        """(B,) int64, rotary position of each row's next token."""
        self._last_state = torch.zeros(rows, policy.network.lm_head.in_features, device=device)

    def begin(self, rows: Tensor, prompts: Sequence[Prompt], prompt: Tensor) -> None:
        """Start rows anew behind prompts that they may share; each prompt is read once."""
        read = self._policy.encode_prefix(prompts).select(prompt)
        if not self._keys:
            self._make_room_like(read)
        self.lengths[rows] = 0
        self._append(rows, read.lengths, [*zip(read.keys, read.values, strict=True)])
        self.next_position[rows] = read.next_position
        self._last_state[rows] = read.last_state.to(self._last_state.dtype)

    def extend(self, rows: Tensor, parts: Sequence[Prompt]) -> None:
        """Read what was put behind some rows."""
        lengths = torch.tensor([len(part) for part in parts], device=rows.device)
        before = self.prefix(rows)
        index = response_index(lengths, torch.arange(len(rows), device=rows.device), len(rows))
        shared = _KeepingRow(index, before.real, before.keys, before.values)
        packed = _shifted(pack_prompts(parts, rows.device), before.next_position, lengths)
        features = gather_features(self._policy.network.model, parts, self._policy.features)
        states = self._policy.run(packed, features, shared=shared)[0]
        width = int(lengths.max())
        place = lengths.cumsum(0) - lengths
        table = (place[:, None] + torch.arange(width, device=rows.device)).clamp(max=len(states) - 1)
        self._append(rows, lengths, [(k[table].transpose(1, 2), v[table].transpose(1, 2)) for k, v in shared.own])
        steps = torch.tensor([part.next_position for part in parts], device=rows.device)
        self.next_position[rows] += steps
        self._last_state[rows] = states[place + lengths - 1].to(self._last_state.dtype)

    def append(self, rows: Tensor, lengths: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Append sampled tokens that a decoder has read; the last state is then that before the next of them."""
        self._append(rows, lengths, [*zip(keys, values, strict=True)])
        self.next_position[rows] += lengths

    def prefix(self, rows: Tensor) -> Prefix:
        """What rows (b,) have read, as the prompts that are continued."""
        width = int(self.lengths[rows].max())
        return Prefix(
            keys=[keys[rows, :, :width] for keys in self._keys],
            values=[values[rows, :, :width] for values in self._values],
            lengths=self.lengths[rows],
            next_position=self.next_position[rows],
            last_state=self._last_state[rows],
        )

    def drop(self, rows: Tensor) -> None:
        """Forget rows (b,) that are not continued; their room is kept for others until the widest are gone."""
        self.lengths[rows] = 0
        width = int(self.lengths.max())
        if self._keys and 2 * width < self._keys[0].shape[2]:
            self._keys = [keys[:, :, :width].clone() for keys in self._keys]
            self._values = [values[:, :, :width].clone() for values in self._values]

    def _make_room_like(self, prefix: Prefix) -> None:
        rows = len(self.lengths)
        self._keys = [keys.new_zeros(rows, keys.shape[1], 0, keys.shape[3]) for keys in prefix.keys]
        self._values = [values.new_zeros(rows, values.shape[1], 0, values.shape[3]) for values in prefix.values]
        self._last_state = self._last_state.to(prefix.last_state.dtype)

    def _append(self, rows: Tensor, lengths: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values (b, Hk, t, d) of each layer behind what the rows have."""
        start = self.lengths[rows]
        needed = int((start + lengths).max())
        if needed > self._keys[0].shape[2]:
            self._widen(max(needed, int(GROWTH * self._keys[0].shape[2])))
        row, offset = torch.nonzero(
            torch.arange(layers[0][0].shape[2], device=rows.device) < lengths[:, None], as_tuple=True
        )
        target, column = rows[row], start[row] + offset
        for store, number in ((self._keys, 0), (self._values, 1)):
            for layer, table in enumerate(store):
                table[target, :, column] = layers[layer][number][row, :, offset].to(table.dtype)
        self.lengths[rows] = start + lengths

    def _widen(self, width: int) -> None:
        for store in (self._keys, self._values):
            for layer, old in enumerate(store):
                store[layer] = torch.nn.functional.pad(old, (0, 0, 0, width - old.shape[2]))


def _shifted(packed: PackedRows, start: Tensor, lengths: Tensor) -> PackedRows:
    """Packed parts (b) with their positions counted from `start` (b,)."""
    packed.positions = packed.positions + start.repeat_interleave(lengths)
    return packed


GROWTH = 1.5
"""Room for so many times as many tokens is made where there is too little."""
