"""Scripted experts: one rule per task, from the state of a scene to an action.

A rule is a function of one state (`SceneSensors.state`), so it continues from wherever noise, a policy or a failed
grasp has left the scene. It moves the commanded pose, which nothing drags back, and decides by the physical one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.control import ACTION_SIZE, CLOSED, OPEN, ControlSettings
from robotics.scenes.tabletop import CUBE_HALF_M, STATE_SIZE

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class NamedState:
    """One state vector by name; metres and radians, world frame."""

    grip: NDArray[np.float64]  # (3,)
    opening: float  # between the fingers
    command: NDArray[np.float64]  # (3,) commanded grip
    command_yaw: float
    closing: bool  # the gripper is commanded to close
    first: NDArray[np.float64]  # (3,) piece that is acted on
    first_yaw: float
    second: NDArray[np.float64]  # (3,) other piece
    goal: NDArray[np.float64]  # (3,)


@dataclass(frozen=True)
class Move:
    """Target of the grip."""

    point: NDArray[np.float64]  # (3,)
    gripper: float  # CLOSED or OPEN
    yaw: float = 0.0
    speed: float = 1.0  # largest share of a full action


class Expert:
    """Solves one task from its full state.

    Args:
        task: key in `EXPERTS`.
        noise: standard deviation of noise on the four motions of an action, for demonstrations that show recovery.
        seed: seed of that noise.
        control: settings of the controller that executes the actions.

    Raises:
        UserError: there is no expert for the task, or the noise is negative.
    """

    def __init__(self, task: str, noise: float = 0.0, seed: int = 0, control: ControlSettings | None = None) -> None:
        if task not in EXPERTS:
            raise UserError(f"no expert for {task!r}; available for: {', '.join(EXPERTS)}")
        if not noise >= 0.0:
            raise UserError(f"noise is {noise}; must be at least 0")
        self._rule = EXPERTS[task]
        self._noise = noise
        self._rng = np.random.default_rng(seed)
        self._control = control or ControlSettings()

    def act(self, observation_state: ArrayLike, info: Mapping[str, Any] | None = None) -> NDArray[np.float32]:
        """Choose an action.

        Args:
            observation_state: (22,) full state, see `SceneSensors.state`, or (R, 22) of rows with the same task.
            info: ignored; policies and experts share a signature.

        Returns:
            (5,) float32 action in -1..1, or (R, 5).

        Raises:
            UserError: the state is not the full one.
        """
        states = np.asarray(observation_state, np.float64)
        if states.shape[-1:] != (STATE_SIZE,) or states.ndim > 2:
            raise UserError(f"an expert needs the full state of {STATE_SIZE} entries, got shape {states.shape}")
        actions = np.stack([self._act(state) for state in states.reshape(-1, STATE_SIZE)])
        if self._noise:
            # without the gripper, whose sign alone counts
            actions[:, :-1] += self._noise * self._rng.standard_normal((len(actions), ACTION_SIZE - 1))
        return np.clip(actions, -1.0, 1.0).astype(np.float32).reshape(*states.shape[:-1], ACTION_SIZE)

    def _act(self, state: NDArray[np.float64]) -> NDArray[np.float64]:
        scene = _read(state)
        return steer(self._rule(scene), state[5:10], self._control)


def steer(move: Move, command: NDArray[np.float64], control: ControlSettings) -> NDArray[np.float64]:
    """Action (5,) that brings a commanded pose (5,) towards a target."""
    # from the commanded pose: the physical one lags behind, and starting from it would add the lag again
    way = (move.point - command[:3]) / control.step_m
    # One factor for all axes keeps the path straight.
    way *= move.speed / max(move.speed, float(np.abs(way).max()))
    turn = np.clip((move.yaw - command[3]) / control.turn_rad, -1.0, 1.0)
    return np.array([*way, turn, move.gripper])


def _read(state: NDArray[np.float64]) -> NamedState:
    return NamedState(
        grip=state[0:3],
        opening=float(state[4]),
        command=state[5:8],
        command_yaw=float(state[8]),
        closing=bool(state[9] > 0),
        first=state[10:13],
        first_yaw=float(state[13]),
        second=state[14:17],
        goal=state[18:21],
    )


def _reach(scene: NamedState) -> Move:
    return Move(_above(scene.first, 0.03), OPEN)


def _push(scene: NamedState) -> Move:
    """Get behind the cube, go down, and push it along the line to the zone."""
    way = (scene.goal - scene.first)[:2]
    distance = float(np.hypot(*way))
    ahead = way / max(distance, 1e-6)
    offset = (scene.grip - scene.first)[:2]
    along, across = float(offset @ ahead), float(offset @ [-ahead[1], ahead[0]])
    behind = _at(scene.first[:2] - ahead * BEHIND_M, PUSH_Z_M)
    if distance < DONE_PUSH_M:
        return Move(_at(scene.grip[:2], HOVER_M), CLOSED)
    # next to or in front of the cube: go around it by going over it
    if along > -CUBE_HALF_M or abs(across) > 0.5 * CUBE_HALF_M:
        return _go_over(scene, behind, CLOSED)
    # Aim beyond the middle of the cube's far side, towards the side to which the cube strays.
    target = scene.first[:2] + ahead * (min(distance, 0.04) - CUBE_HALF_M)
    side = np.array([-ahead[1], ahead[0]]) * across
    if scene.grip[2] > PUSH_Z_M + 0.02:
        return Move(behind, CLOSED)
    return Move(_at(target - 0.5 * side, PUSH_Z_M), CLOSED, speed=0.5)


def _carry(scene: NamedState, target: NDArray[np.float64]) -> Move:
    """Grasp the cube, carry it over the target and put it down."""
    held = scene.closing and scene.opening < HELD_M and _near(scene.grip, scene.first, 0.02)
    # let go only once the cube is centred, unless it is not held any more
    if _near(scene.first, target, 0.012) and not (held and _flat(scene.first, target) > 0.008):
        return Move(_at(scene.grip[:2], target[2] + HOVER_M), OPEN, scene.command_yaw)
    if not held:
        return _grasp(scene)
    yaw = scene.command_yaw
    # From grip to cube, so that the cube and not the grip reaches the target.
    shift = scene.grip - scene.first
    if _flat(scene.first, target) > 0.01:
        low = target[2] + CARRY_M
        point = scene.command if scene.first[2] < low - 0.02 else target + shift
        return Move(_at(point[:2], low), CLOSED, yaw, speed=0.4 if scene.grip[2] < 0.04 else 1.0)
    return Move(target + shift, CLOSED, yaw, speed=0.6)


def _grasp(scene: NamedState) -> Move:
    grasp = _above(scene.first, 0.002)
    at_cube = _flat(scene.grip, grasp) < 0.012 and abs(scene.grip[2] - grasp[2]) < 0.008
    if at_cube:
        return Move(grasp, CLOSED, scene.first_yaw)
    return _go_over(scene, grasp, OPEN, scene.first_yaw)


def _drawer(scene: NamedState) -> Move:
    """Lower the fingers into the gap behind the handle and pull it along the drawer's axis."""
    out = -np.array([np.cos(scene.first_yaw), np.sin(scene.first_yaw)])
    gap = _at(scene.first[:2] - out * GAP_M, HOOK_Z_M)
    offset = (scene.grip - scene.first)[:2]
    inside = -0.045 < float(offset @ out) < -0.008 and abs(float(offset @ [-out[1], out[0]])) < 0.025
    if inside and scene.grip[2] < HOOK_Z_M + 0.015:
        return Move(_at(scene.command[:2] + 0.05 * out, HOOK_Z_M), CLOSED, scene.first_yaw)
    return _go_over(scene, gap, CLOSED, scene.first_yaw)


