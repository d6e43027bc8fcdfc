"""Robust fit of a rigid motion to point correspondences.

The flow of an object is one rigid motion a frame. The least-squares motion has a closed form (Kabsch), which points on
the background or with wrong flow distort, so by default points are weighted by how well they fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.flow3d.clip import VISIBLE, Z, grid_in_mask
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    apply_pose,
    depth_at,
    inverse_pose,
    lift,
    make_pose,
    project,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from robotics.flow3d.clip import FlowClip


FLAT = 1e-5
"""Points are on a line where their second singular value is below this share of the first, or of a metre."""
LOW_WEIGHT = 0.3
"""Below this median weight the least-squares start is replaced by RANSAC."""
VISIBLE_M = 0.01
"""Largest depth difference of a visible point."""
IN_SPACE = ("irls", "kabsch")
ESTIMATORS = (*IN_SPACE, "pnp", "frozen_depth")
MIN_PNP_POINTS = 4
"""Least points for PnP."""


@dataclass(frozen=True)
class RigidFit:
    """Motions fitted to a flow."""

    T_t_0: FloatArray
    """(T, 4, 4) from the first positions to those of each frame."""
    weights: FloatArray
    """(T, n) weights of the points, 0 to 1."""
    rmse_m: FloatArray
    """(T,) weighted root mean square distance between moved and given points."""
    degenerate: BoolArray
    """(T,) whether too few points had a weight or they were on a line, so that only a translation was fitted."""


def kabsch(source_m: FloatArray, target_m: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Rigid motion with the least weighted sum of squared distances, batched over leading dimensions.

    Source:
        Kabsch 1976, with the sign of the determinant as in Umeyama 1991, eq. 40 to 42.
    """
    leading = np.broadcast_shapes(source_m.shape[:-1], target_m.shape[:-1])
    w = np.broadcast_to(np.ones(leading) if weights is None else weights, leading)[..., None]
    total = w.sum(-2, keepdims=True)
    share = w / np.where(total > 0, total, 1.0)
    mean_source, mean_target = (share * source_m).sum(-2), (share * target_m).sum(-2)
    centred = source_m - mean_source[..., None, :]
    U, _, Vt = np.linalg.svd(np.swapaxes(centred * w, -1, -2) @ (target_m - mean_target[..., None, :]))
    V = np.swapaxes(Vt, -1, -2)
    V[..., 2] *= np.sign(np.linalg.det(V @ np.swapaxes(U, -1, -2)))[..., None]
    rotation = V @ np.swapaxes(U, -1, -2)
    rotation = np.where(_on_a_line(centred * np.sqrt(share))[..., None, None], np.eye(3), rotation)
    T = make_pose(rotation, mean_target - (rotation @ mean_source[..., None])[..., 0])
    return np.where(total > 0, T, np.eye(4))


