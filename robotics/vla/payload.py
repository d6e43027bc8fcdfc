"""What travels with the rows of a robot rollout: an episode a row, its chunks side by side.

Shapes: N groups (initial states), B rows (episodes), C chunks of the longest episode, S state entries, D decisions of a
chunk (tokens or denoising steps), H x W pixels. Chunks that an episode did not reach are zeros.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robotics.sim.episodes import EpisodeSpec

__all__ = ["EpisodePayload"]

CHUNKED = ("states", "decisions", "steps", "images")
PER_ROW = ("success", "terminated", "failed", "progress", "last_state", "last_image")
LISTED = {"frames": None, "reasons": ""}
"""Lists with an entry a row, or empty; what stands for a row that has none."""


@dataclass
class EpisodePayload:
    """Initial states of N groups and what B episodes saw and did."""

    episodes: list[EpisodeSpec]
    """The initial state and instruction of each group."""
    states: Tensor
    """(B, C, S) float32, seen before each chunk."""
    decisions: Tensor
    """(B, C, ...), what the policy chose, in the policy's own terms."""
    steps: Tensor
    """(B, C) int64, control steps of each chunk that were carried out."""
    success: Tensor
    """(B,) bool, whether the task was done."""
    terminated: Tensor
    """(B,) bool, whether the task itself ended the episode, with or without success; else the horizon did."""
    failed: Tensor
    """(B,) bool, whether the environment broke down; such a row has no result."""
    progress: Tensor
    """(B,) float32, the environment's own reward at the last step."""
    last_state: Tensor
    """(B, S) float32, at the end of the episode."""
    images: Tensor | None = None
    """(B, C, H, W, 3) uint8, seen before each chunk."""
    last_image: Tensor | None = None
    """(B, H, W, 3) uint8, at the end of the episode."""
    frames: list[NDArray[np.uint8] | None] = field(default_factory=list)
    """(F, H, W, 3) picture of every control step of each row; None or nothing where only chunk ends were drawn."""
    reasons: list[str] = field(default_factory=list)
    """Why each row ended as it did, where the environment says so."""

    def __post_init__(self) -> None:
        rows = len(self.steps)
        lengths = {name: len(value) for name, value in self._tensors().items()}
        lengths |= {name: len(getattr(self, name)) or rows for name in LISTED}
        wrong = {name: length for name, length in lengths.items() if length != rows}
        if wrong:
            raise ValueError(f"there are {rows} rows of steps, but {wrong}")

    @property
    def lengths(self) -> Tensor:
        """(B,) int64, control steps of each episode."""
        return self.steps.sum(1)

    def frames_of(self, row: int) -> NDArray[np.uint8] | None:
        """Pictures of an episode in order.

        Args:
            row: number of the row.

        Returns:
            (F, H, W, 3): of every control step where they were drawn, else before each chunk and at the end; None
            without pictures.
        """
        if self.frames and self.frames[row] is not None:
            return self.frames[row]
        if self.images is None or self.last_image is None:
            return None
        taken = int((self.steps[row] > 0).sum())
        return torch.cat([self.images[row, :taken], self.last_image[row][None]]).cpu().numpy()

    def path(self, row: int) -> NDArray[np.float32]:
        """States of an episode before each chunk and at the end (F, S)."""
        taken = int((self.steps[row] > 0).sum())
        return torch.cat([self.states[row, :taken], self.last_state[row][None]]).cpu().numpy()

    def select(self, rows: Tensor, groups: Tensor) -> Self:
        """Keep rows (b,) and groups (n,), both int64 indices, in the order given."""
        kept = {name: value[rows.to(value.device)] for name, value in self._tensors().items()}
        lists = {name: [getattr(self, name)[row] for row in rows.tolist()] for name in LISTED if getattr(self, name)}
        episodes = [self.episodes[group] for group in groups.tolist()]
        return dataclasses.replace(self, episodes=episodes, **kept, **lists)  # type: ignore[arg-type]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join payloads: the rows and the groups of each part follow those of the part before."""
        width = max(part.steps.shape[1] for part in parts)
        padded = [part._widened(width) for part in parts]
        joined = {name: torch.cat([part[name] for part in padded]) for name in padded[0]}
        lists = {name: _joined([getattr(part, name) for part in parts], parts, blank) for name, blank in LISTED.items()}
        episodes = [episode for part in parts for episode in part.episodes]
        return dataclasses.replace(parts[0], episodes=episodes, **joined, **lists)  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to a device."""
        moved = {name: value.to(device) for name, value in self._tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def _widened(self, width: int) -> dict[str, Tensor]:
        missing = width - self.steps.shape[1]
        found = self._tensors()
        for name in CHUNKED:
            if name in found and missing:
                value = found[name]
                found[name] = nn.functional.pad(value, (0, 0) * (value.dim() - 2) + (0, missing))
        return found

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self, name) for name in (*CHUNKED, *PER_ROW)}
        return {name: value for name, value in found.items() if value is not None}


def _joined(lists: Sequence[list[Any]], parts: Sequence[EpisodePayload], blank: Any) -> list[Any]:
    """One after the other; a part of which no row has an entry gets blanks where another part has some."""
    if not any(lists):
        return []
    return [entry for found, part in zip(lists, parts, strict=True) for entry in found or [blank] * len(part.steps)]
