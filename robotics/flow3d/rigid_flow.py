"""The true flow of an object with a known motion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.encoding import grid_in_mask
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    apply_pose,
    depth_at,
    inverse_pose,
    lift,
    project,
)

if TYPE_CHECKING:
    from collections.abc import Callable


VISIBLE_M = 0.01
"""Largest depth difference of a visible point."""


def points_in_mask(mask: BoolArray, depth_m: DepthArray, side: int) -> FloatArray:
    """(N, N, 3) query points u, v, z at pixel centers of a mask (H, W), with the depth (H, W) of these pixels."""
    uv = grid_in_mask(mask, side)
    columns, rows = np.floor(uv[..., 0]).astype(int), np.floor(uv[..., 1]).astype(int)
    return np.concatenate([uv, depth_m[rows, columns, None]], -1)


def moved_points(points: FloatArray, T_t_0_world: FloatArray, K: FloatArray, T_world_cam: FloatArray) -> FloatArray:
    """(T, N, N, 3) u, v, z of query points (N, N, 3) on an object after its motion (T, 4, 4) in the world frame."""
    start = apply_pose(T_world_cam, lift(points, K).reshape(-1, 3))
    in_camera = apply_pose(inverse_pose(T_world_cam) @ T_t_0_world, start)
    return project(in_camera, K).reshape(len(T_t_0_world), *points.shape)


def points_visible(uvz: FloatArray, depth_of: Callable[[int], DepthArray]) -> FloatArray:
    """(T, N, N, 1) 1 where points (T, N, N, 3) u, v, z agree with the scene's depth (H, W) in frame t, else 0."""
    visible = np.zeros((*uvz.shape[:-1], 1))
    for number in range(len(uvz)):
        seen = depth_at(depth_of(number), uvz[number, ..., :2])
        visible[number, ..., 0] = np.abs(seen - uvz[number, ..., 2]) < VISIBLE_M
    return visible
