"""DanceGRPO (Xue et al., arXiv 2505.07818; public code XueZeyue/DanceGRPO).

Denoising steps with constant noise eta (`dance_sde`), images of a prompt from the same initial noise, and for each
image a random 60 % of the steps trained; group advantages over the group's own standard deviation, clip 1e-4, no KL.

Difference from the public code: it scores the image predicted at the last step instead of the last state; here the last
step is an ODE step to 0, which is that prediction. Defaults are those of the FLUX script: 16 steps, eta 0.3, learning
rate 1e-5 for full fine-tuning, groups of 12.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diffusion.policy import ModelConfig
from diffusion.recipe import full_model, image_trainer
from diffusion.sampler import SamplerConfig
from diffusion.trajectories import TrajectoryConfig, TrajectoryRecipe
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.settings import TrainerConfig

__all__ = ["DanceGrpoConfig", "DanceGrpoRecipe"]


def _sampler() -> SamplerConfig:
    return SamplerConfig(steps=16, guidance=1.0, kernel="dance_sde", noise_level=0.3, same_noise=True, random_share=0.6)


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(preset="dance_grpo")


def _trainer() -> TrainerConfig:
    trainer = image_trainer()
    trainer.samples_per_task = 12
    trainer.learning_rate = 1e-5
    return trainer


@dataclass
class DanceGrpoConfig(TrajectoryConfig):
    """A DanceGRPO run."""

    model: ModelConfig = field(default_factory=full_model)
    """Pipeline, trained in full."""
    sampler: SamplerConfig = field(default_factory=_sampler)
    """Constant noise, shared start, 60 % of the steps."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Clip 1e-4, no KL."""
    trainer: TrainerConfig = field(default_factory=_trainer)
    """Batch sizes, optimiser and guards."""


class DanceGrpoRecipe(TrajectoryRecipe):
    """Policy gradient over steps of constant noise; see the module."""

    config: DanceGrpoConfig
