"""Transitions of robot episodes: their form in memory, and a memory-mapped file from which batches are drawn.

Shapes: n transitions of an episode, B of a batch, S entries of the policy's state, F of the critic's, K control steps
of a chunk, A entries of an action.

A transition is one decision of the policy: the observation before a chunk of K actions, the actions as they were
executed, the environment's reward of each control step, and the observation after the last executed step. An episode
that ends within a chunk executes h < K steps of it; the remaining actions are those that the policy chose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmrl.errors import UserError


@dataclass(frozen=True)
class TransitionForm:
    """Sizes of the parts of a transition."""

    state: int
    """S."""
    full: int
    """F; 0 if the critic reads the policy's state."""
    chunk: int
    """K."""
    action: int
    """A."""
    noise: tuple[int, int] | None = None
    """Shape of the noise that critics judge instead of the actions, for a policy that chooses it; None without."""
    watched: bool = False
    """Whether records say who chose the actions, for episodes that an overseer watches."""
    demonstrated: bool = False
    """Whether records of demonstrations also have the actions to imitate, which may differ from the executed ones."""

    @property
    def judged(self) -> tuple[int, int]:
        """Shape of what critics judge: (K, A), or that of the noise."""
        return self.noise or (self.chunk, self.action)

    @property
    def dtype(self) -> np.dtype[np.void]:
        """A transition as one record, so that a batch gathers each row from one place."""
        seen = [("state", np.float32, (self.state,)), ("full", np.float32, (self.full,))]
        following = [(f"next_{name}", dtype, shape) for name, dtype, shape in seen]
        chunk = [("actions", np.float32, self.judged), ("rewards", np.float32, (self.chunk,))]
        chunk += [("demonstrated", np.float32, (self.chunk, self.action))] if self.demonstrated else []
        # the reward before the chunk, for rewards that are differences of a potential
        numbers = [("before", np.float32), ("steps", np.int32), ("task", np.int32)]
        watched = [("by_overseer", np.dtype(np.bool_))] if self.watched else []
        return np.dtype(
            [*seen, *chunk, *following, *numbers, *watched, ("terminated", np.bool_), ("success", np.bool_)]
        )


@dataclass(frozen=True)
class Experience:
    """One finished episode of n decisions; all float32."""

    states: NDArray[np.float32]
    """(n + 1, S) before each decision and at the end."""
    full: NDArray[np.float32]
    """(n + 1, F), for a critic that reads more than the policy; (n + 1, 0) without."""
    actions: NDArray[np.float32]
    """(n, K, A) in -1..1 as executed."""
    rewards: NDArray[np.float32]
    """(n, K) of the environment; 0 where not executed."""
    steps: NDArray[np.int32]
    """(n,) executed control steps, 1 to K."""
    task: int
    """Number of the task."""
    instruction: str
    """Instruction of the task, in words."""
    terminated: bool
    """Whether the task ended the episode; False if a time limit cut it off."""
    success: bool
    """Whether the task was solved, at the last executed step."""
    noise: NDArray[np.float32] | None = None
    """(n, ...) of `TransitionForm.noise`; None without."""
    by_overseer: NDArray[np.bool_] | None = None
    """(n,) whether an overseer chose the actions; None if nobody watched."""

    def records(self, form: TransitionForm) -> NDArray[np.void]:
        """(n,) records; raises ValueError where a part has another size."""
        count = len(self.steps)
        found = np.zeros(count, form.dtype)
        found["state"], found["next_state"] = self.states[:-1], self.states[1:]
        found["full"], found["next_full"] = self.full[:-1], self.full[1:]
        found["actions"] = self.actions if self.noise is None else self.noise
        found["rewards"], found["steps"] = self.rewards, self.steps
        if form.watched:
            found["by_overseer"] = self.by_overseer
            if form.demonstrated:
                # the overseer's own are imitated
                found["demonstrated"] = self.actions
        last = self.rewards[np.arange(count), self.steps - 1]
        # nobody knows the reward before the first step; 0 would pay for being where episodes begin
        found["before"][:1], found["before"][1:] = self.rewards[:1, 0], last[:-1]
        found["task"] = self.task
        found["terminated"][-1:] = self.terminated
        found["success"][-1:] = self.success
        return found


@dataclass(frozen=True)
class TransitionBatch:
    """B transitions on a device."""

    state: Tensor
    """(B, S)."""
    full: Tensor
    """(B, F); (B, S) if the critic reads the policy's state."""
    actions: Tensor
    """(B, K, A)."""
    rewards: Tensor
    """(B, K), of the run's reward."""
    steps: Tensor
    """(B,) int64."""
    next_state: Tensor
    """(B, S)."""
    next_full: Tensor
    """(B, F) or (B, S)."""
    terminated: Tensor
    """(B,) bool."""
    task: Tensor
    """(B,) int64."""
    prior: Tensor
    """(B,) bool, whether a transition is of prior data."""
    demonstrated: Tensor | None = None
    """(B, K, A) actions to imitate, for transitions of demonstrations; None if nothing reads them."""


class TransitionFile:
    """A file of records that grows at its end and is read through a memory map.

    Args:
        path: of the file; an existing one is deleted.
        form: sizes of a transition.
    """

    def __init__(self, path: Path, form: TransitionForm) -> None:
        self.path = path
        self.form = form
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._count = 0
        self._records: NDArray[np.void] = np.zeros(0, form.dtype)

    def __len__(self) -> int:
        return self._count

    @property
    def records(self) -> NDArray[np.void]:
        """All records (N,), mapped into memory and read-only."""
        return self._records

    def append(self, records: NDArray[np.void]) -> None:
        """Add records at the end."""
        with self.path.open("ab") as handle:
            handle.write(records.tobytes())
        self._count += len(records)
        # mapped again: a map does not grow with its file
        self._records = np.memmap(self.path, self.form.dtype, "r", shape=(self._count,))

    def draw(self, count: int, generator: torch.Generator, newest: int = 0) -> NDArray[np.void]:
        """Draw records (count,) uniformly and with replacement from the `newest` ones, or from all if that is 0."""
        first = max(0, self._count - newest) if newest else 0
        places = torch.randint(first, self._count, (count,), generator=generator)
        found: NDArray[np.void] = self._records[places.numpy()]
        return found

    def close(self) -> None:
        """Delete the file."""
        self._records = np.zeros(0, self.form.dtype)
        self._count = 0
        self.path.unlink(missing_ok=True)


def prior_count(size: int, ratio: float) -> int:
    """Number of transitions of prior data in a batch of `size`, rounded to the nearest, a half up.

    The others are the run's own, so that both numbers always add up to the batch.

    Source: RLPD, arXiv 2302.02948, "symmetric sampling"; its code rounds both halves down, so an odd batch loses one.
    """
    if not 0 <= ratio <= 1:
        raise UserError(f"the ratio of prior data is {ratio:g}; must be 0 to 1")
    return int(size * ratio + 0.5)
