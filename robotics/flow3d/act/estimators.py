"""Estimators of the rigid motion that a flow describes.

`irls` and `kabsch` fit points in space. The others ignore the predicted depth, to show what it is worth: `pnp` finds
the pose under which the points of the first image appear at the predicted pixels, `frozen_depth` keeps their depth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.flow3d.clip import VISIBLE, Z
from robotics.flow3d.geometry import FloatArray, apply_pose, lift, make_pose, project
from robotics.flow3d.rigid_fit import RigidFit, fit_motions, lies_on_a_line

if TYPE_CHECKING:
    from robotics.flow3d.clip import FlowClip

IN_SPACE = ("irls", "kabsch")
ESTIMATORS = (*IN_SPACE, "pnp", "frozen_depth")
MIN_PNP_POINTS = 4
"""Least points for PnP."""


def fit_flow(
    clip: FlowClip, estimator: str = "irls", *, scale_m: float = 0.01, from_first_predicted: bool = False
) -> RigidFit:
    """Motion of the object in each frame, in the camera frame.

    Source: pnp as flow-diffusion/AVDC_experiments experiment/rigid_transform.py reads flow of two dimensions, with
        OpenCV's SQPnP (Terzakis and Lourakis 2020), which needs no restarts.
    """
    if estimator == "pnp":
        return _by_pnp(clip)
    flow = clip.flow_cam_m
    if estimator == "frozen_depth":
        uvz = clip.flow[..., :VISIBLE].copy()
        uvz[..., Z] = clip.points[..., Z]
        flow = lift(uvz, clip.observation.K).reshape(flow.shape)
    start = flow[0] if from_first_predicted else clip.points_cam_m
    return fit_motions(start, flow, clip.visible, robust=estimator != "kabsch", scale_m=scale_m)


def _by_pnp(clip: FlowClip) -> RigidFit:
    start, uv = clip.points_cam_m, clip.flow[..., :Z].reshape(len(clip.flow), -1, 2)
    count = len(start)
    T, used, rmse = np.tile(np.eye(4), (len(uv), 1, 1)), np.zeros((len(uv), count)), np.zeros(len(uv))
    degenerate = np.zeros(len(uv), dtype=np.bool_)
    for frame, seen in enumerate(clip.visible):
        chosen = seen > 0 if (seen > 0).sum() >= MIN_PNP_POINTS else np.ones(count, dtype=np.bool_)
        found = None if lies_on_a_line(start[chosen]) else _pose_of_view(start[chosen], uv[frame, chosen], clip)
        used[frame], degenerate[frame] = chosen, found is None
        if found is not None:
            T[frame], rmse[frame] = found
    return RigidFit(T, used, rmse, degenerate)


def _pose_of_view(points_m: FloatArray, uv: FloatArray, clip: FlowClip) -> tuple[FloatArray, float] | None:
    """(4, 4) motion after which points (n, 3) appear at pixels (n, 2), and its error in metres; None if not found."""
    import cv2 as library

    cv2: Any = library
    K = clip.observation.K
    try:
        found, turn, shift = cv2.solvePnP(points_m, uv, K, None, flags=cv2.SOLVEPNP_SQPNP)
        if found:
            turn, shift = cv2.solvePnPRefineLM(points_m, uv, K, None, turn, shift)
    except cv2.error:
        return None
    rotation = cv2.Rodrigues(turn)[0]
    T = make_pose(rotation, np.asarray(shift, dtype=np.float64).reshape(3))
    moved = apply_pose(T, points_m)
    if not found or not np.isfinite(T).all() or (moved[:, 2] <= 0).any():
        return None
    away_px = np.linalg.norm(project(moved, K)[:, :2] - uv, axis=-1)
    return T, float(np.sqrt(np.mean((away_px * moved[:, 2] / K[0, 0]) ** 2)))
