"""Cohorts: sets of episodes that take their turns together, while the environments of other cohorts work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from mmrl.agents.environments.env_pool import TurnResult
from mmrl.agents.environments.environment import Observation
from mmrl.agents.rollout.conversation import Writer
from mmrl.agents.rollout.turns import TurnSampler
from mmrl.vlm.data.prompt import Prompt

Slot = TypeVar("Slot")


class Cohort(Generic[Slot]):
    """Episodes that are sampled together; its places are numbered from 0 and have a row of the pool each."""

    def __init__(self, episodes: Sequence[int], size: int, *, lock_step: bool) -> None:
        self.size = size
        """Episodes that run at once."""
        self.rows: list[int] = []
        """Row of the pool of each place, once there are enough free ones."""
        self.running: dict[int, Slot] = {}
        """Episodes by place."""
        self.away: set[int] = set()
        """Places whose environment executes an action or starts."""
        self.started: dict[int, TurnResult] = {}
        """First observations that have not been read."""
        self.acted: set[int] = set()
        """Places whose actions have been executed."""
        self.starting: dict[int, int] = {}
        """Number of the episode that starts at a place."""
        self.first: dict[str, tuple[Observation, Prompt]] = {}
        """First observation and prompt of each task."""
        self.turns: TurnSampler
        self.writer: Writer
        self._waiting = deque(episodes)
        self._lock_step = lock_step

    @property
    def is_due(self) -> bool:
        """Whether there is something to sample or to start."""
        if self._lock_step:
            return not self.away
        return len(self.away) < len(self.running) + len(self.starting) or bool(self._waiting and self.free)

    @property
    def is_over(self) -> bool:
        """Whether all episodes have ended."""
        return not (self._waiting or self.running or self.starting)

    @property
    def free(self) -> list[int]:
        """Places without an episode, ascending, so that equal runs put episodes into equal places."""
        return [place for place in range(self.size) if place not in self.running and place not in self.starting]

    def next_starts(self) -> dict[int, int]:
        """Assign the next episodes to free places; returns their numbers by place."""
        found = {place: self._waiting.popleft() for place, _ in zip(self.free, list(self._waiting), strict=False)}
        self.starting |= found
        self.away |= found.keys()
        return found

    def ready(self) -> dict[int, Slot]:
        """Episodes that wait for an answer; none while others of a cohort in lock-step start."""
        if self._lock_step and self.away:
            return {}
        return {place: slot for place, slot in self.running.items() if place not in self.away | self.acted}


def split_cohorts(count: int, rows: int, cohort: int | None) -> list[tuple[list[int], int]]:
    """The episodes of each cohort, and how many of them run at once.

    Args:
        count: episodes.
        rows: environments.
        cohort: episodes that run in lock-step; None for all.
    """
    if cohort is None or cohort >= rows:
        return [(list(range(count)), rows)]
    if cohort == 1:
        # any free row may take it, since nothing else is in its passes
        return [([number], 1) for number in range(count)]
    # dealt out to the rows in turn and not to whichever is free first
    owned = [[n for n in range(count) if n % rows // cohort == own] for own in range(-(-rows // cohort))]
    return [(own, min(cohort, rows - cohort * number)) for number, own in enumerate(owned) if own]
