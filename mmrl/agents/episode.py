"""One episode of an agent, how it may end, and how long it may last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mmrl.agents.environment import Observation
from mmrl.agents.films import Video
from mmrl.agents.tasks import AgentTask
from mmrl.agents.trajectories import Trajectory
from mmrl.fields import bounded, rare
from mmrl.vlm.payload import Prompt


@dataclass
class EpisodeConfig:
    """How long episodes last."""

    max_turns: int = bounded(15, at_least=1)
    """Turns after which an episode is truncated, unless the environment ended it before."""
    success_above: float = rare(0.0)
    """An episode succeeds where the sum of its rewards is larger, unless the environment sets info["success"]."""


@dataclass
class Episode:
    """One episode and how it ended."""

    task: AgentTask
    prompt: Prompt | None = None
    """First prompt; None where the environment did not start."""
    trajectory: Trajectory = field(default_factory=Trajectory)
    rewards: list[float] = field(default_factory=list)
    """The environment's reward of each turn."""
    answers: list[str] = field(default_factory=list)
    """The agent's text of each turn."""
    unreadable: int = 0
    """Answers without a readable action."""
    refused: int = 0
    """Actions that the environment could not execute."""
    ending: str = ""
    """Key of `ENDINGS`; empty while it runs."""
    reason: str = ""
    """Why it has no result, in one line."""
    success: bool = False
    finish: str = ""
    """Why the last answer ended: "eos", "stop" or "length"."""
    last: Observation = field(default_factory=Observation)
    """The last observation."""
    video: Video | None = None
    """Observations and actions, where they are recorded."""

    @property
    def has_result(self) -> bool:
        """Whether its reward counts."""
        return self.ending not in NO_RESULT

    @property
    def total(self) -> float:
        """Sum of the environment's rewards; NaN where there is no result."""
        return sum(self.rewards) if self.has_result else math.nan


NO_RESULT = ("failed", "overflow")
"""Endings of episodes whose reward does not count."""

ENDINGS: dict[str, str] = {
    "terminated": "The environment ended the episode.",
    "truncated": "The environment's limit or episode.max_turns was reached.",
    "unreadable": "An answer had no readable action, and actions.on_parse_error is terminate.",
    "failed": "The environment raised, hung, died or returned something malformed: there is no result.",
    "overflow": "The next observation does not fit into the model's positions: there is no result.",
}
