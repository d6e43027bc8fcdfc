"""The critic of AC-Flow and Flow-PPO: returns from rewards, the value function, its training and its credit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.data.prompts import DiffusionTask
from diffusion.models.policy import DiffusionPolicy
from diffusion.sampling.sampler import text_of
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.runs.stopwatch import stopwatch
from mmrl.training.processes import average_gradients, global_advantages, merge_lists, stream_seed

SHAPINGS = ("none", "minmax", "running_z", "running_z_tanh", "group_z")
Z_LIMIT = 3.0
TIME_FEATURES = 16


@dataclass
class ShapingConfig:
    """Computation of the critic's targets from rewards."""

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


@dataclass
class CriticConfig:
    """The value function and its training."""

    enabled: bool = True
    """Without it V is 0 everywhere."""
    width: int = rare(bounded(64, at_least=1))
    """Channels of the convolutions and hidden units."""
    learning_rate: float = bounded(1e-3, above=0)
    """Learning rate of the critic's AdamW; 1e-4 for a large latent."""
    updates_per_step: int = bounded(4, at_least=1)
    """Passes over the states of a step."""
    warmup_updates: int = bounded(20, at_least=0)
    """Updates of the critic before the policy is trained."""
    batch_rows: int = rare(bounded(256, at_least=1))
    """States in one update."""
    max_grad_norm: float = rare(bounded(1.0, above=0))
    """Gradient norm above which its gradients are scaled down."""


class Critic(nn.Module):
    """V(x_t, t, c), a small convolutional network on C channels and a pooled text embedding of width P."""

    def __init__(self, channels: int, pooled_width: int, width: int) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            nn.GroupNorm(1, width),
            nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.GroupNorm(1, width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.text = nn.Linear(pooled_width, width)
        self.head = nn.Sequential(
            nn.LayerNorm(4 * width + width + TIME_FEATURES),
            nn.Linear(4 * width + width + TIME_FEATURES, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, 1),
        )
        last: Any = self.head[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected return (M,) of latents x_t (M, C, H, W) float32 at times (M,) with pooled text (M, P)."""
        frequency = 2.0 ** torch.arange(TIME_FEATURES // 2, device=sigma.device)
        angle = math.pi * sigma[:, None] * frequency
        features = torch.cat([self.image(latents), self.text(pooled), angle.sin(), angle.cos()], 1)
        value: Tensor = self.head(features)[:, 0]
        return value


class CriticTrainer:
    """A critic with its optimiser."""

    def __init__(self, critic: Critic, config: CriticConfig) -> None:
        self.critic = critic
        self.config = config
        self.updates = 0
        self._optimizer = torch.optim.AdamW(critic.parameters(), lr=config.learning_rate)

    @property
    def warm(self) -> bool:
        """Whether the critic has had its warm-up."""
        return self.updates >= self.config.warmup_updates

    @torch.no_grad()
    def values(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected returns (M,) of noisy latents, without gradient."""
        size = self.config.batch_rows
        parts = zip(latents.split(size), sigma.split(size), pooled.split(size), strict=True)
        return torch.cat([self.critic(x.float(), t, c.float()) for x, t, c in parts])

    def train(
        self, inputs: tuple[Tensor, Tensor, Tensor], returns: Tensor, generator: torch.Generator, accelerator: Any
    ) -> float:
        """Regress on returns (M,) from latents (M, C, H, W), times (M,) and pooled text (M, P); returns the mean loss.

        Gradients are averaged over the accelerator's processes, so each must call with rows of its own.
        """
        losses = []
        # as many updates on every process, each of at most batch_rows states
        count = max(1, -(-max(merge_lists([len(returns)], accelerator)) // self.config.batch_rows))
        for _ in range(self.config.updates_per_step):
            order = torch.randperm(len(returns), generator=generator).to(returns.device)
            for rows in torch.tensor_split(order, count):
                x, sigma, pooled = (value[rows] for value in inputs)
                with torch.enable_grad():
                    loss = (self.critic(x.float(), sigma, pooled.float()) - returns[rows]).square().mean()
                    loss.backward()
                average_gradients(list(self.critic.parameters()), accelerator)
                nn.utils.clip_grad_norm_(self.critic.parameters(), self.config.max_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad()
                losses.append(float(loss.detach()))
                self.updates += 1
        return sum(losses) / len(losses)

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and count."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Share of the variance of returns (M,) that values (M,) explain; NaN where the returns do not differ."""
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else float("nan")


def _differences(returns: Tensor, values: Tensor) -> Tensor:
    return torch.cat([values[:, 1:], returns[:, -1:]], 1) - values


CREDITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "return": lambda returns, values: returns - values,
    "difference": _differences,
}
"""Functions that turn returns and values (B, T) of states along a path into advantages (B, T); see
`diffusion.methods.ac_flow`."""


class States(NamedTuple):
    """The states of some rollouts whose mask is 1."""

    latents: Tensor
    """x_t (M, C, H, W)."""
    sigma: Tensor
    """t (M,) float32."""
    decisions: TrainedDecisions
    """Their places in (B, T)."""


def make_critic(
    policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], config: CriticConfig, seed: int
) -> CriticTrainer:
    """A critic for the latents and the pooled text of a policy; the global generator is left alone."""
    pooled = text_of(policy, tasks[:1], torch.zeros(1, dtype=torch.int64)).pooled.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(seed, "critic"))
        critic = Critic(policy.latent_shape[0], pooled, config.width)
    return CriticTrainer(critic.to(policy.device), config)


def state_values(critic: CriticTrainer, policy: DiffusionPolicy, rollouts: Rollouts, states: States) -> Tensor:
    """V (B, T) float32 of the states, without gradient; 0 where the mask is 0."""
    critic.critic.to(policy.device)  # made before the policy moved to its device
    return states.decisions.scatter(critic.values(*_inputs(policy, rollouts, states)))


def train_critic(
    critic: CriticTrainer,
    policy: DiffusionPolicy,
    rollouts: Rollouts,
    states: States,
    returns: Tensor,
    generator: torch.Generator,
    accelerator: Any,
) -> dict[str, float]:
    """Regress the critic on the returns (B,) of the rows that have a reward; returns its metrics.

    `generator` is a CPU generator for the order; gradients are averaged over the accelerator's processes.
    """
    with stopwatch("critic"):
        row = states.decisions.row
        usable = rollouts.scored[row]
        latents, sigma, pooled = _inputs(policy, rollouts, states)
        kept = (latents[usable], sigma[usable], pooled[usable])
        loss = critic.train(kept, returns[row][usable], generator, accelerator)
    return {"critic/loss": loss, "critic/updates": float(critic.updates)}


def explained_by_time(rollouts: Rollouts, returns: Tensor, values: Tensor) -> dict[str, float]:
    """Share of the variance of returns (B,) that values (B, T) explain: at all states, and in each half of time."""
    sigma, trained = DiffusionPayload.of(rollouts).sigma, rollouts.loss_mask > 0
    wide = returns[:, None].expand_as(values)
    parts = {"critic/explained": trained, "critic/explained/noisy": trained & (sigma > 0.5)}
    parts["critic/explained/clean"] = trained & (sigma <= 0.5)
    return {name: explained_variance(wide[part], values[part]) for name, part in parts.items()}


def _inputs(policy: DiffusionPolicy, rollouts: Rollouts, states: States) -> tuple[Tensor, Tensor, Tensor]:
    text = text_of(policy, DiffusionPayload.of(rollouts).tasks, rollouts.group[states.decisions.row])
    return states.latents.float(), states.sigma, text.expanded()[1].float()
