"""AC-Flow: an actor-critic for flow matching (arXiv 2510.18072). A reconstruction; there is no public code.

From the abstract: shaped rewards that give the critic well-normalised targets, advantage clipping and a critic warm-up
for stability, and a critic that generalises reward weighting, with Wasserstein regularisation; a cheap critic suffices.
ORW-CFM-W2 is the case without a critic (exactly: `critic.enabled: false`, raw rewards, no clipping, exp). All else is
reconstructed here:

    R = shape(reward),    A = clip(R - V(x_t, t, c), +-k),    w = f(A),
    L = mean w |v - (noise - x_0)|^2 + alpha mean |v - v_ref|^2,    L_V = mean (V(x_t, t, c) - R)^2.

Each noisy version x_t of an image is a state on its way; all of them return the image's shaped reward. V is asked
before it has seen the rewards of the step, then trained on them. Until `critic.warmup_updates` only the critic is
trained. The states are re-noised images rather than those of the sampler, which makes any solver usable and ORW-CFM-W2
the exact special case. With a deterministic sampler the value of a state is decided by the start noise, so a critic can
only average (a baseline a prompt and time) and discount what it cannot predict: expect little over a group baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.critic import Critic, CriticConfig, CriticTrainer
from diffusion.orw_cfm import OrwConfig, OrwRecipe, OrwSettings
from diffusion.payload import DiffusionPayload
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice
from mmrl.training.loop.distributed import global_advantages, merge_lists
from mmrl.training.loop.objectives import ObjectiveConfig, check_group_size, make_objective
from mmrl.training.loop.seeds import make_generator, stream_seed
from mmrl.training.record.stopwatch import stopwatch

__all__ = ["SHAPINGS", "AcFlowConfig", "AcFlowRecipe", "ShapingConfig"]

SHAPINGS = ("none", "minmax", "running_z", "running_z_tanh", "group_z")


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
    momentum: float = bounded(0.05, above=0, at_most=1)
    """Weight of a new step in the running mean and deviation."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.high <= self.low:
            raise ValueError(f"shaping.high is {self.high}; must be above shaping.low={self.low}")


def _orw() -> OrwSettings:
    return OrwSettings(weighting="exp", tau=1.0, normalize_weights=True)


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0})


