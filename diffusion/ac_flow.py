"""AC-Flow: an actor-critic for flow matching (arXiv 2510.18072). A reconstruction; there is no public code.

From the abstract: shaped rewards that give the critic well-normalised targets, advantage clipping and a critic warm-up
for stability, and a critic that generalises reward weighting, with Wasserstein regularisation; a cheap critic suffices.
ORW-CFM-W2 is the case without a critic (exactly: `critic.enabled: false`, raw rewards, no clipping, exp). All else is
reconstructed here:

    R = shape(reward),    A = clip(R - V(x_t, t, c), +-k),    w = f(A),
    L = mean w |v - (noise - x_0)|^2 + alpha mean |v - v_ref|^2,    L_V = mean (V(x_t, t, c) - R)^2.

Each noisy version x_t of an image is a state; the return of all of them is the image's shaped reward. V is evaluated
before it is trained on the rewards of the step. Until `critic.warmup_updates` only the critic is
trained. The states are re-noised images rather than those of the sampler, which makes any solver usable and ORW-CFM-W2
the exact special case. With a deterministic sampler the value of a state is decided by the start noise, so a critic can
only average (a baseline a prompt and time) and discount what it cannot predict: expect little over a group baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.critic import Critic, CriticConfig, CriticTrainer
from diffusion.flow_matching import (
    FlowMatching,
    check_matching,
    matching_sampler,
    matching_trainer,
)
from diffusion.orw_cfm import LastPolicy, OrwSettings, describe_loss, image_weights, weighted_matching_loss
from diffusion.payload import DiffusionPayload
from diffusion.policy import DiffusionPolicy
from diffusion.recipe import DiffusionRecipe
from diffusion.sampler import SamplerConfig
from diffusion.settings import SCORES, DiffusionConfig
from diffusion.shaping import RewardShaping, ShapingConfig
from diffusion.velocity_matching import TimestepConfig
from mmrl.core.aggregation import Denominators
from mmrl.core.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded
from mmrl.training.loop.objectives import ObjectiveConfig, check_group_size, make_objective
from mmrl.training.loop.seeds import make_generator, stream_seed
from mmrl.training.loop.settings import TrainerConfig
from mmrl.training.record.stopwatch import stopwatch

__all__ = ["AcFlowConfig", "AcFlowRecipe"]


@dataclass
class AcFlowConfig(DiffusionConfig):
    """An AC-Flow run."""

    compares_samples: ClassVar[bool] = False
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Rewards to returns."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function."""
    advantage_bound: float = bounded(1.0, at_least=0)
    """Largest size k of R - V; 0 = no bound."""
    orw: OrwSettings = field(default_factory=lambda: OrwSettings(weighting="exp", tau=1.0, normalize_weights=True))
    """Weights of the images."""
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    """The noisy versions."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0}))
    """Weight alpha of the distance to the start model, as kl.coef."""
    sampler: SamplerConfig = field(default_factory=matching_sampler)
    """How images are drawn."""
    trainer: TrainerConfig = field(default_factory=matching_trainer)
    """Batch sizes, optimiser and guards."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_matching(self.trainer, self.sampler, self.timesteps)
        if self.shaping.kind == "group_z":
            check_group_size(self.trainer.samples_per_task, make_objective(self.objective), SCORES)
        if self.orw.center:
            raise ValueError("orw.center is for ORW-CFM-W2 alone; here the critic or shaping.kind: group_z centres")
        if self.combine != "sum":
            raise ValueError(f"combine is '{self.combine}'; weights are made of summed rewards, use sum")


