"""Inputs of the world model: images, query points and instructions of scenes, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmrl.core.payload import Payload, per_row
from mmrl.errors import UserError
from robotics.flow3d.geometry import FloatArray, ImageArray

if TYPE_CHECKING:
    from robotics.flow3d.clip import Observation
    from robotics.flow3d.encoding import FlowEncoding


@dataclass
class FlowInputs(Payload):
    """Conditions of B flows."""

    images: Tensor = per_row()
    """(B, S, S, 3) uint8 RGB."""
    points: Tensor = per_row()
    """(B, N, N, 3) float32 u, v, z of the query points, each normalised to -1..1."""
    instructions: list[str] = per_row()
    """Lower-cased."""

    def __len__(self) -> int:
        return len(self.instructions)


def make_inputs(
    observations: Sequence[Observation], points: Sequence[FloatArray], encoding: FlowEncoding, image_px: int
) -> FlowInputs:
    """Scenes as tensors; `points` has (N, N, 3) query points u, v, z of each."""
    wanted = (encoding.grid, encoding.grid, 3)
    for grid in points:
        if grid.shape != wanted:
            raise UserError(
                f"query points have the shape {grid.shape}; this model was trained with {wanted}, a grid of "
                f"{encoding.grid} x {encoding.grid} points u, v, z"
            )
    normalised = [encoding.normalise(grid, seen.size_px) for grid, seen in zip(points, observations, strict=True)]
    return FlowInputs(
        images=torch.from_numpy(np.stack([_resized(seen.rgb, image_px) for seen in observations])),
        points=torch.from_numpy(np.stack(normalised)).float(),
        instructions=[seen.instruction.lower() for seen in observations],
    )


def _resized(rgb: ImageArray, side: int) -> ImageArray:
    from PIL import Image

    if rgb.shape[:2] == (side, side):
        return rgb
    # Pillow averages over the area of each pixel
    return np.asarray(Image.fromarray(rgb).resize((side, side), Image.Resampling.BICUBIC))
