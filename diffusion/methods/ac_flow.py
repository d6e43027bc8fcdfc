"""AC-Flow: an actor-critic for flow matching (arXiv 2510.18072). A reconstruction; there is no public code.

From the abstract: shaped rewards that give the critic well-normalised targets, advantage clipping and a critic warm-up
for stability, and a critic that generalises reward weighting, with Wasserstein regularisation; a cheap critic suffices.
From the authors' project page: the critic predicts the reward to come at each denoising step, and ORW-CFM-W2 is the
case without it (here exactly: `critic.enabled: false`, raw rewards, no clipping, exp). All else is reconstructed:

    R = shape(reward),    A = clip(R - V(x_t, t, c), +-k),    w = f(A),
    L = mean w |v - u|^2 + alpha mean |v - v_ref|^2,    L_V = mean (V(x_t, t, c) - R)^2.

V is evaluated before it is trained on the rewards of the step. Until `critic.warmup_updates` only the critic is
trained.

**States.** The return of all states of an image is its shaped reward.

* `states: forward`: x_t = (1 - t) x_0 + t noise are re-noised images and u = noise - x_0. Any solver can be used, and
  ORW-CFM-W2 is the exact special case.
* `states: trajectory`: x_t are states that the sampler went through, kept when the image was drawn, and
  u = (x_t - x_0) / t is the velocity towards the path's own image; `diffusion.matching.states` says what that means for
  which sampler.

**Credit.** With s_1 .. s_T the states that were kept of a path, the noisiest first:

* `credit: return`: A_i = R - V(s_i), the same outcome for all states.
* `credit: difference`: A_i = V(s_{i+1}) - V(s_i) and A_T = R - V(s_T), what the path gained from one state to the next.
  They add up to R - V(s_1). This is generalised advantage estimation with gamma 1 and lambda 0; `return` is lambda 1.
  Noise that was added after s_{i+1} is in u but not in A_i, and averages out of w u given s_{i+1}.

A difference is the luck of the noise that was added in between. With a deterministic solver there is none: the first
state decides the image, the exact V is the same at all states of a path, and differences are errors of the critic. They
are refused there. For the same reason a critic of a deterministic path can only average (a baseline a prompt and time)
and discount what it cannot predict: expect little over a group baseline.

`diffusion.methods.flow_ppo` gives the same critic to the policy gradient of stochastic steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.config import SCORES, DiffusionConfig, check_matching, matching_sampler, matching_trainer
from diffusion.matching.states import StateMatching, check_states
from diffusion.matching.velocity import FlowMatching, TimestepConfig
from diffusion.methods.critic import (
    CREDITS,
    CriticConfig,
    CriticTrainer,
    RewardShaping,
    ShapingConfig,
    States,
    explained_by_time,
    make_critic,
    state_values,
    train_critic,
)
from diffusion.methods.orw_cfm import OrwSettings, describe_loss, image_weights, weighted_matching_loss
from diffusion.models.ema import EMAWeights
from diffusion.models.policy import DiffusionPolicy
from diffusion.recipe import DiffusionRecipe
from diffusion.sampling.sampler import SamplerConfig
from diffusion.sampling.schedule import RANDOM_SOLVERS
from mmrl.core.loss import Denominators
from mmrl.core.objectives.objective import LossOutput
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig, check_group_size, make_objective
from mmrl.training.processes import make_generator
from mmrl.training.recipe import Step
from mmrl.training.settings import TrainerConfig


@dataclass
class AcFlowConfig(DiffusionConfig):
    """An AC-Flow run."""

    compares_samples: ClassVar[bool] = False
    states: str = choice("forward", lambda: STATES)
    """States that the critic judges and the policy is matched at: forward (images with new noise) or trajectory
    (states of the sampler)."""
    credit: str = choice("return", lambda: CREDITS)
    """Advantage of a state: return (R - V) or difference (V of the next state kept - V; needs states: trajectory and a
    stochastic sampler)."""
    shaping: ShapingConfig = rare(field(default_factory=ShapingConfig))
    """Rewards to returns."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function."""
    advantage_bound: float = rare(bounded(1.0, at_least=0))
    """Largest size k of an advantage; 0 = no bound."""
    orw: OrwSettings = field(default_factory=lambda: OrwSettings(weighting="exp", tau=1.0, normalize_weights=True))
    """Weights of the images."""
    timesteps: TimestepConfig = field(default_factory=TimestepConfig)
    """The states."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0}))
    """Weight alpha of the distance to the start model, as kl.coef."""
    sampler: SamplerConfig = field(default_factory=matching_sampler)
    """Sampling of images."""
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
        if self.states == "trajectory":
            check_states(self.sampler, self.timesteps)
        if self.credit == "difference":
            self._check_differences()

    def _check_differences(self) -> None:
        if self.states != "trajectory":
            raise ValueError(
                f"credit is 'difference', but with states '{self.states}' the states of an image do not follow one "
                "another; use states: trajectory"
            )
        if not self.critic.enabled:
            raise ValueError("credit is 'difference', which compares values of a critic; leave critic.enabled true")
        if self.sampler.solver not in RANDOM_SOLVERS or self.sampler.noise_level == 0:
            raise ValueError(
                f"credit is 'difference', but sampler.solver '{self.sampler.solver}' with noise_level "
                f"{self.sampler.noise_level:g} is deterministic: its first state decides the image, so the values of a "
                f"path do not differ; use {', '.join(RANDOM_SOLVERS)} with a noise_level above 0, or credit: return"
            )


class AcFlowRecipe(DiffusionRecipe):
    """Critic-weighted matching of the policy's own images; see the module."""

    config: AcFlowConfig
    process: FlowMatching
    own_loss = "ac_flow"

    def __init__(self, config: AcFlowConfig) -> None:
        super().__init__(config)
        self.process = STATES[config.states](self.policy, config.sampler, config.timesteps)
        self.last_policy = self.parts["last_policy"] = EMAWeights(self.policy, enabled=config.orw.refresh_every > 1)
        self.shaping = self.parts["running"] = RewardShaping(config.shaping, self.objective)
        self.critic: CriticTrainer | None = None
        if config.critic.enabled:
            self.critic = make_critic(self.policy, self.train_tasks, config.critic, config.seed)
            self.parts["critic"] = self.critic

    def sampling_weights(self, policy: DiffusionPolicy) -> AbstractContextManager[None]:
        """Sample with the weights of the last refresh."""
        return self.last_policy.applied(policy)

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weights f(clip(A, +-k)) of the matching errors; none of them counts while the critic warms up."""
        returns, values = self.shaping(rollouts, accelerator), self.values(rollouts)
        bound = self.config.advantage_bound
        advantage = CREDITS[self.config.credit](returns[:, None].expand_as(values), values)
        advantage = advantage.clamp(-bound, bound) if bound else advantage
        weighted = rollouts.replace(advantage=image_weights(advantage, rollouts, self.config.orw, accelerator))
        self.noted |= explained_by_time(rollouts, returns, values)
        if self.critic is None:
            return weighted
        if not self.critic.warm:
            weighted = weighted.replace(mask=torch.zeros_like(weighted.mask))
        generator = make_generator(self.config.seed, "critic", step.number, accelerator.process_index)
        self.noted |= train_critic(
            self.critic, self.policy, rollouts, self._states(rollouts), returns, generator, accelerator
        )
        return weighted

    def values(self, rollouts: Rollouts) -> Tensor:
        """V (B, T) of the states; 0 everywhere without a critic."""
        if self.critic is None:
            return torch.zeros_like(rollouts.mask)
        return state_values(self.critic, self.policy, rollouts, self._states(rollouts))

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Weighted matching error and the distance to the start model."""
        matching = self.process.evaluate(policy, minibatch)
        anchor = self.process.reference_term(
            matching, minibatch, denominators, self.loss_reference, self.objective.kl_coef
        )
        return weighted_matching_loss(matching, minibatch, denominators, anchor)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        target = "(x_t - x_0) / t" if self.config.states == "trajectory" else "(noise - x_0)"
        return f"{describe_loss(self.config.orw, self.objective.kl_coef, target)}, credit {self.config.credit}"

    def on_step_end(self, step: Step, metrics: Mapping[str, float]) -> None:
        """Refresh the sampling policy."""
        super().on_step_end(step, metrics)
        if (step.number + 1) % self.config.orw.refresh_every == 0:
            self.last_policy.copy_()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        if self.critic is not None:
            self.critic.critic.to(self.policy.device)  # the optimiser's moments go where the weights are
        super().load_state_dict(state)

    def _states(self, rollouts: Rollouts) -> States:
        versions = self.process.noisy(rollouts)
        return States(versions.rows.latents, versions.rows.sigma, versions.decisions)


STATES: dict[str, type[FlowMatching]] = {"forward": FlowMatching, "trajectory": StateMatching}
"""Matching of each choice of states."""
