"""GRPO-Guard (arXiv 2510.22319; public code X-GenGroup/Flow-Factory, trainer GRPOGuard).

Flow-GRPO with another ratio. The log-density averaged over the latent's dimensions makes log-ratios negative on average
and of a size that depends on the time, so a clip range binds at some times and never at others, and mostly from one
side. Here the log-ratio of a step is

    (logp - logp_old) d + mean((mean - mean_old)^2) / (2 d),    d = standard deviation of the step,

which is 0 on average and of one scale at all times. The gradient of each step is weighted by d as well, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from diffusion.flow_grpo import FlowGrpoConfig, FlowGrpoRecipe
from diffusion.payload import DiffusionPayload
from diffusion.steps import guard_log_ratio
from diffusion.trajectories import placed
from mmrl.core.objective import PolicyOutputs
from mmrl.core.rollouts import Rollouts

__all__ = ["GrpoGuardConfig", "GrpoGuardRecipe"]


@dataclass
class GrpoGuardConfig(FlowGrpoConfig):
    """A GRPO-Guard run."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        if self.sampler.kernel == "cps":
            raise ValueError("sampler.kernel is 'cps', whose log-probability has no scale to correct; use flow_sde")
        if self.trainer.old_logp != "sampler":
            raise ValueError("trainer.old_logp must be 'sampler': the means are those of the sampling policy")


class GrpoGuardRecipe(FlowGrpoRecipe):
    """Flow-GRPO with normalised ratios; see the module."""

    config: GrpoGuardConfig
    keeps_mean = True

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Old log-density plus the normalised log-ratio, so that the objective's ratio is GRPO-Guard's."""
        payload = DiffusionPayload.of(rollouts)
        assert payload.mean_old is not None
        steps = self.step_scores(policy, rollouts)
        mean_old = payload.mean_old[:, : rollouts.num_decisions].flatten(0, 1)[steps.chosen]
        old = rollouts.logp_old.flatten()[steps.chosen]
        ratio = guard_log_ratio(steps.logp, old, steps.mean, mean_old, steps.std)
        return PolicyOutputs(
            logp=placed(old + ratio, steps.chosen, rollouts.mask.shape),
            kl_ref=self.placed_divergence(rollouts, steps) if "kl_ref" in outputs else None,
        )
