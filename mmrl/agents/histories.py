"""Keys and values of what each row of a multi-turn rollout has read, so that no turn reads it again.

A turn appends to the keys and values of its row: an observation passes the vision tower and the language model once,
and the decoder's cache of the sampled answer is appended as it is. Nothing is dropped from the middle; a row whose
history is cut restarts with another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.vlm.packing import pack_prompts
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.prefix import Prefix
from mmrl.vlm.shared_attention import ResponseRow, response_index
from mmrl.vlm.vision import gather_features

GROWTH = 1.5
"""Factor by which the tables grow where they are too small."""


@dataclass
class _KeepingRow(ResponseRow):
    """Packed rows that keep their keys and values."""

    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """By layer: keys with rotary applied and values (M, Hk, d)."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend as `ResponseRow` does."""
        self.own.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return super().attend(layer, query, key, value, scale)


class Histories:
    """Keys, values and last states of B rows, each of its own length."""

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
        """Start or restart rows (b,) after prompts that they may share; each prompt is read once."""
        read = self._policy.encode_prefix(prompts).select(prompt)
        if not self._keys:
            count = len(self.lengths)
            self._keys = [keys.new_zeros(count, keys.shape[1], 0, keys.shape[3]) for keys in read.keys]
            self._values = [values.new_zeros(count, values.shape[1], 0, values.shape[3]) for values in read.values]
            self._last_state = self._last_state.to(read.last_state.dtype)
        self.lengths[rows] = 0
        self._append(rows, read.lengths, [*zip(read.keys, read.values, strict=True)])
        self.next_position[rows] = read.next_position
        self._last_state[rows] = read.last_state.to(self._last_state.dtype)

    def extend(self, rows: Tensor, parts: Sequence[Prompt]) -> None:
        """Read the parts that were appended to some rows (b,), packed into one pass."""
        lengths = torch.tensor([len(part) for part in parts], device=rows.device)
        before = self.prefix(rows)
        index = response_index(lengths, torch.arange(len(rows), device=rows.device), len(rows))
        shared = _KeepingRow(index, before.real, before.keys, before.values)
        packed = pack_prompts(parts, rows.device)
        packed.positions = packed.positions + before.next_position.repeat_interleave(lengths)
        features = gather_features(self._policy.network.model, parts, self._policy.features)
        states = self._policy.run(packed, features, shared=shared)[0]
        first = lengths.cumsum(0) - lengths
        # From packed (M, ...) to padded (b, t, ...); what lies behind a row's end is not copied by _append.
        table = first[:, None] + torch.arange(int(lengths.max()), device=rows.device)
        table = table.clamp(max=len(states) - 1)
        self._append(rows, lengths, [(k[table].transpose(1, 2), v[table].transpose(1, 2)) for k, v in shared.own])
        self.next_position[rows] += torch.tensor([part.next_position for part in parts], device=rows.device)
        self._last_state[rows] = states[first + lengths - 1].to(self._last_state.dtype)

    def append(self, rows: Tensor, lengths: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Append sampled tokens that a decoder has read; the last state is then that before the next of them."""
        self._append(rows, lengths, [*zip(keys, values, strict=True)])
        self.next_position[rows] += lengths

    def prefix(self, rows: Tensor) -> Prefix:
        """The histories of rows (b,) as prompts to continue."""
        width = int(self.lengths[rows].max())
        return Prefix(
            keys=[keys[rows, :, :width] for keys in self._keys],
            values=[values[rows, :, :width] for values in self._values],
            lengths=self.lengths[rows],
            next_position=self.next_position[rows],
            last_state=self._last_state[rows],
        )

    def drop(self, rows: Tensor) -> None:
        """Forget rows (b,); the tables shrink once the widest rows are gone."""
        self.lengths[rows] = 0
        width = int(self.lengths.max())
        if self._keys and 2 * width < self._keys[0].shape[2]:
            self._keys = [keys[:, :, :width].clone() for keys in self._keys]
            self._values = [values[:, :, :width].clone() for values in self._values]

    def _append(self, rows: Tensor, lengths: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Write keys and values (b, Hk, t, d) of each layer after those of the rows."""
        start = self.lengths[rows]
        needed, width = int((start + lengths).max()), self._keys[0].shape[2]
        grown = max(needed, int(GROWTH * width)) if needed > width else width
        row, offset = torch.nonzero(
            torch.arange(layers[0][0].shape[2], device=rows.device) < lengths[:, None], as_tuple=True
        )
        target, column = rows[row], start[row] + offset
        for store, kind in ((self._keys, 0), (self._values, 1)):
            for layer, table in enumerate(store):
                if grown > width:
                    store[layer] = table = torch.nn.functional.pad(table, (0, 0, 0, grown - width))
                table[target, :, column] = layers[layer][kind][row, :, offset].to(table.dtype)
        self.lengths[rows] = start + lengths
