"""Scripted trajectories of an object: key poses, and the poses along the line through them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import angle_rad, make_pose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

METRES_PER_RADIAN = 0.25
"""Translation that takes as long as a rotation by one radian."""
POUR_RAD = math.radians(78)
POUR_ABOVE_M = 0.15
"""Height of the rim's lowest point over the table while pouring."""


def along(poses: Sequence[NDArray[np.float64]], frames: int) -> NDArray[np.float64]:
    """(frames, 4, 4) poses through key poses (at least two, both ends included), slow at both ends.

    Straight lines, and rotations about one axis, between key poses.
    """
    from scipy.spatial.transform import Rotation, Slerp

    keys = np.stack(list(poses))
    # a turn takes time as well, or the object would spin in place within one frame
    turns = angle_rad(keys[:-1], keys[1:]) * METRES_PER_RADIAN
    ways = np.linalg.norm(np.diff(keys[:, :3, 3], axis=0), axis=-1)
    times = np.concatenate([[0.0], np.cumsum(np.maximum(ways + turns, 1e-6))])
    # slow at both ends, like a hand that picks up and sets down
    wanted = times[-1] * (1 - np.cos(np.linspace(0, np.pi, frames))) / 2
    positions = np.stack([np.interp(wanted, times, keys[:, axis, 3]) for axis in range(3)], -1)
    rotations = Slerp(times, Rotation.from_matrix(keys[:, :3, :3]))(np.clip(wanted, 0.0, times[-1]))
    return make_pose(rotations.as_matrix(), positions)


def moved(T: NDArray[np.float64], shift_m: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """A pose shifted in world axes."""
    shifted = T.copy()
    shifted[:3, 3] += np.asarray(shift_m)
    return shifted


def over(start: NDArray[np.float64], goal: NDArray[np.float64], height_m: float) -> list[NDArray[np.float64]]:
    """Key poses that lift an object by a height, carry it over its goal (4, 4) and set it down."""
    high = max(float(start[2, 3]), float(goal[2, 3])) + height_m
    above = [moved(T, (0, 0, high - T[2, 3])) for T in (start, goal)]
    return [start, *above, goal]


def poured(
    start: NDArray[np.float64], bowl_m: NDArray[np.float64], radius_m: float, height_m: float
) -> list[NDArray[np.float64]]:
    """Key poses that lift an upright vessel and tilt it sideways, its rim over the centre (3,) of a bowl."""
    side = 1.0 if bowl_m[1] > start[1, 3] else -1.0
    sine, cosine = side * math.sin(POUR_RAD), math.cos(POUR_RAD)
    # Tilting to the left, +y, is a negative rotation about x.
    tilt = np.array([[1.0, 0.0, 0.0], [0.0, cosine, sine], [0.0, -sine, cosine]])
    lip = tilt @ np.array([0.0, side * radius_m, height_m])
    end = make_pose(tilt @ start[:3, :3], np.array([bowl_m[0], bowl_m[1], POUR_ABOVE_M]) - lip)
    next_to_end = make_pose(start[:3, :3], np.array([end[0, 3], end[1, 3] - side * 0.02, end[2, 3]]))
    lifted = moved(start, (0, 0, next_to_end[2, 3] - start[2, 3]))
    return [start, lifted, next_to_end, end]
