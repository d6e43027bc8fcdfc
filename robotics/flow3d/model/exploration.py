"""Guesses moved at random, so that the guesses of a scene differ where a world model is nearly sure.

The loss of AWM asks where a guess lies, not how it was drawn, so it may lie beside what the model would say. A guess is
moved as one rigid body: by a translation and a turn about the middle of its points, both growing evenly from none now
to all of it in the last frame, so that a flow that is rigid and smooth stays so.

Shapes: K guesses of T frames of N x N points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffusion.sampler import row_noise
from mmrl.fields import bounded, rare
from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.geometry import lift, project

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from robotics.flow3d.clip import Observation


@dataclass(frozen=True)
class ExplorationConfig:
    """How far guesses of training are moved at random; those of evaluations never are."""

    shift_cm: float = bounded(0.0, at_least=0, finite=True)
    """Standard deviation, along each axis, of the way in the last frame, in centimetres."""
    turn_deg: float = rare(bounded(0.0, at_least=0, finite=True))
    """Standard deviation, about each axis, of the turn in the last frame, in degrees."""

    @property
    def on(self) -> bool:
        """Whether guesses are moved."""
        return self.shift_cm > 0 or self.turn_deg > 0


def moved_at_random(
    flow: NDArray[np.float64], observation: Observation, seeds: Tensor, config: ExplorationConfig
) -> NDArray[np.float64]:
    """Move each guess of a scene by a rigid motion of its own.

    Args:
        flow: (K, T, N, N, 4) guesses; a guess with a point that does not lie in front of the camera stays as it is.
        observation: what they are guesses of.
        seeds: (K,) int64; the motion of a guess depends on its own seed alone.
        config: how far.

    Returns:
        (K, T, N, N, 4); visibility stays, and so does a guess whose points would come to lie behind the camera.
    """
    from scipy.spatial.transform import Rotation

    drawn = row_noise(seeds, 2, (3,)).double().numpy()
    frames = flow.shape[1]
    share = np.arange(1, frames + 1) / frames
    found = flow.copy()
    for number, (shift, turn) in enumerate(drawn):
        points = lift(flow[number, ..., :VISIBLE], observation.K).reshape(frames, -1, 3)
        middle = points.mean(1, keepdims=True)
        turns = Rotation.from_rotvec(share[:, None] * math.radians(config.turn_deg) * turn).as_matrix()
        way_m = (share[:, None] * config.shift_cm / 100 * shift)[:, None]
        moved = np.einsum("tij,tnj->tni", turns, points - middle) + middle + way_m
        if (points[..., 2] > 0).all() and (moved[..., 2] > 0).all():
            found[number, ..., :VISIBLE] = project(moved, observation.K).reshape(*flow.shape[1:4], VISIBLE)
    return found
