"""AC-Flow: an actor-critic for flow matching (arXiv 2510.18072). Reconstructed from its abstract; no public code.

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
  velocity towards the path's own image; `diffusion.methods.ac_flow` explains what that means for each kind of sampler.

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

Velocity matching at states of the sampler, instead of re-noised images.

A state x_t is on a path that ended in the image x_0. Its target is the velocity of the straight line from x_t at time t
to its own image at time 0,

    u = (x_t - x_0) / t,

which is noise - x_0 for the noise that would have led to it, (x_t - (1 - t) x_0) / t. For a re-noised image this is the
drawn noise, and on a straight path it is the initial noise of the path. Otherwise it is neither: the path of an ODE
bends, and a stochastic sampler forgets its initial noise.

The unweighted loss pulls towards E[u | x_t], which depends on how the images were drawn:

* With g^2 = 2 t / (1 - t), the noise of the re-noising process, (x_t, x_0) has the same distribution as re-noised
  images, and E[u | x_t] is the velocity that drew them (`sampler.solver: flow_sde` with noise_level sqrt(2), many
  steps).
* With an ODE solver, x_0 is a function of x_t, and u is the mean velocity over the rest of the path. The unweighted
  loss then straightens paths, as reflow does (Rectified flow, arXiv 2209.03003), and changes the model even if all
  rewards are equal. Weights with mean 0 remove that effect.
* With a noise level below sqrt(2), the target is between the two.

Before the last step, which goes straight to x_0, u is the model's own velocity and has no gradient at first;
`timesteps.fraction` excludes that state.

Shapes: B rows (images), T states of each, M of the B * T with mask 1, C x H x W one latent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.data.prompts import DiffusionTask
from diffusion.diffusion_config import OWN_LOSS, DiffusionConfig, MatchingParts, refuse_blocks
from diffusion.entries import SCORES
from diffusion.matching.losses import NoisyRows
from diffusion.matching.times import TimestepConfig, draw_times
from diffusion.matching.velocity import FlowMatching, NoisyVersions, matched_rollouts
from diffusion.methods.latent_critic import (
    CREDITS,
    LatentCriticConfig,
    LatentStateCritic,
    RewardShaping,
    ShapingConfig,
    explained_by_time,
)
from diffusion.methods.orw_cfm import OrwRecipe, OrwSettings
from diffusion.models.diffusion_policy import DiffusionPolicy
from diffusion.sampling.latent_sampler import LatentSamplerConfig, group_seeds, sample_states, text_of
from diffusion.sampling.schedule import RANDOM_SOLVERS
from diffusion.sampling.trajectories import DiffusionPayload, TrainedDecisions
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare
from mmrl.training.objectives import ObjectiveConfig, check_group_size, make_objective
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step

FIRST_STEP = {"discrete": 0, "discrete_wo_init": 1, "discrete_with_init": 0}
"""Distributions over the sampler's own times, and the first step that each can draw."""


def check_states(sampler: LatentSamplerConfig, timesteps: TimestepConfig) -> None:
    """Reject times at which the sampler has no states, before a model is loaded; raises ValueError."""
    if timesteps.times not in FIRST_STEP:
        raise ValueError(
            f"timesteps.times is '{timesteps.times}', but the sampler only has states at its own times; use "
            f"{', '.join(FIRST_STEP)}"
        )
    # as in `times._usable`: the first int(fraction * S) times, without the initial one if it is left out
    states = int(sampler.steps * timesteps.fraction) - FIRST_STEP[timesteps.times]
    if timesteps.count > states:
        raise ValueError(
            f"timesteps.count is {timesteps.count}, but timesteps.fraction={timesteps.fraction:g} of sampler.steps="
            f"{sampler.steps} leaves {states} states with timesteps.times '{timesteps.times}'; use at most {states}"
        )
    if timesteps.share_noise:
        raise ValueError(
            "timesteps.share_noise only applies to re-noised images; set it to false with states: trajectory"
        )


class StateMatching(FlowMatching):
    """Draws images, keeps some of the sampler's states and evaluates models on these; see the module docstring."""

    def draw(
        self, policy: DiffusionPolicy, tasks: Sequence[DiffusionTask], group_size: int, streams: Streams
    ) -> Rollouts:
        """Draw G images per task and keep T states of each, in path order.

        Args:
            policy: the policy to sample with.
            tasks: N prompts.
            group_size: G, images per prompt.
            streams: random streams for the sampler's noise and the choice of states.

        Returns:
            B = N * G rows with T decisions, without images and rewards.
        """
        group = torch.arange(len(tasks)).repeat_interleave(group_size)
        seeds = group_seeds(len(tasks), group_size, streams, same_noise=self.sampler.same_noise)
        # `draw_times` picks from any grid; a grid of step numbers makes it choose steps instead of times
        numbers = torch.arange(self.sampler.steps + 1.0)
        kept = draw_times(self.timesteps, numbers, len(tasks), group_size, streams).long()
        run = sample_states(policy, text_of(policy, tasks, group), seeds, self.sampler, kept)
        return matched_rollouts(tasks, group, run.latents, run.sigma, states=run.states)

    def noisy(self, rollouts: Rollouts) -> NoisyVersions:
        """The states with mask 1, each with the velocity towards its own image."""
        payload, decisions = DiffusionPayload.of(rollouts), TrainedDecisions.of(rollouts)
        assert payload.states is not None
        # B, T + 1 or T states: `gather` ignores what lies beyond the T decisions
        states, sigma = decisions.gather(payload.states), decisions.gather(payload.sigma)
        target = towards(payload.latents[decisions.row], states, sigma)
        # no noise is needed: each target points from the state to its own image
        return NoisyVersions(decisions, NoisyRows(states, target, sigma, decisions.row.cpu()))


def towards(clean: Tensor, states: Tensor, sigma: Tensor) -> Tensor:
    """Velocity (M, ...) float32 of straight lines from states x_t at times t > 0 to x_0 at 0, (x_t - x_0) / t."""
    # t is above 0, since the sampler calls the model at no state of time 0
    return (states.float() - clean.float()) / sigma.reshape(-1, *[1] * (clean.ndim - 1))


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
                raise ValueError(
                    f"objective.advantage is '{objective.advantage.kind}', which is not supported here because it "
                    "keeps a memory across steps"
                )
        else:
            refuse_blocks(self.objective, ("advantage", "scaling"))
        if self.orw.center:
            raise ValueError(
                "orw.center only applies to ORW-CFM-W2; here rewards are centred by the critic or by shaping.kind: "
                "group_z"
            )
        if self.states == "trajectory":
            check_states(self.sampler, self.timesteps)
        if self.credit == "difference":
            self._check_differences()

    def _check_differences(self) -> None:
        if self.states != "trajectory":
            raise ValueError(
                f"credit is 'difference', but with states '{self.states}' the states of an image do not form a path; "
                "use states: trajectory"
            )
        if not self.critic.enabled:
            raise ValueError("credit is 'difference', which compares values of the critic; set critic.enabled to true")
        if self.sampler.solver not in RANDOM_SOLVERS or self.sampler.noise_level == 0:
            raise ValueError(
                f"credit is 'difference', but sampler.solver '{self.sampler.solver}' with noise_level "
                f"{self.sampler.noise_level:g} is deterministic: the first state determines the image, so the values "
                f"along a path do not differ; use {', '.join(RANDOM_SOLVERS)} with noise_level above 0, or credit: "
                "return"
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
