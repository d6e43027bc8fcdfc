"""Scripted ways of an object to where a task wants it: key poses, and the poses along the line through them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import angle_rad, make_pose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

METRES_PER_RADIAN = 0.25
"""Way in metres that takes as long as a turn by one radian."""
POUR_RAD = math.radians(78)
POUR_ABOVE_M = 0.15
"""Height of the rim's lowest point over the table while pouring."""


def along(poses: Sequence[NDArray[np.float64]], frames: int) -> NDArray[np.float64]:
    """Poses on the way through key poses, slow at both ends.

    Args:
        poses: (4, 4) each; at least two.
        frames: how many poses, the first and the last key pose included.

    Returns:
        (frames, 4, 4); straight lines and turns about one axis between key poses.
    """
    from scipy.spatial.transform import Rotation, Slerp

    keys = np.stack(list(poses))
    turns = angle_rad(keys[:-1], keys[1:]) * METRES_PER_RADIAN
    ways = np.linalg.norm(np.diff(keys[:, :3, 3], axis=0), axis=-1)
    times = np.concatenate([[0.0], np.cumsum(np.maximum(ways + turns, 1e-6))])
    wanted = times[-1] * (1 - np.cos(np.linspace(0, np.pi, frames))) / 2
    places = np.stack([np.interp(wanted, times, keys[:, axis, 3]) for axis in range(3)], -1)
    rotations = Slerp(times, Rotation.from_matrix(keys[:, :3, :3]))(np.clip(wanted, 0.0, times[-1]))
    return make_pose(rotations.as_matrix(), places)


def moved(T: NDArray[np.float64], way_m: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """A pose shifted in world axes."""
    shifted = T.copy()
    shifted[:3, 3] += np.asarray(way_m)
    return shifted


def over(start: NDArray[np.float64], goal: NDArray[np.float64], height_m: float) -> list[NDArray[np.float64]]:
    """Key poses that lift an object, carry it over its goal and set it down.

    Args:
        start: (4, 4) pose on the table.
        goal: (4, 4) final pose.
        height_m: how far it is lifted.

    Returns:
        Key poses for `along`.
    """
    high = max(float(start[2, 3]), float(goal[2, 3])) + height_m
    above = [moved(T, (0, 0, high - T[2, 3])) for T in (start, goal)]
    return [start, *above, goal]


def poured(
    start: NDArray[np.float64], bowl_m: NDArray[np.float64], radius_m: float, height_m: float
) -> list[NDArray[np.float64]]:
    """Key poses that lift a vessel and tilt it sideways, its rim over the middle of a bowl.

    Args:
        start: (4, 4) pose on the table, upright.
        bowl_m: (3,) middle of the bowl on the table.
        radius_m: of the vessel's rim.
        height_m: of the vessel.
    """
    side = 1.0 if bowl_m[1] > start[1, 3] else -1.0
    sine, cosine = side * math.sin(POUR_RAD), math.cos(POUR_RAD)
    # Tilted to the left, +y, the turn about x is negative.
    tilt = np.array([[1.0, 0.0, 0.0], [0.0, cosine, sine], [0.0, -sine, cosine]])
    lip = tilt @ np.array([0.0, side * radius_m, height_m])
    end = make_pose(tilt @ start[:3, :3], np.array([bowl_m[0], bowl_m[1], POUR_ABOVE_M]) - lip)
    beside = make_pose(start[:3, :3], np.array([end[0, 3], end[1, 3] - side * 0.02, end[2, 3]]))
    lifted = moved(start, (0, 0, beside[2, 3] - start[2, 3]))
    return [start, lifted, beside, end]
