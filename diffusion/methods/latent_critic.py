"""The critic of AC-Flow and Flow-PPO: returns from rewards, the value function, its training and credit assignment.

The value function predicts the expected reward from a noisy latent x_t.

Source: the size, a small convolutional network with layer norms, as in a public summary of AC-Flow (arXiv 2510.18072);
    the rest of the architecture is ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.data.prompts import DiffusionTask
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.sampling.latent_sampler import text_of
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions
from mmrl.core.objectives.objective import Objective
from mmrl.core.payload import numbers, to_device, to_host
from mmrl.core.returns import explained_variance
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.runs.run_log import stopwatch
from mmrl.training.optimizer import load_optimizer
from mmrl.training.processes import (
    deal,
    from_all,
    global_advantages,
    make_generator,
    merge_lists,
    stream_seed,
    sum_gradients,
)
from mmrl.training.recipe import Step

SHAPINGS = ("none", "minmax", "running_z", "running_z_tanh", "group_z")
Z_LIMIT = 3.0
MOMENTUM = 0.05
"""Weight of each new step in the running mean and deviation of rewards."""
MAX_GRAD_NORM = 1.0
"""Gradient norm above which the critic's gradients are scaled down."""
TIME_FEATURES = 16


@dataclass
class ShapingConfig:
    """Computation of the critic's targets from rewards."""

    kind: str = choice("running_z", SHAPINGS)
    """none, minmax (clip((r - low) / (high - low), 0, 1)), running_z (running mean and deviation, clipped at +-3),
    running_z_tanh (its tanh) or group_z (the objective's group advantage)."""
    low: float = 0.0
    """Lower end of the reward range for minmax."""
    high: float = 1.0
    """Upper end of the reward range for minmax."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        if self.high <= self.low:
            raise ValueError(f"shaping.high is {self.high}; must be above shaping.low={self.low}")


class RewardShaping:
    """Converts the rewards of a step to returns and tracks their running mean and deviation."""

    def __init__(self, config: ShapingConfig, objective: Objective) -> None:
        self.config = config
        self.objective = objective
        self.running: tuple[float, float] | None = None
        """Mean and standard deviation; None before the first step."""

    def __call__(self, rollouts: Rollouts, accelerator: Accelerator) -> Tensor:
        """Returns (B,) of the rewards; 0 if a row could not be scored."""
        # NaN rewards become 0 here and are masked out by `rollouts.scored` later
        config, reward = self.config, rollouts.reward.nan_to_num()
        if config.kind == "minmax":
            return ((reward - config.low) / (config.high - config.low)).clamp(0, 1)
        if config.kind == "group_z":
            # over all processes, as a group advantage may divide by the deviation of the whole step
            estimated = global_advantages(self.objective.compute_advantages, rollouts, accelerator).advantage
            assert estimated is not None
            return estimated[:, 0]
        if config.kind == "none":
            return reward
        # statistics of all processes, without NaN: every process has to keep the same running values
        scored = [value for value in merge_lists(rollouts.reward.tolist(), accelerator) if value == value]
        if not scored:  # a filter has kept no group: nothing to learn, and nothing that statistics could follow
            return torch.zeros_like(reward)
        mean, deviation = self._update(torch.tensor(scored))
        # clipped like AC-Flow's shaped rewards, so that a critic with targets of unit scale can follow
        z = torch.where(rollouts.scored, (reward - mean) / (deviation + 1e-8), 0.0).clamp(-Z_LIMIT, Z_LIMIT)
        return z.tanh() if config.kind == "running_z_tanh" else z

    def state_dict(self) -> list[float] | None:
        """The running mean and deviation."""
        return None if self.running is None else list(self.running)

    def load_state_dict(self, state: list[float] | None) -> None:
        """Restore `state_dict`."""
        self.running = None if state is None else (state[0], state[1])

    def _update(self, rewards: Tensor) -> tuple[float, float]:
        """Update the running mean and deviation; the first step initialises them."""
        # population deviation: a single scored row has 0, not NaN
        mean, deviation = float(rewards.mean()), float(rewards.std(correction=0))
        if self.running is not None:
            weight = MOMENTUM
            mean = (1 - weight) * self.running[0] + weight * mean
            deviation = (1 - weight) * self.running[1] + weight * deviation
        # updated before use: the rewards of a step are shaped by statistics that include them
        self.running = (mean, deviation)
        return self.running


@dataclass
class LatentCriticConfig:
    """The value function and its training."""

    enabled: bool = True
    """Train a critic; without it, V is 0."""
    width: int = rare(bounded(64, at_least=1))
    """Number of convolution channels and hidden units."""
    learning_rate: float = bounded(1e-3, above=0)
    """Learning rate of the critic's AdamW; 1e-4 for a large latent."""
    updates_per_step: int = bounded(4, at_least=1)
    """Number of passes over the states of a step."""
    warmup_updates: int = bounded(20, at_least=0)
    """Number of critic updates before the policy is trained."""
    batch_rows: int = rare(bounded(256, at_least=1))
    """States in one update."""


