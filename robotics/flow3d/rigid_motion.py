"""The rigid motion of an object, fitted to its flow, and interpolation of poses and joints.

The flow of an object is one rigid motion a frame. The least-squares motion has a closed form (Kabsch), which points on
the background or with wrong flow distort, so by default points are weighted by how well they fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from robotics.flow3d.clip import VISIBLE, FlowClip, Z, grid_in_mask
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    IndexArray,
    apply_pose,
    depth_at,
    inverse_pose,
    lift,
    make_pose,
    project,
)

FLAT = 1e-5
"""Points are on a line if their second singular value is below this fraction of the first, or of a metre."""
LOW_WEIGHT = 0.3
"""Below this median weight the least-squares start is replaced by RANSAC."""
VISIBLE_M = 0.01
"""Maximum difference between a visible point's depth and the image's."""
IN_SPACE = ("irls", "kabsch")
ESTIMATORS = (*IN_SPACE, "pnp", "frozen_depth")
MIN_PNP_POINTS = 4
"""Minimum number of points for PnP."""


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
    # a row without any weight divides by 1 instead of 0; the last line makes its motion the identity
    share = w / np.where(total > 0, total, 1.0)
    mean_source, mean_target = (share * source_m).sum(-2), (share * target_m).sum(-2)
    centred = source_m - mean_source[..., None, :]
    # weighted once: with both factors weighted, the weights would count squared
    U, _, Vt = np.linalg.svd(np.swapaxes(centred * w, -1, -2) @ (target_m - mean_target[..., None, :]))
    V = np.swapaxes(Vt, -1, -2)
    # the least-squares solution may be a reflection; flipping the least certain axis makes it a rotation
    V[..., 2] *= np.sign(np.linalg.det(V @ np.swapaxes(U, -1, -2)))[..., None]
    rotation = V @ np.swapaxes(U, -1, -2)
    # the turn about a line is free, so such points get a translation only; `share` ignores points without weight
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

    Least squares with Cauchy weights, iterated, so that outliers have little influence. If half of the points do not
    fit, a RANSAC start drawn from `rng` is tried too. `weights` (n,) or (T, n) multiply the Cauchy weights.

    Source:
        Iteratively reweighted least squares, w = 1 / (1 + (e / s)^2).
    """
    targets = target_m.reshape(-1, *source_m.shape)
    given = np.broadcast_to(1.0 if weights is None else weights, targets.shape[:-1])
    rng = np.random.default_rng(0) if rng is None else rng
    # all frames at once; only those that fit badly go through the loop below
    T, cauchy = _reweighted(source_m, targets, given, kabsch(source_m, targets, given), scale_m, iterations)
    for row, (target, own) in enumerate(zip(targets, given, strict=True)):
        counted = own > 0
        # a high median weight says that most points fit already, and three points are the least that RANSAC can draw
        if counted.sum() < 3 or np.median(cauchy[row, counted]) >= LOW_WEIGHT:
            continue
        # reweighting finds a local optimum only: with many outliers it stays where least squares put it
        start = ransac_kabsch(source_m, target, own, tolerance_m=1.5 * scale_m, rng=rng)
        other, others = _reweighted(source_m, target, own, start, scale_m, iterations)
        # the RANSAC start is not always better, so keep whichever motion more weight agrees with
        if (own * others).sum() > (own * cauchy[row]).sum():
            T[row], cauchy[row] = other, others
    # the caller's weights count too: a hidden point has none, however well it fits
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
    """(4, 4) rigid motion of the triple that most points agree with, refitted to them; `kabsch` below three points."""
    given = np.ones(len(source_m)) if weights is None else weights
    usable = np.flatnonzero(given > 0)
    if len(usable) < 3:
        return kabsch(source_m, target_m, given)
    rng = np.random.default_rng(0) if rng is None else rng
    # all triples are drawn first, so that one batched SVD fits them
    threes = np.stack([rng.choice(usable, 3, replace=False) for _ in range(iterations)])
    agree = given * (_distances(kabsch(source_m[threes], target_m[threes]), source_m, target_m) < tolerance_m)
    # refitted to everything that agrees: three points alone carry their own noise into the motion
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
    # hidden points are predicted too; they are less certain, but better than no motion
    own = np.where((own > 0).sum(-1, keepdims=True) >= 3, own, 1.0)
    if robust:
        T, used = robust_kabsch(source_m, flow_m, own, scale_m=scale_m)
    else:
        T, used = kabsch(source_m, flow_m, own), own
    squared = ((apply_pose(T, source_m) - flow_m) ** 2).sum(-1)
    total = np.maximum(used.sum(-1), 1e-12)
    centred = source_m - (used @ source_m / total[:, None])[:, None]
    # judged with the weights after fitting: points that were rejected must not make a line look like a surface
    shares = np.sqrt(used / total[:, None])[..., None]
    degenerate = _on_a_line(centred * shares)
    return RigidFit(T, used, np.sqrt((used * squared).sum(-1) / total), degenerate)


