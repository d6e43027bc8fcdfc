"""A critic for robot policies: the expected return from the simulator's full state.

It is asymmetric: only training reads it, so it may see the poses of all pieces, which no camera shows, and needs no
image. That makes it small and quick to learn, and the advantages of single chunks precise, while the policy acts from
images and the robot's own state.

Shapes: B episodes, C chunks, S entries of the full state, K task names.

Source: Pinto et al., Asymmetric Actor Critic for Image-Based Robot Learning, arXiv 1710.06542.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.fields import bounded, rare
from robotics.vla.payload import EpisodePayload
from robotics.vla.policy import ActionChoice, ActionPolicy
from robotics.vla.saved import read_weights, write_weights
from robotics.vla.statistics import STATE_LIMIT, StateStatistics

CRITIC_FOLDER = "critic"


@dataclass
class CriticConfig:
    """Size and learning rate of the critic."""

    width: int = rare(bounded(256, at_least=1))
    """Width of its two hidden layers."""
    learning_rate_factor: float = rare(bounded(10.0, above=0))
    """Factor on the policy's learning rate."""
    learning_rate: float | None = bounded(None, above=0)
    """Its own learning rate, in place of `learning_rate_factor`; the schedule's warm-up and decay apply to it in
    proportion."""

    def factor(self, policy_rate: float) -> float:
        """Factor on a policy's learning rate of `policy_rate`."""
        return self.learning_rate_factor if self.learning_rate is None else self.learning_rate / policy_rate


class StateCritic(nn.Module):
    """Two hidden layers from the standardised inputs of `critic_inputs` to a value."""

    mean: Tensor
    std: Tensor
    fitted: Tensor

    def __init__(self, size: int, width: int, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
            )
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def fit_scale(self, inputs: Tensor) -> None:
        """Standardise by the mean and deviation of (M, S + 1 + K) inputs; later calls change nothing."""
        if bool(self.fitted):
            return
        std = inputs.std(0, correction=0)
        self.mean.copy_(inputs.mean(0))
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))
        self.fitted.fill_(True)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., S + 1 + K) inputs to (...) values."""
        scaled = ((inputs - self.mean) / self.std).clamp(-STATE_LIMIT, STATE_LIMIT)
        return self.net(scaled).squeeze(-1)


def critic_inputs(payload: EpisodePayload, group: Tensor, tasks: Sequence[str], horizon: int) -> Tensor:
    """Inputs of the critic before each chunk: full state, share of the horizon so far, and one entry a task.

    B episodes of C chunks in groups (B,), K tasks and a horizon in control steps give (B, C, S + 1 + K) float32.
    Without full states the observed ones are used.
    """
    states = payload.states if payload.full_states is None else payload.full_states
    elapsed = (payload.steps.cumsum(1) - payload.steps).to(states.dtype)[..., None] / horizon
    number = torch.tensor([tasks.index(payload.episodes[index].task) for index in group.tolist()], device=states.device)
    task = nn.functional.one_hot(number, len(tasks)).to(states.dtype)
    return torch.cat([states, elapsed, task[:, None].expand(-1, states.shape[1], -1)], -1)


class PolicyWithCritic(ActionPolicy):
    """A policy and a critic that are trained and saved together; acting needs the policy alone.

    `save_pretrained` writes the policy's own folder, which `open_policy` loads, and the critic into it.
    """

    def __init__(self, policy: ActionPolicy, critic: StateCritic, learning_rate_factor: float = 1.0) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic
        self.chunk, self.action_size, self.decisions = policy.chunk, policy.action_size, policy.decisions
        self.by_step = policy.by_step
        self.learning_rate_factors = {"critic": learning_rate_factor}

    # properties, since cloning and loading set them on the policy later
    statistics = property(lambda self: self.policy.statistics)  # type: ignore[assignment]
    past = property(lambda self: self.policy.past)  # type: ignore[assignment]
    action_range = property(lambda self: self.policy.action_range)  # type: ignore[assignment]
    config = property(lambda self: getattr(self.policy, "config", None))

    def act(self, *arguments: Any, **options: Any) -> ActionChoice:
        return self.policy.act(*arguments, **options)

    def log_probs(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        return self.policy.log_probs(*arguments, **options)

    def bc_loss(self, *arguments: Any, **options: Any) -> tuple[Tensor, dict[str, float]]:
        return self.policy.bc_loss(*arguments, **options)

    def values(self, inputs: Tensor) -> Tensor:
        """Values (...) of inputs of `critic_inputs`.

        Gradient: into the critic.
        """
        return self.critic(inputs)

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call `act`, `log_probs`, `bc_loss` or `values` by name."""
        return self.values(*arguments) if method == "values" else super().forward(method, *arguments, **options)

    def executed_mask(self, steps: Tensor) -> Tensor:
        return self.policy.executed_mask(steps)

    def scale_states(self, statistics: StateStatistics) -> None:
        self.policy.scale_states(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the policy's folder and the critic into it."""
        self.policy.save_pretrained(path)
        write_weights(self.critic, Path(path) / CRITIC_FOLDER)

    def export(self, path: Path | str) -> None:
        """Write the policy alone."""
        self.policy.export(path)

    def load_weights(self, path: Path | str) -> None:
        """Restore what `save_pretrained` wrote; raises UserError if there is no critic or another one."""
        self.policy.load_weights(path)
        read_weights(self.critic, Path(path) / CRITIC_FOLDER)
