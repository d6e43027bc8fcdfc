"""Trajectories as rows of rollouts: the sampled turns, with the observations between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.vlm.payload import Context, Insert, Prompt


@dataclass
class Trajectory:
    """The tokens of one trajectory after its first prompt, in the order in which the model reads them."""

    ids: list[int] = field(default_factory=list)
    """Sampled and given tokens."""
    logp: list[float] = field(default_factory=list)
    """Log-probability in nats of each sampled token; 0 for given ones."""
    turn: list[int] = field(default_factory=list)
    """Turn of each token; an observation belongs to the turn after it."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token."""
    inserts: list[Insert] = field(default_factory=list)
    """Observations between the turns."""
    contexts: list[Context] = field(default_factory=list)
    """Where the history was cut and the trajectory continues after another prompt."""
    turns: int = 0
    """Turns sampled so far."""
    bootstrap_index: int | None = None
    """Index of the token after the last observation, whose state value the critic is asked for."""

    def add_turn(self, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append the tokens that the policy sampled in a turn."""
        self._append(ids, logp, sampled=True)
        self.turns += 1

    def add_given(self, prompt: Prompt) -> None:
        """Append what the agent is given before its next turn."""
        self.inserts.append(Insert(len(self.ids), prompt))
        self._append(prompt.input_ids.tolist(), [0.0] * len(prompt), sampled=False)

    def restart(self, prompt: Prompt) -> None:
        """Continue after another prompt, which replaces everything up to here."""
        self.contexts.append(Context(len(self.ids), prompt))

    def add_bootstrap_observation(self, prompt: Prompt, restart: bool = False) -> None:
        """Append the observation after the last action, so that a critic can value the state of a truncated episode."""
        self.restart(prompt) if restart else self.add_given(prompt)
        self.bootstrap_index = len(self.ids)
        # A value belongs to the state before a token: a copy of the last sampled one stands for the next answer.
        last = next(token for token, sampled in zip(self.ids[::-1], self.sampled[::-1], strict=True) if sampled)
        self._append([last], [0.0], sampled=False)

    def last_tokens(self) -> list[int]:
        """Index of the last sampled token of each turn."""
        found = {turn: index for index, turn in enumerate(self.turn) if self.sampled[index]}
        return [found[turn] for turn in sorted(found)]

    def _append(self, ids: Sequence[int], logp: Sequence[float], *, sampled: bool) -> None:
        self.ids += ids
        self.logp += logp
        self.turn += [self.turns] * len(ids)
        self.sampled += [sampled] * len(ids)


@dataclass
class TokenTable:
    """B trajectories side by side, right-padded to the longest, T tokens."""

    ids: Tensor
    """(B, T) int64."""
    mask: Tensor
    """(B, T) float32, 1 on sampled tokens."""
    logp: Tensor
    """(B, T) float32, 0 where nothing was sampled."""
    turn: Tensor
    """(B, T) int64, -1 on padding."""
    inserts: list[tuple[Insert, ...]]
    contexts: list[tuple[Context, ...]]


def tabulate_tokens(rows: Sequence[Trajectory], pad_id: int, device: torch.device | str = "cpu") -> TokenTable:
    """Pad trajectories to one table."""
    width = max([1, *(len(row.ids) for row in rows)])

    def table(columns: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
        padded = [[*column, *[padding] * (width - len(column))] for column in columns]
        return torch.tensor(padded, dtype=dtype, device=device)

    return TokenTable(
        ids=table([row.ids for row in rows], pad_id, torch.int64),
        mask=table([row.sampled for row in rows], 0, torch.float32),
        logp=table([row.logp for row in rows], 0.0, torch.float32),
        turn=table([row.turn for row in rows], -1, torch.int64),
        inserts=[tuple(row.inserts) for row in rows],
        contexts=[tuple(row.contexts) for row in rows],
    )
