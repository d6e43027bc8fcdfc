"""Coefficients and statistics that change during a run, with explicit state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Stateful(Protocol):
    """An object whose state belongs in a checkpoint."""

    def state_dict(self) -> Any:
        """Tensors and plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`."""


class Tally(Counter[str]):
    """Counts that are stored in checkpoints."""

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return dict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore `state_dict`."""
        self.clear()
        self.update(state)


@dataclass
class ObjectiveState:
    """State of the blocks of an objective that remember earlier steps."""

    blocks: dict[str, Any]
    """State of each of these blocks, by its field in the objective."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {key: block.state_dict() for key, block in self.blocks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; blocks without stored state start from scratch."""
        for key, block in self.blocks.items():
            if key in state:
                block.load_state_dict(state[key])


@dataclass
class AdaptiveKL:
    """Controller that adapts the coefficient of a divergence so that the divergence meets a target.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2; volcengine/verl AdaptiveKLController.
    """

    coefficient: float
    """Current coefficient."""
    target: float
    """Target divergence in nats."""
    horizon: float
    """Number of samples over which the coefficient changes by the relative error."""

    def __post_init__(self) -> None:
        if min(self.coefficient, self.target, self.horizon) <= 0:
            raise ValueError(
                f"AdaptiveKL requires a positive coefficient, target and horizon; got {self.coefficient}, "
                f"{self.target}, {self.horizon}."
            )

    def update(self, divergence: float, samples: int) -> float:
        """Update and return the coefficient after a step with `samples` samples and a measured divergence in nats."""
        # limited to 20% a step of the horizon, as in verl, so that one odd step cannot throw the coefficient
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * samples / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """Return the state to store in a checkpoint."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.coefficient = float(state["coefficient"])


@dataclass
class DifficultyTracker:
    """Shortfall of a prompt's reward relative to recent samples.

    Source: DeepVideo-R1, arXiv 2506.07464, section 4 (difficulty-aware augmentation).
    """

    window: int
    """Number of recent samples whose mean reward prompts are compared with."""
    recent: list[float] = field(default_factory=list)
    """Rewards of the last samples, newest last."""
    means: dict[str, float] = field(default_factory=dict)
    """Mean reward of each prompt's last samples."""

    def note(self, key: str, rewards: Sequence[float]) -> None:
        """Record the samples of a prompt."""
        scored = [float(reward) for reward in rewards if math.isfinite(reward)]
        if scored:
            # a sliding window of samples, not of steps: steps may differ in the number of scored rows
            self.recent = [*self.recent, *scored][-self.window :]
            self.means[key] = sum(scored) / len(scored)

    def difficulty(self, key: str) -> float:
        """Mean reward of the window minus the prompt's: above 0 for hard prompts, 0 for new ones."""
        return self.difference(self.means[key]) if key in self.means else 0.0

    def difference(self, mean: float) -> float:
        """Mean reward of the window minus `mean`; 0 while the window is empty."""
        return sum(self.recent) / len(self.recent) - mean if self.recent else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint."""
        return {"recent": list(self.recent), "means": dict(self.means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.recent = list(state["recent"])[-self.window :]
        self.means = dict(state["means"])
