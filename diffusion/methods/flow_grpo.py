"""Flow-GRPO (Liu et al., arXiv 2505.05470; public code yifan123/flow_grpo).

The flow's ODE sampler is made stochastic without changing its marginals (`flow_sde`), so that each denoising step is a
Gaussian with a log-density, and the steps are trained with GRPO: few steps while training (10) and many for
evaluation (40), guidance in both, group advantages over the epoch's standard deviation, PPO clip at 1e-4 and a KL to
the start model.

Where the paper and its code differ: the paper's KL is the exact divergence of two Gaussians (`step.kl_form: exact`, the
default); the code at its head divides by the variance without the step length (`flow_grpo_head`), a factor of 0.04 to
0.27, so its coefficients do not carry over. Older code sends gradient through the unconditional half of guidance
(`step.detach_negative: false`). Groups whose images all have one reward are dropped, as there
(`objective.filter.kind: drop`). Defaults are those of config/grpo.py for GenEval, except the sizes of an
epoch (48 prompts of 24 images there).

`flow_grpo_fast` and `dance_grpo` are this code with other constants; `GrpoGuardRecipe` changes the ratio.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import nn

from diffusion.config import DiffusionConfig, TrajectoryParts, image_trainer
from diffusion.models.policy import full_model
from diffusion.recipe import DiffusionRecipe
from diffusion.sampling.sampler import SamplerConfig
from diffusion.sampling.steps import guard_log_ratio
from diffusion.sampling.trajectories import DiffusionPayload, Trajectories
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.recipe import LossTerm, Passes, Step, single_update


def flow_grpo_objective() -> ObjectiveConfig:
    """The published objective; groups of equal reward have no gradient and are dropped."""
    return ObjectiveConfig(preset="flow_grpo", filter={"kind": "drop"})


@dataclass
class FlowGrpoConfig(TrajectoryParts, DiffusionConfig):
    """A Flow-GRPO run."""

    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""


class FlowGrpoRecipe(DiffusionRecipe):
    """Group-relative policy optimisation over stochastic denoising steps; see the module."""

    config: FlowGrpoConfig
    process: Trajectories

    def __init__(self, config: FlowGrpoConfig) -> None:
        super().__init__(config)
        self.process = Trajectories(self.policy, config.sampler, config.step, config.trainer.mixed_precision)


def flow_grpo_fast() -> FlowGrpoConfig:
    """Flow-GRPO on a short window of the steps, placed at random in the first half; the others follow the ODE.

    No guidance in rollouts, training or evaluation: the model learns what guidance gave. Coefficient-preserving steps
    (`cps`, noise 0.8), clip 1e-5, no KL. The public preset has 48 prompts of 24 images in an epoch.

    Source: yifan123/flow_grpo config/grpo.py (`*_fast_nocfg`), scripts/train_sd3_fast.py.
    """
    return FlowGrpoConfig(
        sampler=SamplerConfig(guidance=1.0, kernel="cps", noise_level=0.8, window=3),
        objective=ObjectiveConfig(preset="flow_grpo_fast", filter={"kind": "drop"}),
    )


def dance_grpo() -> FlowGrpoConfig:
    """DanceGRPO: constant noise eta (`dance_sde`), one initial noise a prompt, a random 60 % of each image's steps.

    Group advantages over the group's own standard deviation, clip 1e-4, no KL, no filter; 16 steps, eta 0.3, learning
    rate 1e-5 for full fine-tuning and groups of 12, as in the FLUX script. The public code scores the image predicted
    at the last step in place of the last state; here the last step is an ODE step to 0, which is that prediction.

    Source: Xue et al., DanceGRPO, arXiv 2505.07818; XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py.
    """
    return FlowGrpoConfig(
        model=full_model(),
        sampler=SamplerConfig(
            steps=16, guidance=1.0, kernel="dance_sde", noise_level=0.3, same_noise=True, random_share=0.6
        ),
        objective=ObjectiveConfig(preset="dance_grpo"),
        trainer=dataclasses.replace(image_trainer(), samples_per_task=12, learning_rate=1e-5),
    )


@dataclass
class GrpoGuardConfig(TrajectoryParts, DiffusionConfig):
    """A GRPO-Guard run."""

    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.sampler.kernel == "cps":
            raise ValueError("sampler.kernel is 'cps', whose log-probability has no scale to correct; use flow_sde")


class OldMeans(LossTerm):
    """Means and log-densities of the policy that the update starts from, where rounding makes the sampler's differ.

    A single update has them itself.
    """

    name = "old_means"
    gradient = "never"

    def __init__(self, recipe: GrpoGuardRecipe) -> None:
        self.recipe = recipe

    def provides(self, step: Step) -> frozenset[str]:
        """The log-densities, which belong to the means."""
        return frozenset() if self.recipe.is_old_in_update else frozenset({"logp_old"})

    def prepare(self, passes: Passes, rollouts: Rollouts, step: Step) -> Rollouts:
        """Evaluate the sampled steps again, in the micro-batches of the update."""
        if self.recipe.keeps_sampled_logp or self.recipe.is_old_in_update:
            return rollouts
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        logps, means = [], []
        for chunk in rollouts.micro_batches(self.recipe.config.trainer.micro_batch or rollouts.num_rows):
            with torch.no_grad():
                found = self.recipe.process.evaluate(passes.policy, chunk)
            decisions = found.steps.decisions
            sampled = DiffusionPayload.of(chunk).mean_old
            assert sampled is not None
            mean = sampled.flatten(0, 1).index_copy(0, decisions.index, found.mean)
            means.append(mean.view(*decisions.shape, *mean.shape[1:]))
            logps.append(decisions.scatter(found.logp))
        return rollouts.replace(
            logp_old=torch.cat(logps), payload=dataclasses.replace(payload, mean_old=torch.cat(means))
        )


class GrpoGuardRecipe(DiffusionRecipe):
    """Flow-GRPO with ratios of one scale at all steps.

    The log-density averaged over the latent's dimensions makes log-ratios negative on average and of a size that
    depends on the time, so a clip range binds at some times and never at others, and mostly from one side. Here the
    log-ratio of a step is

        (logp - logp_old) d + mean((mean - mean_old)^2) / (2 d),    d = standard deviation of the step,

    which is 0 on average and of one scale at all times. The gradient of each step is weighted by d as well, as there.

    Source: GRPO-Guard, arXiv 2510.22319; X-GenGroup/Flow-Factory, trainer GRPOGuard.
    """

    config: GrpoGuardConfig
    process: Trajectories

    def __init__(self, config: GrpoGuardConfig) -> None:
        super().__init__(config)
        precision = config.trainer.mixed_precision
        self.process = Trajectories(self.policy, config.sampler, config.step, precision, keep_mean=True)
        self.terms = [OldMeans(self)]

    @property
    def is_old_in_update(self) -> bool:
        """Whether the policy of the loss is the one that the update starts from."""
        return single_update(self.config.trainer) and not self.keeps_sampled_logp

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Old log-density plus the normalised log-ratio, so that the objective's ratio is GRPO-Guard's."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        found = self.process.evaluate(policy, rollouts)
        decisions = found.steps.decisions
        logp_old, mean_old = (decisions.gather(old) for old in (rollouts.logp_old, payload.mean_old))
        if self.is_old_in_update:
            logp_old, mean_old = found.logp.detach(), found.mean.detach()
        ratio = guard_log_ratio(found.logp, logp_old, found.mean, mean_old, found.std)
        kl_ref = self.process.kl(found, self.loss_reference) if "kl_ref" in outputs else None
        return PolicyOutputs(logp=decisions.scatter(logp_old + ratio), kl_ref=kl_ref)
