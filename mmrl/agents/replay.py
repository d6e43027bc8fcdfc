"""Successful trajectories of each task, kept for groups in which nothing succeeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.agents.stored import Record, size_of
from mmrl.fields import bounded, choice, rare

CORRECTIONS = ("recompute", "behaviour")
MEGABYTE = 10**6


@dataclass
class ReplayConfig:
    """Replay of successful trajectories."""

    enabled: bool = True
    """Whether successes are kept and replayed; false is plain GRPO over trajectories."""
    size: int = rare(bounded(8, at_least=1))
    """Trajectories kept of each task; the oldest one goes first."""
    threshold: float = rare(bounded(0.1, finite=True))
    """A trajectory is kept where the environment's rewards add up to more."""
    max_std: float = rare(bounded(0.05, at_least=0))
    """A group is given a stored trajectory where the standard deviation (of the population) of what its trajectories
    earned is smaller, and"""
    max_mean: float = rare(bounded(0.2, finite=True))
    """the mean is smaller."""
    correction: str = rare(choice("recompute", CORRECTIONS))
    """Old log-probs of replayed trajectories: recompute (of the policy before the update, so that the ratio begins at 1
    and nothing tells how stale they are) or behaviour (as they were sampled, clipped as usual)."""
    max_age: int | None = rare(bounded(None, at_least=1))
    """Steps after which a stored trajectory is not used any more; null = never."""
    memory_mb: int = rare(bounded(4096, at_least=1))
    """Largest size of the buffer in 10^6 bytes, of which every process holds a copy; beyond it the oldest trajectories
    of all tasks go."""


def needs_replay(outcomes: Sequence[float], max_std: float = 0.05, max_mean: float = 0.2) -> bool:
    """Whether a group is given a stored trajectory: its outcomes hardly differ, and are low.

    Args:
        outcomes: what each trajectory of the group earned from the environment, before a format reward; NaN for those
            without a result, which do not count.
        max_std: bound of the standard deviation of the population.
        max_mean: bound of the mean.

    Source: dvlab-research/ARPO verl/trainer/ray_trainer.py, apply_replay.
    """
    known = [outcome for outcome in outcomes if not math.isnan(outcome)]
    return bool(known) and statistics.pstdev(known) < max_std and statistics.fmean(known) < max_mean


class ReplayBuffer:
    """Trajectories by task, first in, first out.

    Source: dvlab-research/ARPO verl/trainer/replay_buffer.py.
    """

    def __init__(self, config: ReplayConfig) -> None:
        self._config = config
        self._stored: dict[str, deque[Record]] = {}
        self._added = 0
        self.counts: Counter[str] = Counter()
        """added, expired (by age), evicted (by memory) so far; what a task's own length pushes out is not counted."""

    def __len__(self) -> int:
        """Trajectories that are stored."""
        return sum(map(len, self._stored.values()))

    @property
    def megabytes(self) -> float:
        """Size in 10^6 bytes."""
        return sum(entry["bytes"] for own in self._stored.values() for entry in own) / MEGABYTE

    def push(self, task: str, record: Record, step: int) -> None:
        """Store a trajectory."""
        own = self._stored.setdefault(task, deque(maxlen=self._config.size))
        own.append({"episode": record, "step": step, "number": self._added, "bytes": size_of(record)})
        self._added += 1
        self.counts["added"] += 1
        while self.megabytes > self._config.memory_mb:
            self._evict_oldest()

    def draw(self, task: str, step: int, generator: torch.Generator) -> tuple[Record, int] | None:
        """Draw one of a task's trajectories, each as likely as the others."""
        own = [entry for entry in self._stored.get(task, ()) if not self._is_old(entry, step)]
        if not own:
            return None
        entry = own[int(torch.randint(len(own), (), generator=generator))]
        return entry["episode"], step - entry["step"]

    def expire(self, step: int) -> None:
        """Drop the trajectories that are beyond `max_age` at a step."""
        for task, own in list(self._stored.items()):
            while own and self._is_old(own[0], step):
                own.popleft()
                self.counts["expired"] += 1
            if not own:
                del self._stored[task]

    def stored(self, task: str) -> list[Record]:
        """A task's trajectories, oldest first."""
        return [entry["episode"] for entry in self._stored.get(task, ())]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and plain data."""
        stored = {task: list(own) for task, own in self._stored.items()}
        return {"stored": stored, "added": self._added, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; where the buffer is smaller now, the newest trajectories stay."""
        self._stored = {task: deque(own, maxlen=self._config.size) for task, own in state["stored"].items()}
        self._added, self.counts = int(state["added"]), Counter(state["counts"])
        while self.megabytes > self._config.memory_mb:
            self._evict_oldest()

    def _is_old(self, entry: dict[str, Any], step: int) -> bool:
        return self._config.max_age is not None and step - entry["step"] > self._config.max_age

    def _evict_oldest(self) -> None:
        task = min((own[0]["number"], task) for task, own in self._stored.items() if own)[1]
        self._stored[task].popleft()
        if not self._stored[task]:
            del self._stored[task]
        self.counts["evicted"] += 1
