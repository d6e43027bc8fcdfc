"""An object at a pose against what the camera sees: its picture carried along, and its points put onto the surface."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import apply_pose, depth_at, inverse_pose, lift, make_pose, project

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEAST_TOLD = 0.02
"""Share of the largest eigenvalue below which the surface does not tell a motion, such as the turn of a round object
about its axis, or the way of a part of it along that axis; there the pose stays as it is."""


def carried_picture(
    T: NDArray[np.float64],
    first: NDArray[np.uint8],
    mask: NDArray[np.bool_],
    first_depth_m: NDArray[np.float32],
    now: NDArray[np.uint8],
    depth_m: NDArray[np.float32],
    K: NDArray[np.float64],
    agree_m: float,
) -> NDArray[np.uint8]:
    """What a frame would look like if the object stood at a pose with the colours that it had in the first frame.

    Args:
        T: (4, 4) motion since the first frame, in the camera frame.
        first: (H, W) grey first frame.
        mask: (H, W) the object in it.
        first_depth_m: (H, W).
        now: (H, W) grey frame.
        depth_m: (H, W) its depth.
        K: (3, 3) intrinsics.
        agree_m: a pixel belongs to the object where it was that far from its surface at most.

    Returns:
        (H, W); `now` where the object's first picture does not say.
    """
    import cv2

    height, width = now.shape
    v, u = np.mgrid[:height, :width] + 0.5
    there = lift(np.stack([u, v, depth_m], -1).astype(np.float64).reshape(-1, 3), K)
    back = project(apply_pose(inverse_pose(T), there), K)
    at = np.nan_to_num(back[:, :2] - 0.5, nan=-9.0, posinf=-9.0, neginf=-9.0).clip(-9, 2**14).astype(np.float32)
    uv = at.reshape(height, width, 2)
    colours = cv2.remap(first, uv[..., 0], uv[..., 1], cv2.INTER_LINEAR)
    inside = cv2.remap(mask.astype(np.uint8), uv[..., 0], uv[..., 1], cv2.INTER_NEAREST) > 0
    agrees = np.abs(depth_at(first_depth_m, at.astype(np.float64) + 0.5) - back[:, 2]) < agree_m
    return np.where(inside & agrees.reshape(height, width), colours, now).astype(np.uint8)


def surface_normals(depth_m: NDArray[np.float32], K: NDArray[np.float64]) -> NDArray[np.float64]:
    """Normals of what a depth picture shows.

    Args:
        depth_m: (H, W), NaN in holes.
        K: (3, 3) intrinsics.

    Returns:
        (H, W, 3) unit vectors towards the camera; NaN at the border, in holes and beside edges of more than 2 cm.
    """
    height, width = depth_m.shape
    v, u = np.mgrid[:height, :width] + 0.5
    points = lift(np.stack([u, v, depth_m], -1).astype(np.float64), K)
    normals = np.full((height, width, 3), np.nan)
    across, down = points[1:-1, 2:] - points[1:-1, :-2], points[2:, 1:-1] - points[:-2, 1:-1]
    cross = np.cross(down, across)
    smooth = (np.abs(across[..., 2]) < 0.02) & (np.abs(down[..., 2]) < 0.02)
    length = np.linalg.norm(cross, axis=-1, keepdims=True)
    normals[1:-1, 1:-1] = np.where(smooth[..., None], cross / np.where(length > 0, length, np.nan), np.nan)
    return normals


def align_to_surface(
    T: NDArray[np.float64],
    model_cam_m: NDArray[np.float64],
    depth_m: NDArray[np.float32],
    normals: NDArray[np.float64],
    K: NDArray[np.float64],
    agree_m: float,
    iterations: int = 3,
) -> NDArray[np.float64]:
    """Move an object a little so that its visible points lie on the measured surface.

    Args:
        T: (4, 4) motion since the first frame.
        model_cam_m: (n, 3) points of the first frame.
        depth_m: (H, W) now.
        normals: (H, W, 3) of `depth_m`.
        K: (3, 3) intrinsics.
        agree_m: points farther than that from the surface are hidden.
        iterations: of linearising.

    Returns:
        (4, 4).

    Source: point-to-plane with projective association, Chen & Medioni 1992; Newcombe et al. 2011 (KinectFusion).
    """
    for _ in range(iterations):
        moved = apply_pose(T, model_cam_m)
        uvz = project(moved, K)
        depth = depth_at(depth_m, uvz[:, :2])
        near = np.flatnonzero(np.abs(depth - uvz[:, 2]) < agree_m)
        normal = normals[uvz[near, 1].astype(int), uvz[near, 0].astype(int)]
        near, normal = near[np.isfinite(normal[:, 0])], normal[np.isfinite(normal[:, 0])]
        if len(near) < FEWEST:
            return T
        target = lift(np.concatenate([uvz[near, :2], depth[near, None]], -1), K)
        T = _step(moved[near], target, normal) @ T
    return T


def _step(
    points: NDArray[np.float64], targets: NDArray[np.float64], normals: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Small motion, in the directions that the surface tells, that brings points onto the planes at their targets."""
    from scipy.spatial.transform import Rotation

    centre = points.mean(0)
    size = max(float(np.sqrt(((points - centre) ** 2).sum(-1).mean())), 1e-6)
    jacobian = np.concatenate([np.cross((points - centre) / size, normals), normals], -1)
    residual = ((targets - points) * normals).sum(-1)
    told, directions = np.linalg.eigh(jacobian.T @ jacobian)
    shares = np.where(told > LEAST_TOLD * told.max(), 1 / np.maximum(told, 1e-12), 0.0)
    twist = directions @ (shares * (directions.T @ (jacobian.T @ residual)))
    turn = Rotation.from_rotvec(twist[:3] / size).as_matrix()
    return make_pose(turn, centre + twist[3:] - turn @ centre)


FEWEST = 12
"""Points that a surface is fitted to."""