def _reweighted(
    source_m: FloatArray, target_m: FloatArray, given: FloatArray, T: FloatArray, scale_m: float, iterations: int
) -> tuple[FloatArray, FloatArray]:
    """Motions (..., 4, 4) from a start T, and the Cauchy weights (..., n) of the points."""
    cauchy = np.ones(target_m.shape[:-1])
    for _ in range(iterations):
        # the weights returned are the ones that the returned motion was fitted with
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
    """(...) whether centred points (..., n, 3), scaled by the root of their weights, do not determine a rotation."""
    if centred.shape[-2] < 3:
        return np.ones(centred.shape[:-2], dtype=np.bool_)
    sizes = np.linalg.svd(centred, compute_uv=False)
    # compared with at least a metre, so that points that all coincide (both values near 0) count as a line too
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
    """(T, N, N, 1) 1 if points (T, N, N, 3) u, v, z agree with the scene's depth (H, W) in frame t, else 0."""
    visible = np.zeros((*uvz.shape[:-1], 1))
    for number in range(len(uvz)):
        # the depth is NaN in holes and outside the image, and NaN is never below the limit
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
        # for comparison: only the pixels move, every point keeps the depth of the first frame
        uvz = clip.flow[..., :VISIBLE].copy()
        uvz[..., Z] = clip.points[..., Z]
        flow = lift(uvz, clip.observation.K).reshape(flow.shape)
    start = flow[0] if from_first_predicted else clip.points_cam_m
    return fit_motions(start, flow, clip.visible, robust=estimator != "kabsch", scale_m=scale_m)


def _by_pnp(clip: FlowClip) -> RigidFit:
    start, uv = clip.points_cam_m, clip.flow[..., :Z].reshape(len(clip.flow), -1, 2)
    count = len(start)
    T = np.tile(np.eye(4), (len(uv), 1, 1))
    used = np.zeros((len(uv), count))
    rmse = np.zeros(len(uv))
    degenerate = np.zeros(len(uv), dtype=np.bool_)
    for frame, seen in enumerate(clip.visible):
        chosen = seen > 0 if (seen > 0).sum() >= MIN_PNP_POINTS else np.ones(count, dtype=np.bool_)
        # PnP has a solution for points on a line too, but with an arbitrary turn about it
        found = None if lies_on_a_line(start[chosen]) else _pose_of_view(start[chosen], uv[frame, chosen], clip)
        used[frame] = chosen
        degenerate[frame] = found is None
        if found is not None:
            T[frame], rmse[frame] = found
    return RigidFit(T, used, rmse, degenerate)


