"""From small motions of the gripper to joint targets, without looking at the physics.

An action moves a COMMANDED pose of the grip, which always points down; damped least squares on the kinematics turns it
into joint angles, starting at the angles commanded before. The physical state is never read, so the controls of a whole
chunk of actions are known before its first physics step, and `mujoco.rollout` can take them at once. What the arm does
not follow (contacts, lag of its servos) shows in the observation, not in the command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from robotics.sim.arms import ArmModel

ACTION_SIZE = 5
"""dx, dy, dz, dyaw, gripper."""
COMMAND_SIZE = 5
"""x, y, z in metres, yaw in radians, gripper (1 closed, -1 open)."""
CLOSED, OPEN = 1.0, -1.0


@dataclass(frozen=True)
class ControlSettings:
    """How far an action of full size goes and where it may lead."""

    step_m: float = bounded(0.04, above=0)
    """Way along an axis in one control step."""
    turn_rad: float = bounded(0.3, above=0)
    """Turn about the vertical in one control step."""
    low_m: tuple[float, float, float] = (0.3, -0.3, 0.012)
    """Lowest x, y, z of the commanded grip; the fingertips reach 1 cm below it."""
    high_m: tuple[float, float, float] = (0.68, 0.3, 0.28)
    """Highest x, y, z."""
    yaw_rad: float = bounded(1.0, above=0)
    """Largest turn to either side."""
    damping: float = bounded(0.02, above=0)
    """Damping of the least squares: how much joint motion is worth an error of the pose."""
    posture: float = 0.1
    """Share of the way back to the home posture in an iteration, within what leaves the grip where it is."""
    joint_step_rad: float = 0.25
    """Largest change of an angle in an iteration."""
    iterations: int = bounded(3, above=0)
    """Iterations of the inverse kinematics in a control step."""

    def validate(self) -> None:
        """Refuse an empty workspace; raises UserError."""
        if not np.all(np.less(self.low_m, self.high_m)):
            raise UserError(f"the workspace from {self.low_m} to {self.high_m} is empty")


@dataclass(frozen=True)
class Plan:
    """Controls of L rows for K control steps, and where the grip was sent."""

    controls: NDArray[np.float64]
    """(L, K, J + 1) joint targets in radians and the target of a finger in metres."""
    commands: NDArray[np.float64]
    """(L, K, 5) commanded x, y, z (m, world), yaw (rad) and gripper (1 closed, -1 open) after each control step."""


class CartesianController:
    """Keeps the commanded pose and joint targets of R rows.

    Args:
        arm: the arm that all rows have.
        settings: step sizes and workspace.
    """

    def __init__(self, arm: ArmModel, settings: ControlSettings | None = None) -> None:
        self.arm, self.settings = arm, settings or ControlSettings()
        check_config(self.settings, "control")
        self._kinematics = arm.kinematics
        self._home = np.array(arm.home_rad)
        pose, _ = self._kinematics(self._home[None])
        self.home_command: NDArray[np.float64] = np.array([*pose[0, :3, 3], _yaw(pose)[0], OPEN])
        """(5,) command with which a row starts."""
        self.home_control: NDArray[np.float64] = np.array([*self._home, arm.opening_m])
        """(J + 1,) controls that hold the home pose."""
        self._joint_rad = np.empty((0, len(self._home)))
        self._command = np.empty((0, COMMAND_SIZE))

    def reset(self, rows: int) -> None:
        """Begin with so many rows, all at home with the gripper open."""
        self._joint_rad = np.tile(self._home, (rows, 1))
        self._command = np.tile(self.home_command, (rows, 1))

    def restart(self, rows: ArrayLike) -> None:
        """Put some rows back home, with the gripper open."""
        chosen = np.asarray(rows, np.int64)
        self._joint_rad[chosen], self._command[chosen] = self._home, self.home_command

    def commands(self, rows: ArrayLike) -> NDArray[np.float64]:
        """(L, 5) command of each of some rows as it stands."""
        return self._command[np.asarray(rows, np.int64)]

    def plan(self, rows: ArrayLike, actions: ArrayLike) -> Plan:
        """Move the commands of some rows by a chunk of actions.

        Args:
            rows: (L,) numbers of the rows.
            actions: (L, K, 5) dx, dy, dz, dyaw as shares of the largest step, and the gripper, which closes above 0 and
                opens otherwise; what lies outside -1..1 is clipped.

        Returns:
            Controls and commands. Rows do not influence each other: the bits of one are those it has alone.

        Raises:
            UserError: the shape does not fit, or an action is not a finite number.
        """
        chosen = np.asarray(rows, np.int64)
        moves = check_actions(actions, len(chosen))
        joint_rad, command = self._joint_rad[chosen], self._command[chosen]
        length = moves.shape[1]
        controls = np.empty((len(chosen), length, len(self._home) + 1))
        commands = np.empty((len(chosen), length, COMMAND_SIZE))
        for step in range(length):
            command = self._move(command, moves[:, step])
            joint_rad = self._follow(joint_rad, command)
            controls[:, step, :-1], commands[:, step] = joint_rad, command
        controls[:, :, -1] = np.where(commands[:, :, 4] > 0, 0.0, self.arm.opening_m)
        self._joint_rad[chosen], self._command[chosen] = joint_rad, command
        return Plan(controls, commands)

    def _move(self, command: NDArray[np.float64], action: NDArray[np.float64]) -> NDArray[np.float64]:
        settings, moved = self.settings, np.empty_like(command)
        moved[:, :3] = np.clip(command[:, :3] + settings.step_m * action[:, :3], settings.low_m, settings.high_m)
        turned = command[:, 3] + settings.turn_rad * action[:, 3]
        moved[:, 3] = np.clip(turned, -settings.yaw_rad, settings.yaw_rad)
        moved[:, 4] = np.where(action[:, 4] > 0, CLOSED, OPEN)
        return moved

    def _follow(self, joint_rad: NDArray[np.float64], command: NDArray[np.float64]) -> NDArray[np.float64]:
        settings, kinematics = self.settings, self._kinematics
        identity = settings.damping**2 * np.eye(6)
        goal = _goal_axes(command)
        for _ in range(settings.iterations):
            pose, jacobian = kinematics(joint_rad)
            drift = settings.posture * (self._home - joint_rad)
            error = _pose_error(pose, command, goal) - (jacobian @ drift[..., None])[..., 0]
            transposed = jacobian.transpose(0, 2, 1)
            weights = np.linalg.solve(jacobian @ transposed + identity, error[..., None])
            change = (transposed @ weights)[..., 0] + drift
            change = np.clip(change, -settings.joint_step_rad, settings.joint_step_rad)
            joint_rad = np.clip(joint_rad + change, kinematics.low_rad, kinematics.high_rad)
        return joint_rad


def check_actions(actions: ArrayLike, rows: int) -> NDArray[np.float64]:
    """Check a chunk of actions and clip it.

    Args:
        actions: (L, K, 5).
        rows: L.

    Returns:
        (L, K, 5) float64 in -1..1.

    Raises:
        UserError: the shape is another, or an entry is NaN or infinite.
    """
    array = np.asarray(actions, np.float64)
    if array.ndim != 3 or (array.shape[0], array.shape[2]) != (rows, ACTION_SIZE) or array.shape[1] < 1:
        raise UserError(
            f"actions have the shape {array.shape}; expected ({rows} live rows, K >= 1, {ACTION_SIZE}: dx, dy, dz, "
            "dyaw, gripper)"
        )
    if not np.isfinite(array).all():
        row, step, entry = np.argwhere(~np.isfinite(array))[0]
        raise UserError(f"action {entry} of control step {step} in row {row} is {array[row, step, entry]}")
    return np.clip(array, -1.0, 1.0)


def _goal_axes(command: NDArray[np.float64]) -> NDArray[np.float64]:
    """(R, 3, 3) rotation of a grip that points down with the commanded yaw."""
    axes = np.zeros((len(command), 3, 3))
    axes[:, 0, 0] = np.cos(command[:, 3])
    axes[:, 1, 0] = axes[:, 0, 1] = np.sin(command[:, 3])
    axes[:, 1, 1] = -axes[:, 0, 0]
    axes[:, 2, 2] = -1.0
    return axes


def _pose_error(
    pose: NDArray[np.float64], command: NDArray[np.float64], goal: NDArray[np.float64]
) -> NDArray[np.float64]:
    """(R, 6) way and turn from the pose to the command in world axes; the turn is axis times sine of the angle."""
    # The skew part of goal @ pose^T is the sum of the cross products of the columns.
    turn = goal @ pose[:, :3, :3].transpose(0, 2, 1)
    error = np.empty((len(command), 6))
    error[:, :3] = command[:, :3] - pose[:, :3, 3]
    error[:, 3] = 0.5 * (turn[:, 2, 1] - turn[:, 1, 2])
    error[:, 4] = 0.5 * (turn[:, 0, 2] - turn[:, 2, 0])
    error[:, 5] = 0.5 * (turn[:, 1, 0] - turn[:, 0, 1])
    return error


def _yaw(pose: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.arctan2(pose[:, 1, 0], pose[:, 0, 0])
