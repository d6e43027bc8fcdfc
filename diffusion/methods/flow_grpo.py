"""Flow-GRPO (Liu et al., arXiv 2505.05470; public code yifan123/flow_grpo).

The flow's ODE sampler is made stochastic without changing its marginals (`flow_sde`), so that each denoising step is a
Gaussian with a log-density. The steps are trained with GRPO: few steps in training (10) and many in evaluation (40),
guidance in both, group advantages divided by the epoch's standard deviation, a PPO clip of 1e-4 and a KL term to the
start model.

The paper and its code differ. The paper's KL is the exact divergence of two Gaussians (`step.kl_form: exact`, the
default), while the latest code divides by the variance without the step length (`flow_grpo_head`); this is a factor of
0.04 to 0.27, so its coefficients do not carry over. Older code has a gradient through the unconditional half of
guidance (`step.detach_negative: false`). As in the code, groups whose images all have the same reward are dropped
(`objective.filter.kind: drop`). Defaults follow config/grpo.py for GenEval, except for the epoch size (48 prompts with
24 images there).

`flow_grpo_fast`, `dance_grpo` and `mix_grpo` use this code with different hyperparameters, `flow_dppo` with a different
clip; `GrpoGuardRecipe` changes the ratio.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from diffusion.diffusion_config import DiffusionConfig, TrajectoryParts, image_trainer
from diffusion.diffusion_recipe import TrajectoryRecipe
from diffusion.models.diffusion_policy import full_model
from diffusion.sampling.latent_sampler import LatentSamplerConfig
from diffusion.sampling.steps import StepKernel, guard_log_ratio
from diffusion.sampling.trajectories import DiffusionPayload
from mmrl.core.objectives.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.fields import choice, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import merge_lists
from mmrl.training.recipe import Step

TINY = 1e-12
STEP_WEIGHTS: dict[str, Callable[[StepKernel, Tensor, Tensor], Tensor]] = {
    "none": lambda kernel, sigma, sigma_next: torch.ones_like(sigma),
    "equal": lambda kernel, sigma, sigma_next: kernel.gradient_scale(sigma, sigma_next).reciprocal(),
    "noise": lambda kernel, sigma, sigma_next: kernel.spread(sigma, sigma_next),
}
"""Weights (M,) of steps as functions of their times (M,), up to a constant factor."""


def flow_grpo_objective() -> ObjectiveConfig:
    """The published objective; groups of equal reward have no gradient and are dropped."""
    return ObjectiveConfig(preset="flow_grpo", filter={"kind": "drop"})


@dataclass
class FlowGrpoConfig(TrajectoryParts, DiffusionConfig):
    """A Flow-GRPO run."""

    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""
    step_weight: str = rare(choice("none", lambda: STEP_WEIGHTS))
    """Weight of a step, normalised to mean 1: none; equal: inverse of the gradient's magnitude at that time
    (Flash-GRPO, arXiv 2605.15980); noise: standard deviation of the step (TempFlow-GRPO, arXiv 2508.04324)."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.step_weight == "equal" and self.sampler.kernel == "cps":
            raise ValueError("step_weight is equal, but sampler.kernel 'cps' has no log-density to scale; use flow_sde")


