"""Cartesian controller: turns small motions of the gripper into joint targets, without reading the physical state.

An action moves a commanded pose of the grip, which always points down; damped least squares on the kinematics turns it
into joint angles, starting at the angles commanded before. So the controls of a whole chunk are known before its first
physics step, and `mujoco.rollout` can take them at once. Tracking errors (contacts, servo lag) show in the observation,
not in the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from robotics.scenes.arms import ArmModel

ACTION_NAMES = ("dx", "dy", "dz", "dyaw", "gripper")
ACTION_SIZE = len(ACTION_NAMES)
ACTION_STOP = ("zero", "zero", "zero", "zero", "hold")
"""Action that stops the arm: no motion, and the gripper as it is; see `ServeConfig.stop`."""
COMMAND_SIZE = 5
"""x, y, z in metres, yaw in radians, gripper (1 closed, -1 open)."""
CLOSED, OPEN = 1.0, -1.0
HOLD = np.array([*(ACTION_SIZE - 1) * [0.0], OPEN])
"""The action that moves nothing and keeps the gripper open."""
DOWN = -0.95
"""Largest height of the unit vector along the fingers at which a grip counts as pointing down."""


@dataclass(frozen=True)
class ControlSettings:
    """Sizes of actions, the workspace and the inverse kinematics."""

    step_m: float = bounded(0.04, above=0)
    """Maximum motion along an axis in one control step."""
    turn_rad: float = bounded(0.3, above=0)
    """Maximum turn about the vertical in one control step."""
    low_m: tuple[float, float, float] = (0.3, -0.3, 0.012)
    """Lowest x, y, z of the commanded grip; the fingertips reach 1 cm below it."""
    high_m: tuple[float, float, float] = (0.68, 0.3, 0.28)
    """Highest x, y, z."""
    yaw_rad: float = bounded(1.0, above=0)
    """Maximum turn to either side."""
    damping: float = bounded(0.02, above=0)
    """Damping of the least-squares solution."""
    posture: float = 0.1
    """Fraction of the distance to the home posture moved in an iteration, in the null space of the grip's pose."""
    joint_step_rad: float = 0.25
    """Maximum change of an angle in an iteration."""
    iterations: int = bounded(3, above=0)
    """Iterations of the inverse kinematics in a control step."""

    def validate(self) -> None:
        """Reject an empty workspace; raises UserError."""
        if not np.all(np.less(self.low_m, self.high_m)):
            raise UserError(f"the workspace from {self.low_m} to {self.high_m} is empty")


@dataclass(frozen=True)
class ControlPlan:
    """Controls and commanded poses of L rows for K control steps."""

    controls: NDArray[np.float64]  # (L, K, J + 1) of an arm: joint targets in rad, and the control of the gripper
    commands: NDArray[
        np.float64
    ]  # (L, K, 5) of an arm: commanded x, y, z (m, world), yaw (rad), gripper (1 closed, -1 open)


