"""The path of a gripper as one action of a policy, for behaviour cloning on the data of flow world models.

A path is W poses of the grip in the frame of the robot's base, each with open or closed fingers: two on the approach,
the grasp, and one for each frame of the flow. A policy that predicts a path looks once and decides everything, as the
planner does, and any arm with a two-finger gripper can try to follow it. A path may also be W rows of joint angles, the
usual actions of robot datasets, which fit one arm only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import make_pose

if TYPE_CHECKING:
    from numpy.typing import NDArray

POSE_NUMBERS = 9
"""x, y, z in metres, and the directions along the fingers and along the line on which they close."""
NUMBERS = POSE_NUMBERS + 1
"""A pose, and 1 for closed fingers or -1 for open ones."""
ACTIONS = ("grips", "joints")
APPROACH_POSES = 2
"""Poses before the object moves: 8 cm behind the grip, and the grip."""
HALF_TURN = np.diag([-1.0, -1.0, 1.0, 1.0])
TURN_RAD = 2 * np.pi
"""Angle that is 1 in an action; no joint of an arm turns farther."""
SHORT = 1e-6
"""Length below which a predicted direction is meaningless."""


def canonical_grip(T_world_grip: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pose, or the one turned by half a turn about the fingers, which is the same grip."""
    # one of two equal grips for the policy, so that it never has to average between opposite directions
    turned = T_world_grip @ HALF_TURN
    return np.where((T_world_grip[..., 1, 1] < 0)[..., None, None], turned, T_world_grip)


def action_of_poses(T_world_grip: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Action (W * 10,) of poses (W, 4, 4) and closed fingers (W,); in -1..1 within a metre of the robot's base."""
    return _with_fingers(_pose_numbers(T_world_grip), closed)


def poses_of_action(action: NDArray[np.floating]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Poses (W, 4, 4) and closed fingers (W,) of any action (W * 10,), directions made orthogonal."""
    rows = _rows(action, NUMBERS)
    along = _unit(rows[:, 3:6], np.array([0.0, 0.0, -1.0]))
    # predicted directions are not exactly orthogonal: the fingers' direction is kept, the other one follows
    close = rows[:, 6:9] - (rows[:, 6:9] * along).sum(-1, keepdims=True) * along
    close = _unit(close, np.cross(along, np.array([0.9, 0.1, 0.3])))
    rotation = np.stack([np.cross(close, along), close, along], -1)
    return make_pose(rotation, rows[:, :3]), rows[:, 9] > 0


def action_of_angles(joint_rad: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Action (W * (J + 1),) of angles (W, J) and closed fingers (W,); in -1..1 within a whole turn."""
    return _with_fingers(joint_rad / TURN_RAD, closed)


def angles_of_action(action: NDArray[np.floating], joints: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Angles (W, J) in rad and closed fingers (W,) of an action (W * (J + 1),)."""
    rows = _rows(action, joints + 1)
    return rows[:, :-1] * TURN_RAD, rows[:, -1] > 0


def path_state(T_world_grip: NDArray[np.float64], points_world_m: NDArray[np.float64]) -> NDArray[np.float32]:
    """State (9 + 3 n,) of a policy: the grip (4, 4) before the path, and the object's query points (n, 3) in metres."""
    return np.concatenate([_pose_numbers(canonical_grip(T_world_grip)), points_world_m.reshape(-1)]).astype(np.float32)


def _with_fingers(numbers: NDArray[np.float64], closed: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.concatenate([numbers, np.where(closed, 1.0, -1.0)[:, None]], -1).reshape(-1).astype(np.float32)


def _rows(action: NDArray[np.floating], numbers: int) -> NDArray[np.float64]:
    if action.ndim != 1 or len(action) % numbers or not np.isfinite(action).all():
        raise UserError(f"an action has the shape {action.shape}; expected W * {numbers} finite numbers")
    return np.asarray(action, np.float64).reshape(-1, numbers)


def _pose_numbers(T: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([T[..., :3, 3], T[..., :3, 2], T[..., :3, 1]], -1)


def _unit(vectors: NDArray[np.float64], otherwise: NDArray[np.float64]) -> NDArray[np.float64]:
    """Unit vectors (W, 3); a vector that is too short is replaced by another direction."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    chosen = np.where(length > SHORT, vectors, otherwise)
    unit: NDArray[np.float64] = chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)
    return unit