class Critic(nn.Module):
    """V(x_t, t, c), a small convolutional network with C input channels and a pooled text embedding of width P.

    Convolutions cover the pixels of an image, and also the frames of a video.
    """

    def __init__(self, channels: int, pooled_width: int, width: int, *, video: bool = False) -> None:
        super().__init__()
        convolution, pool = (nn.Conv3d, nn.AdaptiveAvgPool3d) if video else (nn.Conv2d, nn.AdaptiveAvgPool2d)
        # pooled to 2 x 2 (2 x 2 x 2 for videos) cells of `width` channels, then text and time features
        features = (8 if video else 4) * width + width + TIME_FEATURES
        self.image = nn.Sequential(
            convolution(channels, width, 3, padding=1),
            # one group, that is, a layer norm: it has no batch statistics, so rows do not affect each other
            nn.GroupNorm(1, width),
            nn.SiLU(),
            convolution(width, width, 3, stride=2, padding=1),
            nn.GroupNorm(1, width),
            nn.SiLU(),
            pool(2),
            nn.Flatten(),
        )
        self.text = nn.Linear(pooled_width, width)
        self.head = nn.Sequential(
            # the scale of latents changes with t; without it, noisy states would dominate the regression
            nn.LayerNorm(features),
            nn.Linear(features, width),
            nn.SiLU(),
            nn.LayerNorm(width),
            nn.Linear(width, 1),
        )
        # V is 0 everywhere at first: without a warm-up the first advantages are the plain returns
        last: Any = self.head[-1]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected return (M,) of float32 latents x_t (M, C, H, W), of videos (M, C, T, H, W), at times (M,).

        `pooled` is their text (M, P).
        """
        # octaves of pi t: V has to change fast near t = 0 and slowly elsewhere
        frequency = 2.0 ** torch.arange(TIME_FEATURES // 2, device=sigma.device)
        angle = math.pi * sigma[:, None] * frequency
        features = torch.cat([self.image(latents), self.text(pooled), angle.sin(), angle.cos()], 1)
        value: Tensor = self.head(features)[:, 0]
        return value


class CriticTrainer:
    """A critic with its optimiser."""

    def __init__(self, critic: Critic, config: LatentCriticConfig) -> None:
        self.critic = critic
        self.config = config
        self.updates = 0
        self._optimizer = torch.optim.AdamW(critic.parameters(), lr=config.learning_rate)

    @property
    def warm(self) -> bool:
        """Whether the warm-up of the critic is over."""
        return self.updates >= self.config.warmup_updates

    @torch.no_grad()
    def values(self, latents: Tensor, sigma: Tensor, pooled: Tensor) -> Tensor:
        """Expected returns (M,) of noisy latents, computed in float32 without gradient."""
        size = self.config.batch_rows
        parts = zip(latents.split(size), sigma.split(size), pooled.split(size), strict=True)
        # values are subtracted from rewards; in bfloat16, advantages near 0 would be rounding error
        with torch.autocast(latents.device.type, enabled=False):
            return torch.cat([self.critic(x.float(), t, c.float()) for x, t, c in parts])

    def train(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        returns: Tensor,
        generator: torch.Generator,
        accelerator: Any,
        sizes: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
    ) -> float:
        """Regress on returns (M,) from latents (M, C, H, W), times (M,) and pooled text (M, P); returns the mean loss.

        The updates equal those of a single process with all states: `sizes` has the number of states of each task of
        this process, one by default, and `places` the positions of these tasks, as in `deal`. If no process has any
        states, there is no update and the loss is NaN.
        """
        losses: list[float | Tensor] = []
        own = [1] * len(returns) if sizes is None else sizes
        total = sum(merge_lists([sum(own)], accelerator))
        if not total:
            return float("nan")
        for _ in range(self.config.updates_per_step):
            # as many updates as one process with all states would make
            parts = deal(own, -(-total // self.config.batch_rows), generator, accelerator, places)
            # the size of each part over all processes, which divides the loss; `tensor_split` as in `deal`
            counts = [len(part) for part in torch.arange(total).tensor_split(len(parts))]
            for rows, count in zip(parts, counts, strict=True):
                index = to_device(rows, returns.device)
                losses.append(self._update([value[index] for value in (*inputs, returns)], count, accelerator))
        # shares add up over processes; `losses` has one entry per update on each of them
        return sum(merge_lists([sum(numbers(losses))], accelerator)) / len(losses)

    def _update(self, rows: Sequence[Tensor], count: int, accelerator: Any) -> float | Tensor:
        """One update on `count` states of all processes; returns this process's fraction of the mean loss."""
        x, sigma, pooled, returns = rows
        share: float | Tensor = 0.0
        if len(returns):  # a process without rows in this part still takes part in the sum of gradients
            with torch.enable_grad():
                loss = (self.critic(x.float(), sigma, pooled.float()) - returns).square().sum() / count
                loss.backward()
            share = loss.detach()
        # every process makes the same update: the critic has no distributed wrapper
        sum_gradients(list(self.critic.parameters()), accelerator)
        nn.utils.clip_grad_norm_(self.critic.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        torch.clear_autocast_cache()  # it caches copies of the weights and does not notice the update
        self._optimizer.zero_grad()
        self.updates += 1
        return share

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimiser moments and update count."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.load_state_dict(state["critic"])
        load_optimizer(self._optimizer, state["optimizer"])
        self.updates = int(state["updates"])


CREDITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "return": lambda returns, values: returns - values,
    "difference": lambda returns, values: torch.cat([values[:, 1:], returns[:, -1:]], 1) - values,
}
"""Credit assignment: functions from returns and values (B, T) of states along a path to advantages (B, T); see
`diffusion.methods.ac_flow`."""


