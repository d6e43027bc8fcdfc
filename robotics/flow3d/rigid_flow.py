"""The true flow of an object whose motion is known, such as in a simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.encoding import grid_in_mask
from robotics.flow3d.geometry import apply_pose, depth_at, inverse_pose, lift, project

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

AGREE_M = 0.01
"""A point is visible where the depth picture differs from its depth by less."""


def points_in_mask(mask: NDArray[np.bool_], depth_m: NDArray[np.float32], side: int) -> NDArray[np.float64]:
    """Query points on an object, with the depth of the pixels that they are the middles of.

    Args:
        mask: (H, W) pixels of the object, at least one.
        depth_m: (H, W).
        side: N.

    Returns:
        (N, N, 3) u, v, z.
    """
    uv = grid_in_mask(mask, side)
    columns, rows = np.floor(uv[..., 0]).astype(int), np.floor(uv[..., 1]).astype(int)
    return np.concatenate([uv, depth_m[rows, columns, None]], -1)


def moved_points(
    points: NDArray[np.float64],
    T_t_0_world: NDArray[np.float64],
    K: NDArray[np.float64],
    T_world_cam: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Where points are seen when their object has moved.

    Args:
        points: (N, N, 3) query points u, v, z on the object.
        T_t_0_world: (T, 4, 4) motion of the object from the first picture on.
        K: (3, 3) intrinsics.
        T_world_cam: (4, 4) pose of the camera.

    Returns:
        (T, N, N, 3) u, v, z.
    """
    start = apply_pose(T_world_cam, lift(points, K).reshape(-1, 3))
    in_camera = apply_pose(inverse_pose(T_world_cam) @ T_t_0_world, start)
    return project(in_camera, K).reshape(len(T_t_0_world), *points.shape)


def points_visible(uvz: NDArray[np.float64], depth_of: Callable[[int], NDArray[np.float32]]) -> NDArray[np.float64]:
    """Whether points are seen.

    Args:
        uvz: (T, N, N, 3).
        depth_of: gives the depth (H, W) of the scene in frame t, counted from 0; a point is visible where that agrees
            with its own depth within a centimetre.

    Returns:
        (T, N, N, 1) 1 or 0.
    """
    visible = np.zeros((*uvz.shape[:-1], 1))
    for number in range(len(uvz)):
        seen = depth_at(depth_of(number), uvz[number, ..., :2])
        visible[number, ..., 0] = np.abs(seen - uvz[number, ..., 2]) < AGREE_M
    return visible
