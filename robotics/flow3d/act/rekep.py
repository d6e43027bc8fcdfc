"""The terms of ReKep's optimisation, and the paper's cost of keypoints that are to follow a flow.

Source: huangwl18/ReKep utils.py, subgoal_solver.py, path_solver.py and configs/config.yaml; arXiv 2506.06199.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import angle_rad, apply_pose

if TYPE_CHECKING:
    from numpy.typing import NDArray


def normalize_vars(values: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Variables (..., n) as shares of their bounds (n, 2), -1 at the lower one and 1 at the upper one."""
    return (values - bounds[:, 0]) / (bounds[:, 1] - bounds[:, 0]) * 2 - 1


def unnormalize_vars(shares: NDArray[np.float64], bounds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The inverse of `normalize_vars`."""
    return (shares + 1) / 2 * (bounds[:, 1] - bounds[:, 0]) + bounds[:, 0]


def collision_cost(
    T: NDArray[np.float64],
    points_m: NDArray[np.float64],
    inside_m: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    margin_m: float,
) -> float:
    """How deep points come within a margin of obstacles, summed over poses and points.

    Args:
        T: (M, 4, 4) poses.
        points_m: (n, 3) points that move with them.
        inside_m: from places (k, 3) to signed distances (k,), positive inside obstacles.
        margin_m: distance from obstacles that costs nothing.

    Returns:
        Sum of max(0, inside_m + margin_m), in metres.
    """
    depth = inside_m(apply_pose(T, points_m).reshape(-1, 3)) + margin_m
    return float(np.maximum(depth, 0.0).sum())


def pose_consistency(first: NDArray[np.float64], second: NDArray[np.float64], rot_weight: float = 0.5) -> float:
    """How far poses are from the nearest of others.

    Args:
        first: (M, 4, 4).
        second: (L, 4, 4).
        rot_weight: metres that one radian is worth.
    """
    way = np.linalg.norm(first[:, None, :3, 3] - second[None, :, :3, 3], axis=-1)
    turn = angle_rad(first[:, None], second[None])
    return float((way + rot_weight * turn).min(1).mean())


def flow_keypoint_cost(keypoints_m: NDArray[np.float64], predicted_m: NDArray[np.float64], p: int = 2) -> float:
    """How far keypoints are from where the flow has them."""
    if p not in (1, 2):
        raise UserError(f"p is {p}; must be 1 or 2")
    return float((np.linalg.norm(keypoints_m - predicted_m, axis=-1) ** p).mean())
