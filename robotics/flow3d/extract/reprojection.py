"""The pose of points whose pixels are known better than their depth."""

from __future__ import annotations

import numpy as np

from robotics.flow3d.geometry import FloatArray, apply_pose, make_pose, project

DAMPING = 1e-6
"""Damping of the normal equations, as a share of their largest entry."""


def fit_reprojection(
    T: FloatArray,
    points_cam_m: FloatArray,
    uvz: FloatArray,
    K: FloatArray,
    sigma_px: float,
    sigma_m: float,
    iterations: int = 5,
) -> FloatArray:
    """Pose (4, 4) with the least robust sum of squared errors in the image and in depth, each by its own deviation.

        cost = sum_i log(1 + r_i^2),    r_i^2 = |uv(T X_i) - uv_i|^2 / sigma_px^2 + (z(T X_i) - z_i)^2 / sigma_m^2

    `T` (4, 4) is the start, `points_cam_m` (n, 3) X in the first frame, `uvz` (n, 3) where they are now.

    Source: iteratively reweighted Gauss-Newton with Cauchy weights 1 / (1 + r^2).
    """
    from scipy.spatial.transform import Rotation

    scale = np.array([1 / sigma_px, 1 / sigma_px, 1 / sigma_m])
    for _ in range(iterations):
        moved = apply_pose(T, points_cam_m)
        residual = (uvz - project(moved, K)) * scale
        weight = 1 / (1 + (residual**2).sum(-1))
        good = np.isfinite(weight)
        centre = moved[good].mean(0)
        jacobian = _by_twist(moved[good], centre, K) * scale[:, None]
        weighted = jacobian * weight[good, None, None]
        normal = np.einsum("nij,nik->jk", weighted, jacobian)
        right = np.einsum("nij,ni->j", weighted, residual[good])
        twist = np.linalg.solve(normal + DAMPING * normal.max() * np.eye(6), right)
        turn = Rotation.from_rotvec(twist[:3]).as_matrix()
        T = make_pose(turn, centre + twist[3:] - turn @ centre) @ T
    return T


def _by_twist(points: FloatArray, centre: FloatArray, K: FloatArray) -> FloatArray:
    """(n, 3, 6) derivatives of u, v, z of points by a turn about a centre and a translation."""
    x, y, z = points.T
    zero, one = np.zeros_like(z), np.ones_like(z)
    by_point = np.stack(
        [
            np.stack([K[0, 0] / z, zero, -K[0, 0] * x / z**2], -1),
            np.stack([zero, K[1, 1] / z, -K[1, 1] * y / z**2], -1),
            np.stack([zero, zero, one], -1),
        ],
        -2,
    )
    a, b, c = (points - centre).T
    # d(w x p) = -[p]_x dw
    by_turn = np.stack([np.stack([zero, c, -b], -1), np.stack([-c, zero, a], -1), np.stack([b, -a, zero], -1)], -2)
    return np.concatenate([by_point @ by_turn, by_point], -1)