class CartesianController:
    """Keeps the commanded pose and joint targets of R rows.

    Args:
        arm: the arm that all rows have.
        settings: step sizes and workspace.
    """

    def __init__(self, arm: ArmModel, settings: ControlSettings | None = None) -> None:
        self.arm = arm
        self.settings = settings or ControlSettings()
        check_config(self.settings, "control")
        self._kinematics = arm.kinematics
        self._home = np.array(arm.home_rad)
        pose, _ = self._kinematics(self._home[None])
        self.home_command: NDArray[np.float64] = np.array(
            [*pose[0, :3, 3], np.arctan2(pose[0, 1, 0], pose[0, 0, 0]), OPEN]
        )
        """(5,) command at the start of an episode."""
        self._check_home(pose[0])
        self.home_control: NDArray[np.float64] = np.array([*self._home, arm.closed_and_open[1]])
        """(J + 1,) controls that hold the home pose."""
        self._joint_rad = np.empty((0, len(self._home)))
        self._command = np.empty((0, COMMAND_SIZE))

    def reset(self, rows: int) -> None:
        """Begin with all rows at home and the gripper open."""
        self._joint_rad = np.tile(self._home, (rows, 1))
        self._command = np.tile(self.home_command, (rows, 1))

    def restart(self, rows: ArrayLike) -> None:
        """Move the given rows back home, with the gripper open."""
        chosen = np.asarray(rows, np.int64)
        self._joint_rad[chosen] = self._home
        self._command[chosen] = self.home_command

    def commands(self, rows: ArrayLike) -> NDArray[np.float64]:
        """(L, 5) current commands of the given rows."""
        return self._command[np.asarray(rows, np.int64)]

    def plan(self, rows: ArrayLike, actions: ArrayLike) -> ControlPlan:
        """Move the commands of some rows by a chunk of actions.

        Args:
            rows: (L,) indices.
            actions: (L, K, 5) dx, dy, dz, dyaw as fractions of the largest step, and the gripper, which closes above 0
                and opens otherwise; clipped to -1..1.

        Returns:
            Controls and commands; the bits of a row do not depend on the others.

        Raises:
            UserError: the shape does not fit, or an action is not finite.
        """
        chosen = np.asarray(rows, np.int64)
        # checked before any command moves, so that an error leaves all rows as they were
        moves = check_actions(actions, len(chosen))
        joint_rad, command = self._joint_rad[chosen], self._command[chosen]
        length = moves.shape[1]
        controls = np.empty((len(chosen), length, len(self._home) + 1))
        commands = np.empty((len(chosen), length, COMMAND_SIZE))
        for step in range(length):
            command = self._move(command, moves[:, step])
            joint_rad = self._follow(joint_rad, command)
            controls[:, step, :-1] = joint_rad
            commands[:, step] = command
        # the gripper has no intermediate targets: fully closed or fully open
        controls[:, :, -1] = np.where(commands[:, :, 4] > 0, *self.arm.closed_and_open)
        self._joint_rad[chosen] = joint_rad
        self._command[chosen] = command
        return ControlPlan(controls, commands)

    def _check_home(self, pose: NDArray[np.float64]) -> None:
        """Raise UserError unless the grip points down at home, inside the workspace."""
        low, high, place = self.settings.low_m, self.settings.high_m, self.home_command[:3].round(3).tolist()
        if pose[2, 2] > DOWN:
            raise UserError(
                f"at home the grip of {self.arm.name} points along {pose[:3, 2].round(2).tolist()}; z of the site "
                f"{self.arm.grip_site} must point down, (0, 0, -1)"
            )
        if np.less(place, low).any() or np.greater(place, high).any():
            raise UserError(
                f"at home the grip of {self.arm.name} is at {place}, outside the workspace from {list(low)} to "
                f"{list(high)}; move home_rad or the workspace (`control`)"
            )

    def _move(self, command: NDArray[np.float64], action: NDArray[np.float64]) -> NDArray[np.float64]:
        settings, moved = self.settings, np.empty_like(command)
        moved[:, :3] = np.clip(command[:, :3] + settings.step_m * action[:, :3], settings.low_m, settings.high_m)
        turned = command[:, 3] + settings.turn_rad * action[:, 3]
        moved[:, 3] = np.clip(turned, -settings.yaw_rad, settings.yaw_rad)
        moved[:, 4] = np.where(action[:, 4] > 0, CLOSED, OPEN)
        return moved

    def _follow(self, joint_rad: NDArray[np.float64], command: NDArray[np.float64]) -> NDArray[np.float64]:
        settings, kinematics = self.settings, self._kinematics
        # damped, because the Jacobian loses rank at singular poses
        identity = settings.damping**2 * np.eye(6)
        # the command stays the same over the iterations
        goal = _goal_axes(command)
        for _ in range(settings.iterations):
            pose, jacobian = kinematics(joint_rad)
            drift = settings.posture * (self._home - joint_rad)
            # what the pull to the home posture does to the grip is taken off the error, so that only its null-space
            # part is left
            error = _pose_error(pose, command, goal) - (jacobian @ drift[..., None])[..., 0]
            transposed = jacobian.transpose(0, 2, 1)
            weights = np.linalg.solve(jacobian @ transposed + identity, error[..., None])
            change = (transposed @ weights)[..., 0] + drift
            # near a singular pose the solution may jump although it is damped
            change = np.clip(change, -settings.joint_step_rad, settings.joint_step_rad)
            joint_rad = np.clip(joint_rad + change, kinematics.low_rad, kinematics.high_rad)
        return joint_rad


def check_actions(actions: ArrayLike, rows: int, names: Sequence[str] = ACTION_NAMES) -> NDArray[np.float64]:
    """Actions (L, K, A) of L rows, clipped to -1..1; raises UserError if the shape differs or one is not finite."""
    array = np.asarray(actions, np.float64)
    if array.ndim != 3 or (array.shape[0], array.shape[2]) != (rows, len(names)) or array.shape[1] < 1:
        raise UserError(
            f"actions have the shape {array.shape}; expected ({rows} live rows, K >= 1, {len(names)}: "
            f"{', '.join(names)})"
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
    """(R, 6) translation and rotation from pose to command in world axes; the rotation is axis times sine of angle."""
    # The skew part of goal @ pose^T is the sum of the cross products of the columns.
    turn = goal @ pose[:, :3, :3].transpose(0, 2, 1)
    error = np.empty((len(command), 6))
    error[:, :3] = command[:, :3] - pose[:, :3, 3]
    error[:, 3] = 0.5 * (turn[:, 2, 1] - turn[:, 1, 2])
    error[:, 4] = 0.5 * (turn[:, 0, 2] - turn[:, 2, 0])
    error[:, 5] = 0.5 * (turn[:, 1, 0] - turn[:, 0, 1])
    return error
