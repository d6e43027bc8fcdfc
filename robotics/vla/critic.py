"""A critic for robot policies: the expected return from the simulator's full state.

Only training asks it, so it may see what no camera shows (the poses of all pieces) and need not see any image: it is an
asymmetric critic. That makes it small and quick to learn, and the advantages of single chunks precise, while the policy
keeps acting from images and the robot's own state.

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
from robotics.vla.action_range import ActionRange
from robotics.vla.payload import EpisodePayload
from robotics.vla.policy import ActionChoice, ActionPolicy, PolicyInputs
from robotics.vla.saved import read_weights, write_weights
from robotics.vla.statistics import STATE_LIMIT, ActionStatistics, StateStatistics

CRITIC_FOLDER = "critic"


@dataclass
class CriticConfig:
    """Size and learning rate of the critic."""

    width: int = rare(bounded(256, at_least=1))
    """Width of its two hidden layers."""
    learning_rate_factor: float = rare(bounded(10.0, above=0))
    """Its learning rate over that of the policy."""
    learning_rate: float | None = bounded(None, above=0)
    """Its learning rate itself, whatever the policy's is; takes the place of `learning_rate_factor`. The schedule's
    warm-up and decay apply to it in proportion."""

    def factor(self, policy_rate: float) -> float:
        """Its learning rate over a policy's of `policy_rate`."""
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
    """What the critic is told before each chunk.

    Args:
        payload: B episodes of C chunks; without full states their observed ones are used.
        group: (B,) int64, the initial state of each.
        tasks: K names.
        horizon: control steps of the longest episode.

    Returns:
        (B, C, S + 1 + K) float32: full state, share of the horizon that has gone by, and one entry a task.
    """
    states = payload.states if payload.full_states is None else payload.full_states
    gone = (payload.steps.cumsum(1) - payload.steps).to(states.dtype)[..., None] / horizon
    number = torch.tensor([tasks.index(payload.episodes[index].task) for index in group.tolist()], device=states.device)
    kind = nn.functional.one_hot(number, len(tasks)).to(states.dtype)
    return torch.cat([states, gone, kind[:, None].expand(-1, states.shape[1], -1)], -1)


class PolicyWithCritic(ActionPolicy):
    """A policy and a critic that are trained and saved together; acting needs the policy alone.

    A folder written by `save_pretrained` is the policy's own, which `open_policy` loads, with the critic beside it.
    """

    def __init__(self, policy: ActionPolicy, critic: StateCritic, learning_rate_factor: float = 1.0) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic
        self.chunk, self.action_size, self.decisions = policy.chunk, policy.action_size, policy.decisions
        self.by_step = policy.by_step
        self.learning_rate_factors = {"critic": learning_rate_factor}

    @property
    def statistics(self) -> ActionStatistics | None:  # type: ignore[override]
        """The policy's own."""
        return self.policy.statistics

    @property
    def past(self) -> int:  # type: ignore[override]
        """The policy's own."""
        return self.policy.past

    @property
    def action_range(self) -> ActionRange | None:  # type: ignore[override]
        """The policy's own."""
        return self.policy.action_range

    @property
    def config(self) -> Any:
        """The policy's own; None where it has none."""
        return getattr(self.policy, "config", None)

    def act(
        self, batch: PolicyInputs, generator: torch.Generator, temperature: float = 1.0, greedy: bool = False
    ) -> ActionChoice:
        """See `ActionPolicy.act`."""
        return self.policy.act(batch, generator, temperature=temperature, greedy=greedy)

    def log_probs(
        self, batch: PolicyInputs, decisions: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """See `ActionPolicy.log_probs`."""
        return self.policy.log_probs(batch, decisions, temperature)

    def bc_loss(
        self, batch: PolicyInputs, actions: Tensor, mask: Tensor, generator: torch.Generator | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """See `ActionPolicy.bc_loss`."""
        return self.policy.bc_loss(batch, actions, mask, generator)

    def values(self, inputs: Tensor) -> Tensor:
        """Values (...) of inputs of `critic_inputs`.

        Gradient: into the critic.
        """
        return self.critic(inputs)

    def forward(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call `act`, `log_probs`, `bc_loss` or `values` by name."""
        return self.values(*arguments) if method == "values" else super().forward(method, *arguments, **options)

    def executed_mask(self, steps: Tensor) -> Tensor:
        """See `ActionPolicy.executed_mask`."""
        return self.policy.executed_mask(steps)

    def scale_states(self, statistics: StateStatistics) -> None:
        """See `ActionPolicy.scale_states`."""
        self.policy.scale_states(statistics)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the policy's folder and the critic into it."""
        self.policy.save_pretrained(path)
        write_weights(self.critic, Path(path) / CRITIC_FOLDER)

    def export(self, path: Path | str) -> None:
        """Write the policy alone."""
        self.policy.export(path)

    def load_weights(self, path: Path | str) -> None:
        """See `ActionPolicy.load_weights`; raises UserError if there is no critic or another one."""
        self.policy.load_weights(path)
        read_weights(self.critic, Path(path) / CRITIC_FOLDER)