class AcFlowRecipe(DiffusionRecipe):
    """Critic-weighted matching of the policy's own images; see the module."""

    config: AcFlowConfig
    process: FlowMatching
    loss_name: ClassVar[str | None] = "ac_flow"
    has_loss_terms: ClassVar[bool] = True

    def __init__(self, config: AcFlowConfig) -> None:
        super().__init__(config)
        self.process = FlowMatching(self.policy, config.sampler, config.timesteps)
        self.last_policy = LastPolicy(self.policy, config.orw.refresh_every)
        self.shaping = RewardShaping(config.shaping, self.objective)
        self.critic = self._make_critic() if config.critic.enabled else None
        self._step = 0
        self._critic_metrics: dict[str, float] = {}

    def sampling_weights(self, policy: DiffusionPolicy) -> AbstractContextManager[None]:
        """Those of the last refresh."""
        return self.last_policy.applied(policy)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator) -> Rollouts:
        """Weights f(clip(R - V, +-k)) of the matching errors; none of them counts while the critic warms up."""
        if self.critic is not None:
            self.critic.critic.to(self.policy.device)  # made before the policy moved to its device
        returns = self.shaping(rollouts, accelerator)[:, None].expand_as(rollouts.mask)
        values = self.values(rollouts)
        bound = self.config.advantage_bound
        advantage = (returns - values).clamp(-bound, bound) if bound else returns - values
        weighted = rollouts.replace(advantage=image_weights(advantage, rollouts, self.config.orw, accelerator))
        self._critic_metrics = {"critic/explained": _explained(returns, values, rollouts.loss_mask)}
        if self.critic is None:
            return weighted
        if not self.critic.warm:
            weighted = weighted.replace(mask=torch.zeros_like(weighted.mask))
        self._train_critic(self.critic, rollouts, returns, accelerator)
        return weighted

    def values(self, rollouts: Rollouts) -> Tensor:
        """V (B, T) of the noisy versions; 0 everywhere without a critic."""
        if self.critic is None:
            return torch.zeros_like(rollouts.mask)
        inputs, index = self._critic_inputs(rollouts)
        values = self.critic.values(*inputs)
        return torch.zeros_like(rollouts.mask).flatten().index_copy(0, index, values).view_as(rollouts.mask)

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
        """Weighted matching error and the distance to the start model."""
        matching = self.process.evaluate(policy, minibatch)
        anchor = self.process.reference_term(
            matching, minibatch, denominators, self.loss_reference, self.objective.kl_coef
        )
        return weighted_matching_loss(matching, minibatch, denominators, anchor)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        return describe_loss(self.config.orw, self.objective.kl_coef)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float]:
        """Metrics of the room and of the critic."""
        return super().step_metrics(rollouts) | self._critic_metrics

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Refresh the sampling policy."""
        super().on_step_end(step, metrics)
        self.last_policy.on_step_end(step)
        self._step = step

    def state_dict(self) -> dict[str, Any]:
        """Counts, sampling policy, critic and running statistics."""
        return super().state_dict() | {
            "last_policy": self.last_policy.state_dict(),
            "critic": None if self.critic is None else self.critic.state_dict(),
            "running": self.shaping.state_dict(),
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.last_policy.load_state_dict(state["last_policy"])
        if self.critic is not None and state["critic"] is not None:
            self.critic.critic.to(self.policy.device)  # the optimiser's moments go where the weights are
            self.critic.load_state_dict(state["critic"])
        self.shaping.load_state_dict(state["running"])
        self._step = int(state["step"])

    def _critic_inputs(self, rollouts: Rollouts) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Latents, times and pooled text of the noisy versions, and their places (M,) in the flattened (B, T)."""
        versions = self.process.noisy(rollouts)
        noisy = versions.rows
        text = self.text_of(DiffusionPayload.of(rollouts).tasks, rollouts.group).select(noisy.image)
        return (noisy.latents.float(), noisy.sigma, text.expanded()[1].float()), versions.decisions.index

    def _train_critic(
        self, critic: CriticTrainer, rollouts: Rollouts, returns: Tensor, accelerator: Accelerator
    ) -> None:
        with stopwatch("critic"):
            (latents, sigma, pooled), index = self._critic_inputs(rollouts)
            usable = rollouts.scored.repeat_interleave(rollouts.num_decisions)[index]
            targets = returns.flatten()[index][usable]
            generator = make_generator(self.config.seed, "critic", self._step, accelerator.process_index)
            kept = (latents[usable], sigma[usable], pooled[usable])
            self._critic_metrics["critic/loss"] = critic.train(kept, targets, generator, accelerator)
        self._critic_metrics["critic/updates"] = float(critic.updates)

    def _make_critic(self) -> CriticTrainer:
        channels = self.policy.latent_shape[0]
        pooled = self.text_of(self.train_tasks[:1], torch.zeros(1, dtype=torch.int64)).pooled.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(self.config.seed, "critic"))
            critic = Critic(channels, pooled, self.config.critic.width)
        return CriticTrainer(critic.to(self.policy.device), self.config.critic)


def _explained(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """Share of the returns' variance (B, T) that the values explain, over the trained decisions."""
    target, found = returns[mask > 0], values[mask > 0]
    variance = float(target.var(correction=0)) if len(target) else 0.0
    unexplained = float((target - found).var(correction=0)) if len(target) else 0.0
    return 1 - unexplained / variance if variance > 0 else 0.0
