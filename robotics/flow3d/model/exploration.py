"""Samples of a world model as rollouts: K flows of each scene, and the model's velocity on noisy versions of them.

Exploration perturbs samples where a world model is nearly certain. AWM's loss depends on where a sample is, not on how
it was drawn, so it may be off the model's distribution. A sample is moved as one rigid body, by a translation and a
rotation about the mean of its points that grow linearly up to the last frame, so that a rigid, smooth flow stays so.

Shapes: N scenes, B = N * K samples, T' noisy versions of each, C x T x N x N one encoded flow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from diffusion.sampler import row_noise
from mmrl.fields import bounded, rare
from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.geometry import FloatArray, lift, project

if TYPE_CHECKING:
    from torch import Tensor

    from robotics.flow3d.clip import Observation


@dataclass(frozen=True)
class ExplorationConfig:
    """Random rigid perturbation of training samples; those of evaluations are never perturbed."""

    shift_cm: float = bounded(0.0, at_least=0, finite=True)
    """Standard deviation along each axis of the shift in the last frame, in centimetres."""
    turn_deg: float = rare(bounded(0.0, at_least=0, finite=True))
    """Standard deviation about each axis of the rotation in the last frame, in degrees."""

    @property
    def on(self) -> bool:
        """Whether samples are perturbed."""
        return self.shift_cm > 0 or self.turn_deg > 0


def perturbed(flow: FloatArray, observation: Observation, seeds: Tensor, config: ExplorationConfig) -> FloatArray:
    """Move each of a scene's flows (K, T, N, N, 4) rigidly, as its own seed (K,) int64 determines.

    Visibility is kept, and so is a flow with points behind the camera before or after the motion.
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
        shift_m = (share[:, None] * config.shift_cm / 100 * shift)[:, None]
        moved = np.einsum("tij,tnj->tni", turns, points - middle) + middle + shift_m
        if (points[..., 2] > 0).all() and (moved[..., 2] > 0).all():
            found[number, ..., :VISIBLE] = project(moved, observation.K).reshape(*flow.shape[1:4], VISIBLE)
    return found