def _pose_of_view(points_m: FloatArray, uv: FloatArray, clip: FlowClip) -> tuple[FloatArray, float] | None:
    """(4, 4) motion after which points (n, 3) appear at pixels (n, 2), and its error in metres; None if not found."""
    import cv2 as library

    cv2: Any = library
    K = clip.observation.K
    try:
        # SQPnP finds the global optimum without a start; the refinement then minimises pixel errors
        found, turn, shift = cv2.solvePnP(points_m, uv, K, None, flags=cv2.SOLVEPNP_SQPNP)
        if found:
            turn, shift = cv2.solvePnPRefineLM(points_m, uv, K, None, turn, shift)
    except cv2.error:
        return None
    rotation = cv2.Rodrigues(turn)[0]
    T = make_pose(rotation, np.asarray(shift, dtype=np.float64).reshape(3))
    moved = apply_pose(T, points_m)
    # a mirrored solution projects to the same pixels from behind the camera
    if not found or not np.isfinite(T).all() or (moved[:, 2] <= 0).any():
        return None
    # pixels become metres at the depth of each point: px * z / f
    away_px = np.linalg.norm(project(moved, K)[:, :2] - uv, axis=-1)
    return T, float(np.sqrt(np.mean((away_px * moved[:, 2] / K[0, 0]) ** 2)))


@dataclass(frozen=True)
class ObjectMotion:
    """A rigid motion of the object for each frame, and how well it explains the flow."""

    T_t_0_world: FloatArray
    """(T, 4, 4) motion of points in the world frame from the first frame to frame t."""
    points_world_m: FloatArray
    """(n, 3) points of the object in the first frame."""
    fit: RigidFit
    """The fit in the camera frame, before smoothing."""

    @property
    def centre_m(self) -> FloatArray:
        """(3,) center of the box around the object in the first frame."""
        # the box, not the mean: visible points crowd on the side of the camera
        middle: FloatArray = (self.points_world_m.min(0) + self.points_world_m.max(0)) / 2
        return middle

    @property
    def moved_world_m(self) -> FloatArray:
        """(T, n, 3) points of the object in each frame."""
        return apply_pose(self.T_t_0_world, self.points_world_m)


def object_motion(
    clip: FlowClip,
    points_world_m: FloatArray | None = None,
    *,
    estimator: str = "irls",
    scale_m: float = 0.01,
    from_first_predicted: bool = False,
    smooth_window: int = 3,
    support_z_m: float | None = None,
) -> ObjectMotion:
    """Fit one rigid motion a frame to a flow.

    Source: arXiv 2506.06199; Hoyyyaard/3DFlowAction scripts/flow_generation/viz_3d_flow_batch.py.
    """
    fit = fit_flow(clip, estimator, scale_m=scale_m, from_first_predicted=from_first_predicted)
    T = camera_to_world_motion(fit.T_t_0, clip.observation.T_world_cam)
    points = clip.points_world_m if points_world_m is None else points_world_m
    motion = ObjectMotion(T, points, fit)
    # at the mean radius r an error e is a turn of e / r, so smoothing never moves a frame by more than its fit error
    size = np.linalg.norm(points - motion.centre_m, axis=-1).mean()
    T = smooth_motions(T, motion.centre_m, smooth_window, shift_m=fit.rmse_m, turn_rad=fit.rmse_m / max(size, 1e-6))
    if support_z_m is not None:
        T = lift_above(T, points, support_z_m)
    return ObjectMotion(T, points, fit)


def camera_to_world_motion(T_cam: FloatArray, T_world_cam: FloatArray) -> FloatArray:
    """Motions (..., 4, 4) of points in the camera frame as motions in the world frame."""
    # into the camera frame, moved there, and back
    return T_world_cam @ T_cam @ inverse_pose(T_world_cam)


def gripper_poses(T_t_0_world: FloatArray, T_world_grip: FloatArray) -> FloatArray:
    """(T, 4, 4) poses of a gripper that holds the object at a grasp (4, 4) during its motion (T, 4, 4)."""
    return T_t_0_world @ T_world_grip


