"""The rigid motion of an object in the world frame, fitted to a flow, and interpolation of poses and joints."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import FloatArray, IndexArray, apply_pose, inverse_pose, make_pose
from robotics.flow3d.rigid_motion import RigidFit, fit_flow

if TYPE_CHECKING:
    from robotics.flow3d.clip import FlowClip


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
    size = np.linalg.norm(points - motion.centre_m, axis=-1).mean()
    T = smooth_motions(T, motion.centre_m, smooth_window, shift_m=fit.rmse_m, turn_rad=fit.rmse_m / max(size, 1e-6))
    if support_z_m is not None:
        T = lift_above(T, points, support_z_m)
    return ObjectMotion(T, points, fit)


def camera_to_world_motion(T_cam: FloatArray, T_world_cam: FloatArray) -> FloatArray:
    """Motions (..., 4, 4) of points in the camera frame as motions in the world frame."""
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
    frames = np.concatenate([np.eye(4)[None], T])
    rotations, centres = frames[:, :3, :3], apply_pose(frames, centre_m[None])[:, 0]
    smoothed = np.empty_like(T)
    for frame in range(1, len(frames)):
        half = min(window // 2, frame, len(frames) - 1 - frame)
        near = slice(frame - half, frame + half + 1)
        turn = turn_of(rotations[frame].T @ rotations[near]).mean(0)
        shift = centres[near].mean(0) - centres[frame]
        turn = turn if turn_rad is None else _at_most(turn, turn_rad[frame - 1])
        shift = shift if shift_m is None else _at_most(shift, shift_m[frame - 1])
        rotation = rotations[frame] @ turn_by(turn)
        smoothed[frame - 1] = make_pose(rotation, centres[frame] + shift - rotation @ centre_m)
    return smoothed


def _at_most(vector: FloatArray, length: float) -> FloatArray:
    """The vector, shortened where it is longer."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def lift_above(T: FloatArray, points_m: FloatArray, support_z_m: float) -> FloatArray:
    """Raise motions (T, 4, 4) so that no point (n, 3) gets below a support; z points up."""
    lowest = apply_pose(T, points_m)[..., 2].min(-1)
    raised = T.copy()
    raised[:, 2, 3] += np.maximum(0.0, support_z_m - lowest)
    return raised


def interpolate_poses(T: FloatArray, *, step_m: float = 0.05, step_rad: float = 0.34) -> tuple[FloatArray, IndexArray]:
    """Densify poses (M, 4, 4): (L, 4, 4), and the rows (M,) of the given ones among them.

    Source: huangwl18/ReKep configs/config.yaml, interpolation steps of 5 cm and 0.34 rad.
    """
    poses, rows = [T[0]], [0]
    for first, second in pairwise(T):
        way, turn = second[:3, 3] - first[:3, 3], turn_of(first[:3, :3].T @ second[:3, :3])
        parts = max(1, math.ceil(np.linalg.norm(way) / step_m), math.ceil(np.linalg.norm(turn) / step_rad))
        for share in np.arange(1, parts) / parts:
            poses.append(make_pose(first[:3, :3] @ turn_by(share * turn), first[:3, 3] + share * way))
        poses.append(second)
        rows.append(len(poses) - 1)
    return np.stack(poses), np.array(rows)


def interpolate_joints(joint_rad: FloatArray, parts: int) -> FloatArray:
    """Split each step of a joint path (M, J) into equal parts: ((M - 1) * parts + 1, J)."""
    shares = np.arange(parts)[:, None] / parts
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
