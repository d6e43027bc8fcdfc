"""Trajectories as rows of rollouts: the turns that were sampled, with what the agent saw between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.vlm.payload import Context, Insert, Prompt


@dataclass
class Trajectory:
    """The tokens of one trajectory behind its first prompt, in the order in which the model reads them."""

    ids: list[int] = field(default_factory=list)
    """Sampled and given tokens."""
    logp: list[float] = field(default_factory=list)
    """Log-probability in nats of each sampled token; 0 for given ones."""
    turn: list[int] = field(default_factory=list)
    """Turn of each token; what is given before a turn belongs to it."""
    sampled: list[bool] = field(default_factory=list)
    """Whether the policy sampled the token."""
    inserts: list[Insert] = field(default_factory=list)
    """What was given between the turns."""
    contexts: list[Context] = field(default_factory=list)
    """Where the history was cut and the trajectory goes on behind another prompt."""
    turns: int = 0
    """Turns sampled so far."""
    outlook: int | None = None
    """Place of a token behind what was seen after the last action, which nobody reads; see `end_in`."""

    def add_turn(self, ids: Sequence[int], logp: Sequence[float]) -> None:
        """Append what the policy sampled in a turn."""
        self.ids += ids
        self.logp += logp
        self.turn += [self.turns] * len(ids)
        self.sampled += [True] * len(ids)
        self.turns += 1

    def add_given(self, prompt: Prompt) -> None:
        """Append what the agent is given before its next turn."""
        self.inserts.append(Insert(len(self.ids), prompt))
        self.ids += prompt.input_ids.tolist()
        self.logp += [0.0] * len(prompt)
        self.turn += [self.turns] * len(prompt)
        self.sampled += [False] * len(prompt)

    def restart(self, prompt: Prompt) -> None:
        """Go on behind another prompt, which stands for everything up to here."""
        self.contexts.append(Context(len(self.ids), prompt))

    def end_in(self, seen: Prompt, anew: bool = False) -> None:
        """Append what the agent saw after its last action, so that a critic can be asked for the value of that state.

        A value belongs to the state before a token, so a token is appended that stands for the next answer.
        """
        self.restart(seen) if anew else self.add_given(seen)
        self.outlook = len(self.ids)
        self.ids.append(next(id_ for id_, sampled in zip(self.ids[::-1], self.sampled[::-1], strict=True) if sampled))
        self.logp.append(0.0)
        self.turn.append(self.turns)
        self.sampled.append(False)

    def last_tokens(self) -> list[int]:
        """Place of the last sampled token of each turn."""
        found: dict[int, int] = {}
        for place, (turn, sampled) in enumerate(zip(self.turn, self.sampled, strict=True)):
            if sampled:
                found[turn] = place
        return [found[turn] for turn in sorted(found)]


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
    """Lay trajectories side by side."""
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
