"""Rewards to returns, the targets of a critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from mmrl.core.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.loop.distributed import global_advantages, merge_lists

SHAPINGS = ("none", "minmax", "running_z", "running_z_tanh", "group_z")
Z_LIMIT = 3.0


@dataclass
class ShapingConfig:
    """How rewards become the critic's targets."""

    kind: str = choice("running_z", SHAPINGS)
    """none, minmax (clip((r - low) / (high - low), 0, 1)), running_z (running mean and deviation, clipped at +-3),
    running_z_tanh (its tanh) or group_z (the objective's group advantage)."""
    low: float = 0.0
    """Smallest reward of minmax."""
    high: float = 1.0
    """Largest reward of minmax."""
    momentum: float = rare(bounded(0.05, above=0, at_most=1))
    """Weight of a new step in the running mean and deviation."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if self.high <= self.low:
            raise ValueError(f"shaping.high is {self.high}; must be above shaping.low={self.low}")


class RewardShaping:
    """Turns the rewards of a step into returns and keeps their running mean and deviation."""

    def __init__(self, config: ShapingConfig, objective: Objective) -> None:
        self.config = config
        self.objective = objective
        self.running: tuple[float, float] | None = None
        """Mean and standard deviation; None before the first step."""

    def __call__(self, rollouts: Rollouts, accelerator: Accelerator) -> Tensor:
        """Returns (B,) of the rewards; 0 where a row could not be scored."""
        config, reward = self.config, rollouts.reward.nan_to_num()
        if config.kind == "minmax":
            return ((reward - config.low) / (config.high - config.low)).clamp(0, 1)
        if config.kind == "group_z":
            estimated = global_advantages(self.objective.compute_advantages, rollouts, accelerator).advantage
            assert estimated is not None
            return estimated[:, 0]
        if config.kind == "none":
            return reward
        scored = [value for value in merge_lists(rollouts.reward.tolist(), accelerator) if value == value]
        mean, deviation = self._update(torch.tensor(scored))
        z = torch.where(rollouts.scored, (reward - mean) / (deviation + 1e-8), 0.0).clamp(-Z_LIMIT, Z_LIMIT)
        return z.tanh() if config.kind == "running_z_tanh" else z

    def state_dict(self) -> list[float] | None:
        """The running mean and deviation."""
        return None if self.running is None else list(self.running)

    def load_state_dict(self, state: list[float] | None) -> None:
        """Restore `state_dict`."""
        self.running = None if state is None else (state[0], state[1])

    def _update(self, rewards: Tensor) -> tuple[float, float]:
        """Move the running mean and deviation; the first step sets them."""
        mean, deviation = float(rewards.mean()), float(rewards.std(correction=0))
        if self.running is not None:
            weight = self.config.momentum
            mean = (1 - weight) * self.running[0] + weight * mean
            deviation = (1 - weight) * self.running[1] + weight * deviation
        self.running = (mean, deviation)
        return self.running