def smooth_motions(
    T: FloatArray,
    centre_m: FloatArray,
    window: int = 3,
    *,
    shift_m: FloatArray | None = None,
    turn_rad: FloatArray | None = None,
) -> FloatArray:
    """Moving average of motions (T, 4, 4): of the center (3,) and of rotation vectors about a window's middle frame.

    Windows shrink towards both ends, so that the first position and the last motion, which decides success, stay
    unchanged.

    Each frame is moved by at most `shift_m` (T,) and `turn_rad` (T,); None for no limit.
    """
    # the first frame is observed, not predicted, so it anchors the first window
    frames = np.concatenate([np.eye(4)[None], T])
    rotations, centres = frames[:, :3, :3], apply_pose(frames, centre_m[None])[:, 0]
    smoothed = np.empty_like(T)
    for frame in range(1, len(frames)):
        # shrunk on both sides alike: a one-sided window would pull the frame along the motion
        half = min(window // 2, frame, len(frames) - 1 - frame)
        near = slice(frame - half, frame + half + 1)
        # rotation vectors are averaged relative to the frame, where they are small; absolute ones wrap at half a turn
        turn = turn_of(rotations[frame].T @ rotations[near]).mean(0)
        shift = centres[near].mean(0) - centres[frame]
        turn = turn if turn_rad is None else _at_most(turn, turn_rad[frame - 1])
        shift = shift if shift_m is None else _at_most(shift, shift_m[frame - 1])
        rotation = rotations[frame] @ turn_by(turn)
        # the translation that puts the center where the average wants it
        smoothed[frame - 1] = make_pose(rotation, centres[frame] + shift - rotation @ centre_m)
    return smoothed


def _at_most(vector: FloatArray, length: float) -> FloatArray:
    """The vector, shortened to at most a length."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def lift_above(T: FloatArray, points_m: FloatArray, support_z_m: float) -> FloatArray:
    """Raise motions (T, 4, 4) so that no point (n, 3) gets below a support; z points up."""
    lowest = apply_pose(T, points_m)[..., 2].min(-1)
    raised = T.copy()
    # raised but never lowered: a motion may carry the object above the support
    raised[:, 2, 3] += np.maximum(0.0, support_z_m - lowest)
    return raised


def interpolate_poses(T: FloatArray, *, step_m: float = 0.05, step_rad: float = 0.34) -> tuple[FloatArray, IndexArray]:
    """Densify poses (M, 4, 4): (L, 4, 4), and the rows (M,) of the given ones among them.

    Source: huangwl18/ReKep configs/config.yaml, interpolation steps of 5 cm and 0.34 rad.
    """
    poses, rows = [T[0]], [0]
    for first, second in pairwise(T):
        shift, turn = second[:3, 3] - first[:3, 3], turn_of(first[:3, :3].T @ second[:3, :3])
        parts = max(1, math.ceil(np.linalg.norm(shift) / step_m), math.ceil(np.linalg.norm(turn) / step_rad))
        for share in np.arange(1, parts) / parts:
            # a turn about the fixed axis of the relative rotation, as in slerp
            poses.append(make_pose(first[:3, :3] @ turn_by(share * turn), first[:3, 3] + share * shift))
        poses.append(second)
        rows.append(len(poses) - 1)
    return np.stack(poses), np.array(rows)


def interpolate_joints(joint_rad: FloatArray, parts: int) -> FloatArray:
    """Split each step of a joint path (M, J) into equal parts: ((M - 1) * parts + 1, J)."""
    shares = np.arange(parts)[:, None] / parts
    # without each step's end, which is the next step's start
    between = joint_rad[:-1, None] + shares * np.diff(joint_rad, axis=0)[:, None]
    return np.concatenate([between.reshape(-1, joint_rad.shape[1]), joint_rad[-1:]])


def turn_of(rotation: FloatArray) -> FloatArray:
    """Rotation vectors (..., 3) in radians of rotations (..., 3, 3)."""
    from scipy.spatial.transform import Rotation

    leading = rotation.shape[:-2]
    vectors: FloatArray = Rotation.from_matrix(rotation.reshape(-1, 3, 3)).as_rotvec()
    return vectors.reshape(*leading, 3)


def turn_by(turn_rad: FloatArray) -> FloatArray:
    """Rotations (..., 3, 3) of rotation vectors (..., 3)."""
    from scipy.spatial.transform import Rotation

    matrices: FloatArray = Rotation.from_rotvec(turn_rad.reshape(-1, 3)).as_matrix()
    return matrices.reshape(*turn_rad.shape[:-1], 3, 3)
