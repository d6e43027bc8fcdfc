"""What travels with the rows of a diffusion rollout.

Shapes: N groups (prompts), B rows (images), T decisions (denoising steps or draws), C x H x W one latent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from diffusion.data import DiffusionTask

__all__ = ["DiffusionPayload"]

TENSORS = ("latents", "sigma", "sigma_next", "states", "mean_old", "noise_seed")


@dataclass
class DiffusionPayload:
    """Prompts of N groups, images of B rows and how they came about."""

    tasks: list[DiffusionTask]
    """The task of each group."""
    latents: Tensor
    """x_0 (B, C, H, W), the finished latents."""
    images: np.ndarray
    """uint8 (B, height, width, 3)."""
    sigma: Tensor
    """(B, T) float32, the time at which each decision is taken."""
    sigma_next: Tensor | None = None
    """(B, T) float32, the time that the decision leads to; trajectories only."""
    states: Tensor | None = None
    """(B, T + 1, C, H, W), the latents at the T times and after the last of them; trajectories only."""
    mean_old: Tensor | None = None
    """(B, T, C, H, W) float32, mean of each transition under the sampling policy; where a method needs it."""
    noise_seed: Tensor | None = None
    """(B,) int64, seed of each row's T noises; methods that match noisy versions of x_0 only."""
    finite: list[bool] = field(default_factory=list)
    """Whether each row's image could be decoded."""

    def __post_init__(self) -> None:
        rows = len(self.latents)
        if len(self.images) != rows or len(self.sigma) != rows or len(self.finite) not in (0, rows):
            raise ValueError(
                f"there are {rows} latents, {len(self.images)} images, {len(self.sigma)} rows of times and "
                f"{len(self.finite)} flags; the numbers must be equal"
            )

    @property
    def prompts(self) -> list[str]:
        """The prompt of each group."""
        return [task.prompt for task in self.tasks]

    def select(self, rows: Tensor, groups: Tensor) -> Self:
        """Keep rows (b,) and groups (n,), both int64 indices, in the order given."""
        index = rows.cpu()
        kept = {name: value[rows] for name, value in self._tensors().items()}
        return dataclasses.replace(
            self,
            tasks=[self.tasks[group] for group in groups.tolist()],
            images=self.images[index.numpy()],
            finite=[self.finite[row] for row in index.tolist()] if self.finite else [],
            **kept,  # type: ignore[arg-type]
        )

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join payloads: the rows and the groups of each part follow those of the part before."""
        joined = {name: torch.cat([part._tensors()[name] for part in parts]) for name in parts[0]._tensors()}
        return dataclasses.replace(
            parts[0],
            tasks=[task for part in parts for task in part.tasks],
            images=np.concatenate([part.images for part in parts]),
            finite=[flag for part in parts for flag in part.finite],
            **joined,  # type: ignore[arg-type]
        )

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to a device."""
        moved = {name: value.to(device) for name, value in self._tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def without_nonfinite(self) -> Self:
        """The payload with zeros in the place of rows that cannot be used, so that they spoil no sum with a mask."""
        if all(self.finite):
            return self
        bad = torch.tensor([not good for good in self.finite], device=self.latents.device)
        cleaned = {
            name: value.masked_fill(bad.view(-1, *[1] * (value.dim() - 1)), 0)
            for name, value in self._tensors().items()
            if name in ("latents", "states", "mean_old")
        }
        return dataclasses.replace(self, **cleaned)  # type: ignore[arg-type]

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: value for name, value in found.items() if value is not None}
