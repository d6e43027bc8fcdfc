"""Flow-GRPO-Fast (yifan123/flow_grpo, config/grpo.py `*_fast_nocfg` presets, scripts/train_sd3_fast.py).

Only a short window of the denoising steps, placed at random in the first half, is stochastic and trained; the other
steps follow the ODE. No guidance in rollouts, training or evaluation: what guidance gave is learnt by the model.
Coefficient-preserving steps (`cps`, noise 0.8), clip 1e-5, no KL. The sizes of an epoch are 48 prompts of 24 images in
the public preset.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from diffusion.flow_grpo import FlowGrpoConfig, FlowGrpoRecipe
from diffusion.sampler import SamplerConfig
from mmrl.training.loop.objectives import ObjectiveConfig

__all__ = ["FlowGrpoFastConfig", "FlowGrpoFastRecipe"]


def _sampler() -> SamplerConfig:
    return SamplerConfig(guidance=1.0, kernel="cps", noise_level=0.8, window=3)


def _objective() -> ObjectiveConfig:
    return ObjectiveConfig(preset="flow_grpo_fast", filter={"kind": "drop"})


@dataclass
class FlowGrpoFastConfig(FlowGrpoConfig):
    """A Flow-GRPO-Fast run."""

    sampler: SamplerConfig = field(default_factory=_sampler)
    """Three coefficient-preserving steps of ten, no guidance."""
    objective: ObjectiveConfig = field(default_factory=_objective)
    """Clip 1e-5, no KL."""


class FlowGrpoFastRecipe(FlowGrpoRecipe):
    """Flow-GRPO on a window of steps; see the module."""

    config: FlowGrpoFastConfig