def robust_kabsch(
    source_m: FloatArray,
    target_m: FloatArray,
    weights: FloatArray | None = None,
    *,
    scale_m: float = 0.01,
    iterations: int = 5,
    rng: np.random.Generator | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Rigid motion (4, 4) from points (n, 3) to (n, 3), and their weights (n,); or (T, 4, 4) and (T, n) for T targets.

    Least squares with Cauchy weights, iterated, so that outliers have little influence. Where half of the points do not
    fit, a RANSAC start drawn from `rng` is tried too. `weights` (n,) or (T, n) multiply the Cauchy weights.

    Source:
        Iteratively reweighted least squares, w = 1 / (1 + (e / s)^2).
    """
    targets = target_m.reshape(-1, *source_m.shape)
    given = np.broadcast_to(1.0 if weights is None else weights, targets.shape[:-1])
    rng = np.random.default_rng(0) if rng is None else rng
    T, cauchy = _reweighted(source_m, targets, given, kabsch(source_m, targets, given), scale_m, iterations)
    for row, (target, own) in enumerate(zip(targets, given, strict=True)):
        counted = own > 0
        if counted.sum() < 3 or np.median(cauchy[row, counted]) >= LOW_WEIGHT:
            continue
        start = ransac_kabsch(source_m, target, own, tolerance_m=1.5 * scale_m, rng=rng)
        other, others = _reweighted(source_m, target, own, start, scale_m, iterations)
        if (own * others).sum() > (own * cauchy[row]).sum():
            T[row], cauchy[row] = other, others
    used = given * cauchy
    return (T[0], used[0]) if target_m.ndim == 2 else (T, used)


def ransac_kabsch(
    source_m: FloatArray,
    target_m: FloatArray,
    weights: FloatArray | None = None,
    *,
    tolerance_m: float = 0.015,
    iterations: int = 100,
    rng: np.random.Generator | None = None,
) -> FloatArray:
    """(4, 4) rigid motion of the three points that most others agree with, refitted to these; `kabsch` below three."""
    given = np.ones(len(source_m)) if weights is None else weights
    usable = np.flatnonzero(given > 0)
    if len(usable) < 3:
        return kabsch(source_m, target_m, given)
    rng = np.random.default_rng(0) if rng is None else rng
    threes = np.stack([rng.choice(usable, 3, replace=False) for _ in range(iterations)])
    agree = given * (_distances(kabsch(source_m[threes], target_m[threes]), source_m, target_m) < tolerance_m)
    return kabsch(source_m, target_m, agree[agree.sum(-1).argmax()])


def fit_motions(
    source_m: FloatArray,
    flow_m: FloatArray,
    visible: FloatArray | None = None,
    *,
    robust: bool = True,
    scale_m: float = 0.01,
) -> RigidFit:
    """Motion of an object's points (n, 3) in each frame of a flow (T, n, 3), weighted by visibility (T, n).

    A frame with fewer than three visible points uses all of them.
    """
    own = np.ones(flow_m.shape[:2]) if visible is None else np.asarray(visible, dtype=np.float64)
    own = np.where((own > 0).sum(-1, keepdims=True) >= 3, own, 1.0)
    if robust:
        T, used = robust_kabsch(source_m, flow_m, own, scale_m=scale_m)
    else:
        T, used = kabsch(source_m, flow_m, own), own
    squared = ((apply_pose(T, source_m) - flow_m) ** 2).sum(-1)
    total = np.maximum(used.sum(-1), 1e-12)
    centred = source_m - (used @ source_m / total[:, None])[:, None]
    shares = np.sqrt(used / total[:, None])[..., None]
    degenerate = _on_a_line(centred * shares)
    return RigidFit(T, used, np.sqrt((used * squared).sum(-1) / total), degenerate)


def _reweighted(
    source_m: FloatArray, target_m: FloatArray, given: FloatArray, T: FloatArray, scale_m: float, iterations: int
) -> tuple[FloatArray, FloatArray]:
    """Motions (..., 4, 4) from a start T, and the Cauchy weights (..., n) of the points."""
    cauchy = np.ones(target_m.shape[:-1])
    for _ in range(iterations):
        cauchy = 1 / (1 + (_distances(T, source_m, target_m) / scale_m) ** 2)
        T = kabsch(source_m, target_m, given * cauchy)
    return T, cauchy


def _distances(T: FloatArray, source_m: FloatArray, target_m: FloatArray) -> FloatArray:
    distance: FloatArray = np.linalg.norm(apply_pose(T, source_m) - target_m, axis=-1)
    return distance


def lies_on_a_line(points_m: FloatArray) -> bool:
    """Whether points (n, 3) do not determine a rotation."""
    return len(points_m) < 3 or bool(_on_a_line((points_m - points_m.mean(0)) / np.sqrt(len(points_m))))


def _on_a_line(centred: FloatArray) -> BoolArray:
    """Whether centred points (..., n, 3), each times the root of its share, do not determine a rotation: (...)."""
    if centred.shape[-2] < 3:
        return np.ones(centred.shape[:-2], dtype=np.bool_)
    sizes = np.linalg.svd(centred, compute_uv=False)
    found: BoolArray = sizes[..., 1] <= FLAT * np.maximum(sizes[..., 0], 1.0)
    return found


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
