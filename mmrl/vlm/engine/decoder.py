"""Decode rows token by token, from a repeated cache or from prompts that a group shares."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from mmrl.core.transfer import to_device
from mmrl.vlm.engine.attention import TokenRows
from mmrl.vlm.engine.prefix import CachedPart


class Decoder(Protocol):
    """Rows that are decoded together."""

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,), which is on the CPU."""

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""


class CacheDecoder:
    """Rows that are decoded together; `part` are their prompts, one a row, in a separate cache."""

    def __init__(self, policy: Any, reader: Any, part: CachedPart) -> None:
        self._policy, self._reader, self._part = policy, reader, part

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._part = self._part.select(to_device(index, self._part.lengths.device))

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""
        return self._reader.advance(self._policy, token[:, None], self._part)[:, -1]  # type: ignore[no-any-return]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)  # type: ignore[no-any-return]


class GroupDecoder:
    """Rows that share the keys and values of their prompts, as in Hydragen (arXiv 2402.05099).

    Args:
        policy: the model.
        reader: its `ModelReader`, whose `joins` is True.
        part: N prompts.
        prompt: (b,) int64 on the CPU, the prompt of each row in ascending order; every prompt has a row.
    """

    def __init__(self, policy: Any, reader: Any, part: CachedPart, prompt: Tensor) -> None:
        self._policy, self._reader = policy, reader
        layers = part.cache.layers
        self._rows = TokenRows([layer.keys for layer in layers], [layer.values for layer in layers], part.real, prompt)
        self._position = part.next_position[to_device(prompt, part.next_position.device)]

    def keep(self, index: Tensor) -> None:
        """Keep only the rows `index` (n,) and their prompts."""
        self._rows.keep(index)
        self._position = self._position[to_device(index, self._position.device)]

    def cached(self, index: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of the tokens that rows (n,) have read, for each layer (n, Hk, t, d)."""
        return self._rows.cached(index)

    def advance(self, token: Tensor) -> Tensor:
        """Read one token (b,), or embedding (b, H), of each row; returns the states (b, H) that predict the next."""
        self._rows.begin_step()
        position = self._position[:, None]
        self._position = self._position + 1
        states: Tensor = self._reader.run_shared(self._policy, token[:, None], position.expand(3, -1, -1), self._rows)
        return states[:, -1]

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""
        return self._policy.next_logp(states, temperature)  # type: ignore[no-any-return]


def make_decoder(policy: Any, reader: Any, part: CachedPart, prompt: Tensor) -> CacheDecoder | GroupDecoder:
    """A decoder of rows whose prompts in a part are `prompt` (b,) int64, ascending, on the CPU."""
    live, own = torch.unique_consecutive(prompt, return_inverse=True)
    if reader.joins(policy):
        return GroupDecoder(policy, reader, part if len(live) == len(part.lengths) else part.select(live), own)
    return CacheDecoder(policy, reader, part.select(prompt))
