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

Methods that are this code with other constants are rows of `diffusion/presets.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diffusion.recipe import DiffusionRecipe
from diffusion.settings import DiffusionConfig
from diffusion.trajectories import StepConfig, Trajectories, check_trajectories
from mmrl.training.loop.objectives import ObjectiveConfig


def flow_grpo_objective() -> ObjectiveConfig:
    """The published objective; groups of equal reward have no gradient and are dropped."""
    return ObjectiveConfig(preset="flow_grpo", filter={"kind": "drop"})


@dataclass
class FlowGrpoConfig(DiffusionConfig):
    """A Flow-GRPO run."""

    step: StepConfig = field(default_factory=StepConfig)
    """Evaluation of the trained steps."""
    objective: ObjectiveConfig = field(default_factory=flow_grpo_objective)
    """Clip 1e-4, exact KL 0.04, advantages clipped at 5; groups of equal reward are dropped."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_trajectories(self.sampler)


class FlowGrpoRecipe(DiffusionRecipe):
    """Group-relative policy optimisation over stochastic denoising steps; see the module."""

    config: FlowGrpoConfig
    process: Trajectories

    def __init__(self, config: FlowGrpoConfig) -> None:
        super().__init__(config)
        self.process = Trajectories(self.policy, config.sampler, config.step, config.trainer.mixed_precision)
