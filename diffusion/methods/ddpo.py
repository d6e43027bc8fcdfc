"""DDPO (Black et al., arXiv 2305.13301; public code kvablack/ddpo-pytorch) on flow models.

Policy gradient over the denoising chain with PPO's clip and no KL. Advantages compare rewards with the history of the
same prompt: the mean and standard deviation of its last `history.size` rewards, or of the whole epoch if there are
fewer than `history.min_count`.

The public code trains Stable Diffusion 1 on DDIM steps with eta 1. `sampler: {kernel: ddim, noise_level: 1}` is the
same step in flow coordinates (`diffusion.families.stable_diffusion`); by default the steps are Flow-GRPO's. Other
defaults: clip 1e-4, guidance 5 with gradient through both halves, history 16 of 16, one pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor

from diffusion.diffusion_config import DiffusionConfig, TrajectoryParts
from diffusion.diffusion_recipe import TrajectoryRecipe
from diffusion.sampling.latent_sampler import LatentSamplerConfig
from diffusion.sampling.trajectories import DiffusionPayload, StepConfig
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare
from mmrl.training.objectives import ObjectiveConfig
from mmrl.training.processes import merge_in_order
from mmrl.training.recipe import Step


class PromptHistory:
    """The latest rewards of each prompt across rollouts.

    Unlike a group baseline, this works with a single image per prompt in a rollout. It has to be saved with the run.

    Source: kvablack/ddpo-pytorch ddpo_pytorch/stat_tracking.py.
    """

    def __init__(self, buffer_size: int = 16, min_count: int = 16, eps: float = 1e-6) -> None:
        self.buffer_size = buffer_size
        self.min_count = min_count
        self.eps = eps
        self._rewards: dict[str, deque[float]] = {}

    def normalise(self, prompts: Sequence[str], rewards: Tensor | Sequence[float]) -> Tensor:
        """Store the rewards (B,) of a rollout and return its advantages (B,), (reward - mean) / (std + eps).

        Mean and population standard deviation are computed over the prompt's buffer including the new rewards, or over
        this rollout if the buffer has fewer than `min_count`. NaN rewards are skipped and get advantage 0.
        """
        if not isinstance(rewards, Tensor):
            rewards = torch.tensor(rewards, dtype=torch.float64)
        if rewards.shape != (len(prompts),):
            raise ValueError(
                f"rewards have the shape {tuple(rewards.shape)}; must be ({len(prompts)},), one per prompt."
            )
        wide = rewards.detach().double().cpu()
        scored = ~wide.isnan()
        # all rewards first: the images of a prompt are compared with each other too
        for prompt, reward, counts in zip(prompts, wide.tolist(), scored.tolist(), strict=True):
            if counts:
                self._rewards.setdefault(prompt, deque(maxlen=self.buffer_size)).append(reward)
        whole = wide[scored]
        advantages = torch.zeros_like(wide)
        for prompt in set(prompts):
            rows = scored & torch.tensor([other == prompt for other in prompts])
            kept = self._rewards.get(prompt, ())
            basis = whole if len(kept) < self.min_count else wide.new_tensor(list(kept))
            if rows.any():
                advantages[rows] = (wide[rows] - basis.mean()) / (basis.std(correction=0) + self.eps)
        return advantages.to(rewards)

    def state_dict(self) -> dict[str, Any]:
        """The stored rewards of each prompt, oldest first, as plain Python objects."""
        return {"rewards": {prompt: list(kept) for prompt, kept in self._rewards.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; if the buffer is now shorter, it keeps the latest rewards."""
        self._rewards = {
            prompt: deque((float(reward) for reward in kept), maxlen=self.buffer_size)
            for prompt, kept in state["rewards"].items()
        }


@dataclass
class HistoryConfig:
    """Reward history of a prompt, on which its advantages are based."""

    size: int = rare(bounded(16, at_least=1))
    """Number of latest rewards kept per prompt."""
    min_count: int = rare(bounded(16, at_least=1))
    """Minimum number of rewards of a prompt before its own mean and deviation are used."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        if self.min_count > self.size:
            raise ValueError(f"history.min_count is {self.min_count}; must be between 1 and history.size={self.size}")


@dataclass
class DdpoConfig(TrajectoryParts, DiffusionConfig):
    """A DDPO run."""

    compares_samples: ClassVar[bool] = False
    replaced_blocks: ClassVar[tuple[str, ...]] = (
        "advantage",
        "order",
        "scaling.whiten",
        "scaling.eps_to",
        "scaling.scale",
    )
    sampler: LatentSamplerConfig = field(default_factory=lambda: LatentSamplerConfig(guidance=5.0))
    """Sampling of images."""
    step: StepConfig = field(default_factory=lambda: StepConfig(detach_negative=False))
    """Evaluation of trained steps; the gradient flows through both halves of guidance."""
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(preset="ddpo"))
    """Clip 1e-4, no KL."""
    history: HistoryConfig = rare(field(default_factory=HistoryConfig))
    """Reward statistics per prompt."""


class DdpoRecipe(TrajectoryRecipe):
    """Policy gradient with per-prompt reward statistics; see the module docstring."""

    config: DdpoConfig

    def __init__(self, config: DdpoConfig) -> None:
        super().__init__(config)
        self.history = self.parts["history"] = PromptHistory(config.history.size, config.history.min_count)

    def estimate(self, rollouts: Rollouts, accelerator: Accelerator, step: Step) -> Rollouts:
        """Rewards normalised by the history of their prompts; every process keeps the whole history."""
        tasks = [DiffusionPayload.of(rollouts).tasks[group] for group in rollouts.group.tolist()]
        # the same instruction for another image is another task, so the image is part of the key
        prompts = [task.prompt if task.image is None else f"{task.prompt} {task.image.digest}" for task in tasks]
        places, rewards = rollouts.places or list(range(rollouts.num_groups)), rollouts.reward.tolist()
        keys = [(places[group], row) for row, group in enumerate(rollouts.host.group.tolist())]
        own = [(key, (key, prompt, reward)) for key, prompt, reward in zip(keys, prompts, rewards, strict=True)]
        # in the order of the tasks: which rewards of a prompt are the latest must not depend on who has drawn them
        step_rows = merge_in_order(own)
        found = self.history.normalise([prompt for _, prompt, _ in step_rows], [reward for _, _, reward in step_rows])
        known = {key: value for (key, _, _), value in zip(step_rows, found.tolist(), strict=True)}
        advantage = torch.tensor([known[key] for key in keys], device=rollouts.mask.device)
        limit = self.objective.scaling.clip
        if limit is not None:
            advantage = advantage.clamp(-limit, limit)
        return rollouts.replace(advantage=advantage.float()[:, None] * rollouts.loss_mask)
