"""The terms of ReKep's optimisation, and the paper's cost of keypoints that are to follow a flow.

Source: huangwl18/ReKep utils.py, subgoal_solver.py, path_solver.py and configs/config.yaml; arXiv 2506.06199.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import FloatArray, angle_rad, apply_pose


def collision_cost(
    T: FloatArray, points_m: FloatArray, inside_m: Callable[[FloatArray], FloatArray], margin_m: float
) -> float:
    """Penetration of points (n, 3) at poses (M, 4, 4) into the margin of obstacles, summed, in metres.

    `inside_m` gives signed distances of positions (k, 3), positive inside obstacles.
    """
    depth = inside_m(apply_pose(T, points_m).reshape(-1, 3)) + margin_m
    return float(np.maximum(depth, 0.0).sum())


def pose_consistency(first: FloatArray, second: FloatArray, rot_weight: float = 0.5) -> float:
    """Mean distance of poses (M, 4, 4) from the nearest of others (L, 4, 4), one radian worth `rot_weight` metres."""
    way = np.linalg.norm(first[:, None, :3, 3] - second[None, :, :3, 3], axis=-1)
    turn = angle_rad(first[:, None], second[None])
    return float((way + rot_weight * turn).min(1).mean())


def flow_keypoint_cost(keypoints_m: FloatArray, predicted_m: FloatArray, p: int = 2) -> float:
    """Mean distance of keypoints (n, 3) from their predicted positions, to the power p."""
    if p not in (1, 2):
        raise UserError(f"p is {p}; must be 1 or 2")
    return float((np.linalg.norm(keypoints_m - predicted_m, axis=-1) ** p).mean())