class FlowGrpoRecipe(TrajectoryRecipe):
    """Group-relative policy optimisation over stochastic denoising steps; see the module docstring."""

    config: FlowGrpoConfig

    def advantages(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Group advantages, weighted by `step_weight`."""
        found = super().advantages(rollouts, accelerator, step)
        if self.config.step_weight == "none":
            return found
        payload, trained = DiffusionPayload.of(rollouts), rollouts.loss_mask
        assert payload.sigma_next is not None
        assert found.advantage is not None
        of_step = STEP_WEIGHTS[self.config.step_weight]
        # of all steps, also untrained ones; the mask excludes those from the mean below
        weight = of_step(self.process.kernel, payload.sigma.flatten(), payload.sigma_next.flatten())
        weight = weight.view_as(payload.sigma)
        # the mean over the trained steps of all processes: a process alone would scale its rows by its own mean
        sums = zip(*merge_lists([(float((weight * trained).sum()), float(trained.sum()))], accelerator), strict=True)
        total, count = (sum(parts) for parts in sums)
        # over their mean, so that the weights move gradient between steps and leave the learning rate's scale alone
        return found.replace(advantage=found.advantage * weight * (count / max(total, TINY)))


def flow_grpo_fast() -> FlowGrpoConfig:
    """Flow-GRPO on a short window of steps at a random position in the first half; the others follow the ODE.

    There is no guidance in rollouts, training or evaluation: the model learns to do without it. Coefficient-preserving
    steps (`cps`, noise 0.8), clip 1e-5, no KL. The public preset has 48 prompts with 24 images in an epoch.

    Source: yifan123/flow_grpo config/grpo.py (`*_fast_nocfg`), scripts/train_sd3_fast.py.
    """
    return FlowGrpoConfig(
        sampler=LatentSamplerConfig(guidance=1.0, kernel="cps", noise_level=0.8, window=3),
        objective=ObjectiveConfig(preset="flow_grpo_fast", filter={"kind": "drop"}),
    )


def dance_grpo() -> FlowGrpoConfig:
    """DanceGRPO: constant noise eta (`dance_sde`), training on a random 60% of each image's denoising steps.

    All images of a prompt start from the same noise. Group advantages divided by the group's own standard deviation,
    clip 1e-4, no KL, no filter; 16 steps, eta 0.3, learning rate 1e-5 for full fine-tuning and groups of 12, as in the
    FLUX script. The public code scores the image predicted at the last step instead of the last state; here the last
    step is an ODE step to 0, which gives the same image.

    Source: Xue et al., DanceGRPO, arXiv 2505.07818; XueZeyue/DanceGRPO fastvideo/train_grpo_flux.py.
    """
    return FlowGrpoConfig(
        model=full_model(),
        sampler=LatentSamplerConfig(
            steps=16, guidance=1.0, kernel="dance_sde", noise_level=0.3, same_noise=True, random_share=0.6
        ),
        objective=ObjectiveConfig(preset="dance_grpo"),
        trainer=dataclasses.replace(image_trainer(), samples_per_task=12, learning_rate=1e-5),
    )


def mix_grpo() -> FlowGrpoConfig:
    """MixGRPO: 4 of 25 steps are stochastic, in a window that moves by one step every 25 steps of the run.

    Noise, clip, advantages and one initial noise per prompt as in the FLUX script, where `sampler.guidance` is 1 and
    the embedded guidance 3.5. The paper's "Flash" variants, which use DPM-Solver++ for the rest of the path, are not
    implemented: the other steps are Euler steps.

    Source: MixGRPO, arXiv 2507.21802; Tencent-Hunyuan/MixGRPO scripts/finetune/finetune_flux_grpo_MixGRPO.sh.
    """
    return FlowGrpoConfig(
        model=full_model(),
        sampler=LatentSamplerConfig(steps=25, guidance=1.0, same_noise=True, window=4, window_schedule="progressive"),
        objective=ObjectiveConfig(preset="dance_grpo"),
        trainer=dataclasses.replace(image_trainer(), samples_per_task=12, learning_rate=1e-5),
    )


def flow_dppo() -> FlowGrpoConfig:
    """Flow-DPPO: instead of clipping, steps that have moved too far from the old policy and would move on are masked.

    Three steps of the first half are stochastic, without guidance. In the public code these are any three steps of the
    first half, here they are consecutive.

    Source: Flow-DPPO, arXiv 2606.11025; Tencent-Hunyuan/UniRL examples/diffusion/sd3_flowdppo.yaml.
    """
    return FlowGrpoConfig(
        sampler=LatentSamplerConfig(guidance=1.0, window=3),
        objective=ObjectiveConfig(preset="flow_dppo"),
        trainer=dataclasses.replace(image_trainer(), samples_per_task=16, weight_decay=0.0),
    )


@dataclass
class GrpoGuardConfig(TrajectoryParts, DiffusionConfig):
    """A GRPO-Guard run."""

    scored: ClassVar[tuple[str, ...]] = ("kl_ref",)
    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.sampler.kernel == "cps":
            raise ValueError("sampler.kernel is 'cps', whose log-probability has no scale to correct; use flow_sde")


class GrpoGuardRecipe(TrajectoryRecipe):
    """Flow-GRPO with ratios on the same scale at all steps.

    With log-densities averaged over the latent's dimensions, log-ratios are negative on average and their scale depends
    on the time. A clip range is then active at some times and never at others, and mostly on one side. Here the
    log-ratio of a step is

        (logp - logp_old) d + mean((mean - mean_old)^2) / (2 d),    d = standard deviation of the step,

    which averages to 0 and has the same scale at all times. As in the public code, this also weights the gradient of
    each step by d.

    Source: GRPO-Guard, arXiv 2510.22319; X-GenGroup/Flow-Factory, trainer GRPOGuard.
    """

    config: GrpoGuardConfig
    keeps_means = True

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Old log-density plus the normalised log-ratio, which makes the objective's ratio that of GRPO-Guard."""
        found = self.process.evaluate(policy, rollouts)
        logp_old, mean_old = self.old.of(found, rollouts)
        # added to logp_old, so that the objective's own exp(logp - logp_old) is GRPO-Guard's ratio
        ratio = guard_log_ratio(found.logp, logp_old, found.mean, mean_old, found.std)
        kl_ref = self.process.kl(found, self.loss_reference) if "kl_ref" in outputs else None
        return PolicyOutputs(logp=found.steps.decisions.scatter(logp_old + ratio), kl_ref=kl_ref)
