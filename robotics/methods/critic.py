"""The critic of `robot_ppo`, a network on the simulator's full state, and its inputs.

Shapes: B episodes, C chunks, S entries of the full state, K task names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmrl.core.payload import to_device
from mmrl.fields import bounded, rare
from robotics.episodes.payload import EpisodePayload
from robotics.policies.base.action_statistics import STATE_LIMIT


@dataclass
class CriticConfig:
    """Size and learning rate of the critic."""

    width: int = rare(bounded(256, at_least=1))
    """Width of the two hidden layers."""
    learning_rate_factor: float = rare(bounded(10.0, above=0))
    """Learning rate of the critic, as a multiple of the policy's."""
    learning_rate: float | None = bounded(None, above=0)
    """Learning rate of the critic, instead of `learning_rate_factor`; the schedule's warm-up and decay apply to it in
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
        # the layers initialise from the global generator, which other parts of the run share
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.net = nn.Sequential(
                nn.Linear(size, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
            )
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))

    def fit_scale(self, inputs: Tensor) -> None:
        """Standardise by mean and deviation of (M, S + 1 + K) inputs; later calls and empty inputs change nothing."""
        if bool(self.fitted) or not len(inputs):
            return
        # an entry that never varied, such as the only task, is only centred
        std = inputs.std(0, correction=0)
        self.mean.copy_(inputs.mean(0))
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))
        self.fitted.fill_(True)

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., S + 1 + K) inputs to (...) values."""
        # an entry that hardly varied in the first step may later be many deviations away
        scaled = ((inputs - self.mean) / self.std).clamp(-STATE_LIMIT, STATE_LIMIT)
        return self.net(scaled).squeeze(-1)


def critic_inputs(payload: EpisodePayload, group: Tensor, tasks: Sequence[str], horizon: int | None) -> Tensor:
    """Inputs of the critic before each chunk: full state, elapsed fraction of the horizon, and one entry per task.

    B episodes of C chunks in groups (B,), K tasks and a horizon in control steps give (B, C, S + 1 + K) float32.
    Without full states the observed ones are used. Without a horizon the fraction is 0.
    """
    states = payload.states if payload.full_states is None else payload.full_states
    # the steps before each chunk, without its own
    elapsed = (payload.steps.cumsum(1) - payload.steps).to(states.dtype)[..., None]
    elapsed = torch.zeros_like(elapsed) if horizon is None else elapsed / horizon
    return _with_task(torch.cat([states, elapsed], -1), payload, group, tasks)


def last_inputs(payload: EpisodePayload, group: Tensor, tasks: Sequence[str]) -> Tensor | None:
    """Inputs (B, S + 1 + K) for the last state of each episode; None if the simulator does not report it."""
    states = payload.last_state if payload.full_states is None else payload.last_full_state
    if states is None:
        return None
    # the elapsed fraction is 0: this state is only asked for with bootstrapping, where the critic reads no time
    return _with_task(nn.functional.pad(states, (0, 1))[:, None], payload, group, tasks)[:, 0]


def _with_task(inputs: Tensor, payload: EpisodePayload, group: Tensor, tasks: Sequence[str]) -> Tensor:
    """Add one entry per task to inputs (B, C, ...)."""
    number = torch.tensor([tasks.index(payload.episodes[index].task) for index in group.tolist()])
    task = to_device(nn.functional.one_hot(number, len(tasks)).to(inputs.dtype), inputs.device)
    return torch.cat([inputs, task[:, None].expand(-1, inputs.shape[1], -1)], -1)
