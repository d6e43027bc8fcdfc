"""The rigid motion of the object that a flow describes, in the world frame, and the gripper poses that cause it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.act.estimators import fit_flow
from robotics.flow3d.geometry import apply_pose, inverse_pose, make_pose
from robotics.flow3d.rigid_fit import RigidFit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip


@dataclass(frozen=True)
class ObjectMotion:
    """How the object is to move, and how well one rigid motion a frame explains the flow."""

    T_t_0_world: NDArray[np.float64]
    """(T, 4, 4) motion from the first frame to frame t, of points in the world frame."""
    points_world_m: NDArray[np.float64]
    """(n, 3) points of the object in the first frame."""
    fit: RigidFit
    """The fit in the camera frame, before smoothing."""

    @property
    def centre_m(self) -> NDArray[np.float64]:
        """(3,) middle of the box around the object in the first frame."""
        middle: NDArray[np.float64] = (self.points_world_m.min(0) + self.points_world_m.max(0)) / 2
        return middle

    @property
    def moved_world_m(self) -> NDArray[np.float64]:
        """(T, n, 3) points of the object in each frame."""
        return apply_pose(self.T_t_0_world, self.points_world_m)


def object_motion(
    clip: FlowClip,
    points_world_m: NDArray[np.float64] | None = None,
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


def camera_to_world_motion(T_cam: NDArray[np.float64], T_world_cam: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same motions, of points in the world frame.

    Args:
        T_cam: (..., 4, 4) motions of points in the camera frame.
        T_world_cam: (4, 4) pose of the camera.
    """
    return T_world_cam @ T_cam @ inverse_pose(T_world_cam)


def gripper_poses(T_t_0_world: NDArray[np.float64], T_world_grip: NDArray[np.float64]) -> NDArray[np.float64]:
    """Poses of a gripper that holds the object while it moves.

    Args:
        T_t_0_world: (T, 4, 4) motions of the object.
        T_world_grip: (4, 4) pose at which the object is grasped.

    Returns:
        (T, 4, 4) T_world_grip of each frame.
    """
    return T_t_0_world @ T_world_grip


def smooth_motions(
    T: NDArray[np.float64],
    centre_m: NDArray[np.float64],
    window: int = 3,
    *,
    shift_m: NDArray[np.float64] | None = None,
    turn_rad: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Moving average of motions: of the centre's way, and of rotation vectors about the middle frame of a window.

    Windows shrink towards both ends, so that the first position, which counts as a frame of its own, and the last
    motion, which decides success, stay what they are.

    Args:
        T: (T, 4, 4).
        centre_m: (3,) point of the object in the first frame.
        window: odd number of frames.
        shift_m: (T,) most that the centre is moved by in each frame; None for no limit.
        turn_rad: (T,) most that each frame is turned by; None for no limit.

    Returns:
        (T, 4, 4).
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


def _at_most(vector: NDArray[np.float64], length: float) -> NDArray[np.float64]:
    """The vector, shortened where it is longer."""
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-12))


def lift_above(T: NDArray[np.float64], points_m: NDArray[np.float64], support_z_m: float) -> NDArray[np.float64]:
    """Raise motions so that no point comes below a support.

    Args:
        T: (T, 4, 4) motions in a frame whose z points up.
        points_m: (n, 3) points of the object before it moves.
        support_z_m: height of the support.

    Returns:
        (T, 4, 4).
    """
    lowest = apply_pose(T, points_m)[..., 2].min(-1)
    raised = T.copy()
    raised[:, 2, 3] += np.maximum(0.0, support_z_m - lowest)
    return raised


def interpolate_poses(
    T: NDArray[np.float64], *, step_m: float = 0.05, step_rad: float = 0.34
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Put poses in between, so that neighbours are near each other.

    Args:
        T: (M, 4, 4) poses, M at least 1.
        step_m: largest way between neighbours.
        step_rad: largest turn between neighbours.

    Returns:
        (L, 4, 4) poses with the given ones among them, and the places (M,) of the given ones.

    Source: huangwl18/ReKep configs/config.yaml, interpolation steps of 5 cm and 0.34 rad.
    """
    poses, places = [T[0]], [0]
    for first, second in pairwise(T):
        way, turn = second[:3, 3] - first[:3, 3], turn_of(first[:3, :3].T @ second[:3, :3])
        parts = max(1, math.ceil(np.linalg.norm(way) / step_m), math.ceil(np.linalg.norm(turn) / step_rad))
        for share in np.arange(1, parts) / parts:
            poses.append(make_pose(first[:3, :3] @ turn_by(share * turn), first[:3, 3] + share * way))
        poses.append(second)
        places.append(len(poses) - 1)
    return np.stack(poses), np.array(places)


def interpolate_joints(joint_rad: NDArray[np.float64], parts: int) -> NDArray[np.float64]:
    """Cut each step of a joint path into equal parts.

    Args:
        joint_rad: (M, J).
        parts: at least 1.

    Returns:
        ((M - 1) * parts + 1, J).
    """
    shares = np.arange(parts)[:, None] / parts
    between = joint_rad[:-1, None] + shares * np.diff(joint_rad, axis=0)[:, None]
    return np.concatenate([between.reshape(-1, joint_rad.shape[1]), joint_rad[-1:]])


def turn_of(rotation: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation vectors (..., 3) in radians of rotations (..., 3, 3)."""
    from scipy.spatial.transform import Rotation

    leading = rotation.shape[:-2]
    vectors: NDArray[np.float64] = Rotation.from_matrix(rotation.reshape(-1, 3, 3)).as_rotvec()
    return vectors.reshape(*leading, 3)


def turn_by(turn_rad: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotations (..., 3, 3) of rotation vectors (..., 3)."""
    from scipy.spatial.transform import Rotation

    matrices: NDArray[np.float64] = Rotation.from_rotvec(turn_rad.reshape(-1, 3)).as_matrix()
    return matrices.reshape(*turn_rad.shape[:-1], 3, 3)