def _go_over(scene: NamedState, point: NDArray[np.float64], gripper: float, yaw: float = 0.0) -> Move:
    """Reach a point from above: up where something may be in between, across, then down."""
    apart = _flat(scene.grip, point)
    if apart < 0.01:
        return Move(point, gripper, yaw)
    if apart > 0.02 and scene.grip[2] < point[2] + 0.5 * HOVER_M:
        # Straight up, not yet across.
        return Move(_at(scene.command[:2], point[2] + HOVER_M), gripper, yaw)
    return Move(_at(point[:2], point[2] + HOVER_M), gripper, yaw)


def _at(xy: NDArray[np.float64], z: float) -> NDArray[np.float64]:
    return np.array([xy[0], xy[1], z])


def _above(point: NDArray[np.float64], height_m: float) -> NDArray[np.float64]:
    return point + np.array([0.0, 0.0, height_m])


def _flat(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.hypot(*(one - other)[:2]))


def _near(one: NDArray[np.float64], other: NDArray[np.float64], distance_m: float) -> bool:
    return float(np.linalg.norm(one - other)) < distance_m


HOVER_M = 0.07
CARRY_M = 0.07
BEHIND_M = 0.07
PUSH_Z_M = 0.02
DONE_PUSH_M = 0.025
HELD_M = 0.054
GAP_M = 0.024
HOOK_Z_M = 0.045

EXPERTS: dict[str, Callable[[NamedState], Move]] = {
    "reach": _reach,
    "reach_green": _reach,
    "push": _push,
    "pick_place": lambda scene: _carry(scene, _above(scene.goal, CUBE_HALF_M + 0.004)),
    "stack": lambda scene: _carry(scene, _above(scene.second, 2 * CUBE_HALF_M + 0.004)),
    "drawer": _drawer,
    "drawer_wide": _drawer,
}
