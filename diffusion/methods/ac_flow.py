"""AC-Flow: an actor-critic for flow matching (arXiv 2510.18072). Reimplemented from the paper; no public code.

From the abstract: shaped rewards that give the critic well-normalised targets, advantage clipping and a critic warm-up
for stability, and a critic that generalises reward weighting, with Wasserstein regularisation; a cheap critic suffices.
From the authors' project page: the critic predicts the future reward at each denoising step, and ORW-CFM-W2 is the
special case without a critic (reproduced exactly by `critic.enabled: false`, raw rewards, no clipping, exp). Everything
else is reconstructed:

    R = shape(reward),    A = clip(R - V(x_t, t, c), +-k),    w = f(A),
    L = mean w |v - u|^2 + alpha mean |v - v_ref|^2,    L_V = mean (V(x_t, t, c) - R)^2.

V is evaluated before it is trained on the rewards of the step. Only the critic is trained until
`critic.warmup_updates`.

**States.** The return of all states of an image is its shaped reward.

* `states: forward`: x_t = (1 - t) x_0 + t noise are re-noised images and u = noise - x_0. Works with any solver, and
  ORW-CFM-W2 is the exact special case.
* `states: trajectory`: x_t are states of the sampler, kept while the image was drawn, and u = (x_t - x_0) / t is the
  velocity towards the path's own image; `diffusion.matching.states` explains what that means for each kind of sampler.

**Credit.** Let s_1 .. s_T be the kept states of a path, the noisiest first:

* `credit: return`: A_i = R - V(s_i), the same outcome for all states.
* `credit: difference`: A_i = V(s_{i+1}) - V(s_i) and A_T = R - V(s_T), the gain of the path from one state to the next.
  The sum is R - V(s_1). This is generalised advantage estimation with gamma 1 and lambda 0; `return` is lambda 1.
  Noise added after s_{i+1} is part of u but not of A_i, and averages out of w u given s_{i+1}.

A difference measures the effect of the noise added in between. A deterministic solver adds none: the first state
determines the image, the exact V is the same at all states of a path, and differences are just errors of the critic, so
this combination is rejected. For the same reason, the critic of a deterministic path can only average (one baseline per
prompt and time) and discount what it cannot predict: expect little improvement over a group baseline.

`recipe: flow_ppo` uses the same critic with the policy gradient of stochastic steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.diffusion_config import OWN_LOSS, SCORES, DiffusionConfig, MatchingParts, refuse_blocks
from diffusion.matching.states import StateMatching, check_states
from diffusion.matching.velocity import FlowMatching
from diffusion.methods.latent_critic import (
    CREDITS,
    LatentCriticConfig,
    LatentStateCritic,
    RewardShaping,
    ShapingConfig,
    explained_by_time,
)
from diffusion.methods.orw_cfm import OrwRecipe, OrwSettings
from diffusion.sampling.schedule import RANDOM_SOLVERS
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig, check_group_size, make_objective
from mmrl.training.recipe import Step


@dataclass
class AcFlowConfig(MatchingParts, DiffusionConfig):  # type: ignore[misc]  # the trainer is a narrower one
    """An AC-Flow run."""

    compares_samples: ClassVar[bool] = False
    replaced_blocks: ClassVar[tuple[str, ...]] = ("order", *OWN_LOSS)
    states: str = choice("forward", lambda: STATES)
    """States for the critic and the matching loss: forward (images with new noise) or trajectory (states of the
    sampler)."""
    credit: str = choice("return", lambda: CREDITS)
    """Advantage of a state: return (R - V) or difference (V of the next kept state - V; needs states: trajectory and a
    stochastic sampler)."""
    shaping: ShapingConfig = rare(field(default_factory=ShapingConfig))
    """Conversion of rewards to returns."""
    critic: LatentCriticConfig = field(default_factory=LatentCriticConfig)
    """The value function."""
    advantage_bound: float = rare(bounded(1.0, at_least=0))
    """Maximum absolute advantage k; 0 = no bound."""
    orw: OrwSettings = field(default_factory=lambda: OrwSettings(weighting="exp", tau=1.0, normalize_weights=True))
    """Weights of the images."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="flow_grpo", kl={"coef": 1.0}))
    """Weight alpha of the distance to the start model, as kl.coef."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.shaping.kind == "group_z":
            objective = make_objective(self.objective)
            check_group_size(self.trainer.samples_per_task, objective, SCORES)
            if objective.advantage.state() is not None:
                raise ValueError(f"objective.advantage is '{objective.advantage.kind}', whose memory has no place here")
        else:
            refuse_blocks(self.objective, ("advantage", "scaling"))
        if self.orw.center:
            raise ValueError("orw.center is for ORW-CFM-W2 alone; here the critic or shaping.kind: group_z centres")
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


class AcFlowRecipe(OrwRecipe):
    """Critic-weighted matching of the policy's own images; see the module docstring."""

    config: AcFlowConfig
    own_loss = "ac_flow"

    def __init__(self, config: AcFlowConfig) -> None:
        super().__init__(config)
        self.process = STATES[config.states](self.policy, config.sampler, config.timesteps)
        self.target = "(x_t - x_0) / t" if config.states == "trajectory" else self.target
        # a part, so that checkpoints hold its running statistics
        self.shaping = self.parts["running"] = RewardShaping(config.shaping, self.objective)
        self.critic: LatentStateCritic | None = None
        if config.critic.enabled:
            self.critic = LatentStateCritic(
                self.policy, self.train_tasks, config.critic, config.seed, self.process.states
            )
            self.parts["critic"] = self.critic

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Weights f(clip(A, +-k)) of the matching errors, all masked out while the critic warms up."""
        # V is read before `learn`: a critic that has seen the rewards of this step would explain them away
        returns, values = self.shaping(rollouts, accelerator), self.values(rollouts)
        bound = self.config.advantage_bound
        advantage = CREDITS[self.config.credit](returns[:, None].expand_as(values), values)
        # bounded before the exponential: one outlier must not take the weight of a whole step
        advantage = advantage.clamp(-bound, bound) if bound else advantage
        # `OrwRecipe` turns A into weights, so V = 0 with raw rewards is exactly ORW-CFM-W2
        weighted = self.weighted(rollouts, advantage, accelerator)
        self.noted |= explained_by_time(rollouts, returns, values)
        if self.critic is None:
            return weighted
        if not self.critic.warm:
            # a mask of zeros: the policy makes no update, but images are drawn for the critic
            weighted = weighted.replace(mask=torch.zeros_like(weighted.mask))
        # trained on `rollouts`, whose mask is still whole: the critic learns during the warm-up
        self.noted |= self.critic.learn(rollouts, returns, accelerator, step)
        return weighted

    def values(self, rollouts: Rollouts) -> Tensor:
        """V (B, T) of the states; 0 without a critic."""
        return torch.zeros_like(rollouts.mask) if self.critic is None else self.critic.value(rollouts)

    def describe(self) -> str:
        """Formula of the loss with its constants."""
        return f"{super().describe()}, credit {self.config.credit}"


STATES: dict[str, type[FlowMatching]] = {"forward": FlowMatching, "trajectory": StateMatching}
"""The matching process for each choice of states."""
