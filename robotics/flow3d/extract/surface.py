"""Compares an object at a pose with a frame: its warped image, and its points against the measured surface."""

from __future__ import annotations

import numpy as np

from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    apply_pose,
    depth_at,
    inverse_pose,
    lift,
    make_pose,
    project,
)

MIN_EIGENVALUE = 0.02
"""Share of the largest eigenvalue below which the surface does not determine a motion, such as the rotation of a round
object about its axis; in these directions the pose stays as it is."""
MIN_SURFACE_POINTS = 12
"""Fewer visible points leave the pose as it is."""


def warped_image(
    T: FloatArray,
    first: ImageArray,
    mask: BoolArray,
    first_depth_m: DepthArray,
    now: ImageArray,
    depth_m: DepthArray,
    K: FloatArray,
    agree_m: float,
) -> ImageArray:
    """The frame `now` as it would look with the object at pose T in the colours of the first frame: (H, W).

    `T` (4, 4) is the motion since the first frame in the camera frame, `first`, `mask` and `first_depth_m` (H, W) the
    first frame, `now` and `depth_m` (H, W) the current one. Pixels farther than `agree_m` from the surface are not the
    object's and stay as in `now`.
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


def surface_normals(depth_m: DepthArray, K: FloatArray) -> FloatArray:
    """(H, W, 3) unit normals towards the camera of depth (H, W), NaN at the border, in holes and at edges."""
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
    T: FloatArray,
    model_cam_m: FloatArray,
    depth_m: DepthArray,
    normals: FloatArray,
    K: FloatArray,
    agree_m: float,
    iterations: int = 3,
) -> FloatArray:
    """Adjust T (4, 4) so that the visible points of the object lie on the measured surface.

    `model_cam_m` (n, 3) are points of the first frame, `depth_m` (H, W) and `normals` (H, W, 3) the current frame.
    Points farther than `agree_m` from the surface count as hidden.

    Source: point-to-plane with projective association, Chen & Medioni 1992; Newcombe et al. 2011 (KinectFusion).
    """
    for _ in range(iterations):
        moved = apply_pose(T, model_cam_m)
        uvz = project(moved, K)
        depth = depth_at(depth_m, uvz[:, :2])
        near = np.flatnonzero(np.abs(depth - uvz[:, 2]) < agree_m)
        normal = normals[uvz[near, 1].astype(int), uvz[near, 0].astype(int)]
        near, normal = near[np.isfinite(normal[:, 0])], normal[np.isfinite(normal[:, 0])]
        if len(near) < MIN_SURFACE_POINTS:
            return T
        target = lift(np.concatenate([uvz[near, :2], depth[near, None]], -1), K)
        T = _plane_step(moved[near], target, normal) @ T
    return T


def _plane_step(points: FloatArray, targets: FloatArray, normals: FloatArray) -> FloatArray:
    """Small motion towards the planes at the targets, in the directions that the surface determines."""
    from scipy.spatial.transform import Rotation

    centre = points.mean(0)
    size = max(float(np.sqrt(((points - centre) ** 2).sum(-1).mean())), 1e-6)
    jacobian = np.concatenate([np.cross((points - centre) / size, normals), normals], -1)
    residual = ((targets - points) * normals).sum(-1)
    values, directions = np.linalg.eigh(jacobian.T @ jacobian)
    shares = np.where(values > MIN_EIGENVALUE * values.max(), 1 / np.maximum(values, 1e-12), 0.0)
    twist = directions @ (shares * (directions.T @ (jacobian.T @ residual)))
    turn = Rotation.from_rotvec(twist[:3] / size).as_matrix()
    return make_pose(turn, centre + twist[3:] - turn @ centre)
