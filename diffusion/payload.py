"""The payload of diffusion rollouts: prompts, stored once per group, and images with their latents.

Shapes: N groups (prompts), B rows (images), T decisions (denoising steps or draws), C x H x W one latent.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from diffusion.data import DiffusionTask
from mmrl.core.payload import Payload, per_decision, per_group, per_row


@dataclass
class DiffusionPayload(Payload):
    """Prompts of N groups; images, latents and decisions of B rows."""

    tasks: list[DiffusionTask] = per_group()
    """The task of each group."""
    latents: Tensor = per_row()
    """x_0 (B, C, H, W), the finished latents."""
    images: np.ndarray = per_row()
    """uint8 (B, height, width, 3)."""
    sigma: Tensor = per_decision()
    """(B, T) float32, the time at which each decision is taken."""
    sigma_next: Tensor | None = per_decision(default=None)
    """(B, T) float32, the time that the decision leads to; trajectories only."""
    states: Tensor | None = per_decision(default=None)
    """(B, T + 1, C, H, W), the latents at the T times and after the last of them, or (B, T, C, H, W), those at the T
    times alone; for methods that learn from the sampler's own states."""
    mean_old: Tensor | None = per_decision(default=None)
    """(B, T, C, H, W) float32, mean of each transition under the sampling policy; where a method needs it."""
    noise_seed: Tensor | None = per_row(default=None)
    """(B,) int64, seed of each row's T noises; methods that match noisy versions of x_0 only."""
    finite: list[bool] = per_row(default_factory=list)
    """Whether each row's image could be decoded."""

    @property
    def prompts(self) -> list[str]:
        """The prompt of each group."""
        return [task.prompt for task in self.tasks]

    def without_nonfinite(self) -> Self:
        """Zeros in the rows without an image: infinities would spoil even masked sums."""
        if all(self.finite):
            return self
        bad = torch.tensor([not good for good in self.finite], device=self.latents.device)
        cleaned: dict[str, Any] = {
            name: value.masked_fill(bad.view(-1, *[1] * (value.dim() - 1)), 0)
            for name in ("latents", "states", "mean_old")
            if (value := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **cleaned)
