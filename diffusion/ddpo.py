"""DDPO (Black et al., arXiv 2305.13301; public code kvablack/ddpo-pytorch) on flow models.

Policy gradient over the denoising chain with PPO's clip, one advantage a prompt from the history of its own rewards
(mean and standard deviation of the last `history.size`, of the whole epoch while there are fewer than
`history.min_count`), no KL.

Difference from the public code: it trains noise-prediction models of Stable Diffusion 1 on DDIM steps with eta 1. The
suite's models are flow models, so the steps are Flow-GRPO's; the DDIM step itself is `diffusion.steps.DdimStep`.
Defaults: clip 1e-4, guidance 5 with gradient through both halves, history 16 of 16, one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from accelerate import Accelerator

from diffusion.history import PromptHistory
from diffusion.payload import DiffusionPayload
from diffusion.recipe import DiffusionRecipe
from diffusion.sampler import SamplerConfig
from diffusion.settings import DiffusionConfig
from diffusion.trajectories import StepConfig, Trajectories, check_trajectories
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.loop.distributed import merge_lists
from mmrl.training.loop.objectives import ObjectiveConfig
from mmrl.training.loop.terms import Step


@dataclass
class HistoryConfig:
    """Rewards of a prompt that its advantages are measured against."""

    size: int = rare(bounded(16, at_least=1))
    """Latest rewards kept for each prompt."""
    min_count: int = rare(bounded(16, at_least=1))
    """Fewest rewards of a prompt before its own mean and deviation are used."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.min_count > self.size:
            raise ValueError(f"history.min_count is {self.min_count}; must be between 1 and history.size={self.size}")


@dataclass
class DdpoConfig(DiffusionConfig):
    """A DDPO run."""

    compares_samples: ClassVar[bool] = False
    sampler: SamplerConfig = field(default_factory=lambda: SamplerConfig(guidance=5.0))
    """How images are drawn."""
    step: StepConfig = field(default_factory=lambda: StepConfig(detach_negative=False))
    """Gradient through both halves of guidance."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="ddpo"))
    """Clip 1e-4, no KL."""
    history: HistoryConfig = rare(field(default_factory=HistoryConfig))
    """Statistics of each prompt."""

    def validate(self) -> None:
        """Check that the parts fit together; raises ValueError."""
        super().validate()
        check_trajectories(self.sampler)
        if self.combine != "sum":
            raise ValueError(f"combine is '{self.combine}'; DDPO keeps one history of summed rewards, use sum")


class DdpoRecipe(DiffusionRecipe):
    """Policy gradient with per-prompt reward statistics; see the module."""

    config: DdpoConfig
    process: Trajectories

    def __init__(self, config: DdpoConfig) -> None:
        super().__init__(config)
        self.process = Trajectories(self.policy, config.sampler, config.step, config.trainer.mixed_precision)
        self.history = self.parts["history"] = PromptHistory(config.history.size, config.history.min_count)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Rewards against the history of their prompts; every process keeps the whole history."""
        prompts = [DiffusionPayload.of(rollouts).tasks[group].prompt for group in rollouts.group.tolist()]
        rewards = rollouts.reward.tolist()
        everyone = merge_lists([list(zip(prompts, rewards, strict=True))], accelerator)
        scored = [(prompt, reward) for part in everyone for prompt, reward in part if reward == reward]
        found = iter(self.history.normalise([prompt for prompt, _ in scored], [reward for _, reward in scored]))
        parts = [[next(found) if reward == reward else 0.0 for _, reward in part] for part in everyone]
        advantage = torch.tensor(parts[accelerator.process_index], device=rollouts.mask.device)
        limit = self.objective.scaling.clip
        if limit is not None:
            advantage = advantage.clamp(-limit, limit)
        return rollouts.replace(advantage=advantage.float()[:, None] * rollouts.loss_mask)