class LatentStateCritic(CriticTrainer):
    """The critic for the states of rollouts with mask 1, M of B * T.

    Args:
        policy: determines the shapes of latents and text embeddings.
        tasks: training prompts, at least one.
        config: size and training.
        seed: seed of the run; the global generator is not used.
        states: function from rollouts to latents x_t (M, C, H, W), times (M,) float32 and positions in (B, T).
    """

    def __init__(
        self,
        policy: DiffusionPolicy,
        tasks: Sequence[DiffusionTask],
        config: LatentCriticConfig,
        seed: int,
        states: Callable[[Rollouts], tuple[Tensor, Tensor, TrainedDecisions]],
    ) -> None:
        text = text_of(policy, tasks[:1], torch.zeros(1, dtype=torch.int64))
        # measured on one prompt, since families build their text vector in different ways
        pooled = policy.family.text_vector(text.values).shape[1]
        # neither draws from nor seeds the global generator, so runs with and without a critic sample alike
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "critic"))
            critic = Critic(policy.latent_shape[0], pooled, config.width, video=policy.family.video)
        super().__init__(critic.to(policy.device), config)
        self.policy = policy
        self.seed = seed
        self.states = states

    def value(self, rollouts: Rollouts) -> Tensor:
        """V (B, T) float32 of the states, without gradient; 0 if the mask is 0."""
        self.critic.to(self.policy.device, non_blocking=True)  # built before the policy moved to its device
        inputs, decisions = self._inputs(rollouts)
        return decisions.scatter(self.values(*inputs))

    def learn(self, rollouts: Rollouts, returns: Tensor, accelerator: Any, step: Step) -> dict[str, float]:
        """Regress on the returns (B,) of the rows that have a reward; returns metrics."""
        # of the step and not continued: a resumed run deals the same parts
        generator = make_generator(self.seed, "critic", step.number)
        with stopwatch("critic"):
            inputs, decisions = self._inputs(rollouts)
            # states of rows without a reward have no target; one transfer to the CPU serves both tensors
            scored, row = to_host([rollouts.scored, decisions.row])
            usable = torch.nonzero(scored[row]).flatten()
            # per task and not per row: `deal` orders the states of all processes by the positions of their tasks
            sizes = torch.bincount(rollouts.host.group[row[usable]], minlength=rollouts.num_groups).tolist()
            usable = to_device(usable, returns.device)
            latents, sigma, pooled = (values[usable] for values in inputs)
            known = returns[decisions.row[usable]]
            loss = self.train((latents, sigma, pooled), known, generator, accelerator, sizes, rollouts.places)
        return {"critic/loss": loss, "critic/updates": float(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.critic.to(self.policy.device)  # the optimiser's moments are loaded onto the device of the weights
        super().load_state_dict(state)

    def _inputs(self, rollouts: Rollouts) -> tuple[tuple[Tensor, Tensor, Tensor], TrainedDecisions]:
        latents, sigma, decisions = self.states(rollouts)
        # the group of each trained state, from the copies on the CPU
        group = rollouts.host.group[torch.nonzero(rollouts.host.mask > 0)[:, 0]]
        text = text_of(self.policy, DiffusionPayload.of(rollouts).tasks, group)
        return (latents.float(), sigma, self.policy.family.text_vector(text.expanded()).float()), decisions


def explained_by_time(rollouts: Rollouts, returns: Tensor, values: Tensor) -> dict[str, float]:
    """Fraction of the variance of returns (B,) explained by values (B, T): at all states, and in each half of time.

    Covers the states of all processes; every process has to call it.
    """
    columns = (DiffusionPayload.of(rollouts).sigma, rollouts.loss_mask, returns[:, None].expand_as(values), values)
    sigma, mask, wide, values = to_host(columns)
    mine = [column[mask > 0] for column in (sigma, wide, values)]
    sigma, wide, values = map(torch.cat, zip(*from_all(mine), strict=True))
    parts = {"": sigma >= 0, "/noisy": sigma > 0.5, "/clean": sigma <= 0.5}
    return {f"critic/explained{name}": explained_variance(wide[part], values[part]) for name, part in parts.items()}
