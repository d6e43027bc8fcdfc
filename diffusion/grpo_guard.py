"""GRPO-Guard (arXiv 2510.22319; public code X-GenGroup/Flow-Factory, trainer GRPOGuard).

Flow-GRPO with another ratio. The log-density averaged over the latent's dimensions makes log-ratios negative on average
and of a size that depends on the time, so a clip range binds at some times and never at others, and mostly from one
side. Here the log-ratio of a step is

    (logp - logp_old) d + mean((mean - mean_old)^2) / (2 d),    d = standard deviation of the step,

which is 0 on average and of one scale at all times. The gradient of each step is weighted by d as well, as there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from diffusion.flow_grpo import flow_grpo_objective
from diffusion.payload import DiffusionPayload
from diffusion.recipe import DiffusionRecipe
from diffusion.settings import DiffusionConfig
from diffusion.steps import guard_log_ratio
from diffusion.trajectories import StepConfig, Trajectories, check_trajectories
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.objectives import ObjectiveConfig


@dataclass
class GrpoGuardConfig(DiffusionConfig):
    """A GRPO-Guard run."""

    step: StepConfig = field(default_factory=StepConfig)
    """Evaluation of the trained steps."""
    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_trajectories(self.sampler)
        if self.sampler.kernel == "cps":
            raise ValueError("sampler.kernel is 'cps', whose log-probability has no scale to correct; use flow_sde")
        if self.trainer.old_logp != "sampler":
            raise ValueError("trainer.old_logp must be 'sampler': the means are those of the sampling policy")


class GrpoGuardRecipe(DiffusionRecipe):
    """Flow-GRPO with normalised ratios; see the module."""

    config: GrpoGuardConfig
    process: Trajectories

    def __init__(self, config: GrpoGuardConfig) -> None:
        super().__init__(config)
        precision = config.trainer.mixed_precision
        self.process = Trajectories(self.policy, config.sampler, config.step, precision, keep_mean=True)

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Old log-density plus the normalised log-ratio, so that the objective's ratio is GRPO-Guard's."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        found = self.process.evaluate(policy, rollouts)
        decisions = found.steps.decisions
        logp_old = decisions.gather(rollouts.logp_old)
        ratio = guard_log_ratio(found.logp, logp_old, found.mean, decisions.gather(payload.mean_old), found.std)
        kl_ref = self.process.kl(found, self.loss_reference) if "kl_ref" in outputs else None
        return PolicyOutputs(logp=decisions.scatter(logp_old + ratio), kl_ref=kl_ref)