@dataclass
class AcFlowConfig(OrwConfig):
    """An AC-Flow run."""

    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Rewards to returns."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function."""
    advantage_bound: float = bounded(1.0, at_least=0)
    """Largest size k of R - V; 0 = no bound."""
    orw: OrwSettings = field(default_factory=_orw)
    """Weights of the images."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Weight alpha of the distance to the start model, as kl_coef."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.shaping.kind == "group_z":
            check_group_size(self.trainer.samples_per_task, make_objective(self.objective))
        if self.orw.center:
            raise ValueError("orw.center is for ORW-CFM-W2 alone; here the critic or shaping.kind: group_z centres")


class AcFlowRecipe(OrwRecipe):
    """Critic-weighted matching of the policy's own images; see the module."""

    config: AcFlowConfig
    loss_name: ClassVar[str | None] = "ac_flow"

    def __init__(self, config: AcFlowConfig) -> None:
        super().__init__(config)
        self.critic = _critic(self, config) if config.critic.enabled else None
        self._running: tuple[float, float] | None = None
        self._step = 0
        self._noted: dict[str, float] = {}

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Weights of the matching errors; none of them counts while the critic warms up."""
        if self.critic is not None:
            self.critic.critic.to(self.policy.device)  # made before the policy moved to its device
        weighted = super().advantages(rollouts, accelerator)
        if self.critic is not None and not self.critic.warm:
            weighted = weighted.replace(mask=torch.zeros_like(weighted.mask))
        if self.critic is not None:
            self._train_critic(self.critic, rollouts, accelerator)
        return weighted

    def worth(self, rollouts: Rollouts, accelerator: Accelerator) -> Tensor:
        """Clipped advantage of each noisy version."""
        returns = self.shaped(rollouts, accelerator)[:, None].expand_as(rollouts.mask)
        values = self._values(rollouts)
        advantage = returns - values
        self._note(rollouts, returns, values)
        bound = self.config.advantage_bound
        return advantage.clamp(-bound, bound) if bound else advantage

    def shaped(self, rollouts: Rollouts, accelerator: Accelerator) -> Tensor:
        """Returns (B,) of the rewards; 0 where a row could not be scored."""
        shaping, reward = self.config.shaping, rollouts.reward.nan_to_num()
        if shaping.kind == "minmax":
            return ((reward - shaping.low) / (shaping.high - shaping.low)).clamp(0, 1)
        if shaping.kind == "group_z":
            estimated = global_advantages(self.objective.compute_advantages, rollouts, accelerator).advantage
            assert estimated is not None
            return estimated[:, 0]
        if shaping.kind == "none":
            return reward
        scored = [value for value in merge_lists(rollouts.reward.tolist(), accelerator) if value == value]
        mean, deviation = self._follow(torch.tensor(scored))
        z = torch.where(rollouts.scored, (reward - mean) / (deviation + 1e-8), 0.0).clamp(-3, 3)
        return z.tanh() if shaping.kind == "running_z_tanh" else z

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of the room and of the critic."""
        return super().step_metrics(rollouts) | self._noted

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Refresh the sampling policy."""
        super().on_step_end(step, metrics)
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """Counts, critic and running statistics."""
        critic = None if self.critic is None else self.critic.state_dict()
        running = None if self._running is None else list(self._running)
        return super().state_dict() | {"critic": critic, "running": running, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        if self.critic is not None and state["critic"] is not None:
            self.critic.critic.to(self.policy.device)  # the optimiser's moments go where the weights are
            self.critic.load_state_dict(state["critic"])
        self._running = None if state["running"] is None else (state["running"][0], state["running"][1])
        self._step = int(state["step"])

    def _follow(self, rewards: Tensor) -> tuple[float, float]:
        """Move the running mean and deviation; the first step sets them."""
        mean, deviation = float(rewards.mean()), float(rewards.std(correction=0))
        if self._running is not None:
            weight = self.config.shaping.momentum
            mean = (1 - weight) * self._running[0] + weight * mean
            deviation = (1 - weight) * self._running[1] + weight * deviation
        self._running = (mean, deviation)
        return self._running

    def _values(self, rollouts: Rollouts) -> Tensor:
        if self.critic is None:
            return torch.zeros_like(rollouts.mask)
        inputs, chosen = self._inputs(rollouts)
        values = self.critic.values(*inputs)
        return torch.zeros_like(rollouts.mask).flatten().index_copy(0, chosen, values).view_as(rollouts.mask)

    def _inputs(self, rollouts: Rollouts) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """What the critic sees of the noisy versions, and their places in the flattened (B, T)."""
        noisy, chosen = self.noisy(rollouts)
        text = self.text_of(DiffusionPayload.of(rollouts).tasks, rollouts.group).select(noisy.image)
        return (noisy.latents.float(), noisy.sigma, text.expanded()[1].float()), chosen

    def _train_critic(self, critic: CriticTrainer, rollouts: Rollouts, accelerator: Accelerator) -> None:
        with stopwatch("critic"):
            inputs, chosen = self._inputs(rollouts)
            usable = rollouts.scored.repeat_interleave(rollouts.num_decisions)[chosen]
            targets = self._targets.flatten()[chosen][usable]
            generator = make_generator(self.config.seed, "critic", self._step, accelerator.process_index)
            kept = (inputs[0][usable], inputs[1][usable], inputs[2][usable])
            self._noted["critic/loss"] = critic.train(kept, targets, generator, accelerator)
        self._noted["critic/updates"] = float(critic.updates)

    def _note(self, rollouts: Rollouts, returns: Tensor, values: Tensor) -> None:
        """Keep the critic's targets, and how much of them it foresaw."""
        self._targets = returns.contiguous()
        mask = rollouts.loss_mask > 0
        target, found = returns[mask], values[mask]
        spread = float(target.var(correction=0)) if len(target) else 0.0
        missed = float((target - found).var(correction=0)) if len(target) else 0.0
        self._noted = {"critic/explained": 1 - missed / spread if spread > 0 else 0.0}


def _critic(recipe: AcFlowRecipe, config: AcFlowConfig) -> CriticTrainer:
    channels = recipe.policy.latent_shape[0]
    pooled = recipe.text_of(recipe.train_tasks[:1], torch.zeros(1, dtype=torch.int64)).pooled.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.seed, "critic"))
        critic = Critic(channels, pooled, config.critic.width)
    return CriticTrainer(critic.to(recipe.policy.device), config.critic)
