"""The tabletop tasks: instructions, initial layouts, success and progress.

A layout is a number within a split; every pair of number and split has its own generator. Pieces are placed on a
checkerboard, in train layouts on squares of one colour and in held_out layouts on the other, so training never shows a
held-out layout, or even a single piece where a held-out layout has one.

Success and progress are functions of one transition, without memory. If passing by would count, success requires a
piece at rest and an open gripper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.scenes.arms import start_arm
from robotics.scenes.control import ACTION_NAMES, HOLD, CartesianController, ControlSettings
from robotics.scenes.experts import Expert
from robotics.scenes.looks import FILM, SURFACES, dress
from robotics.scenes.scene import SPLITS, Scene, check_choice, rotations
from robotics.scenes.tabletop import (
    CONTROL_HZ,
    CUBE_HALF_M,
    PHYSICS_STEPS,
    PIECES,
    PROPRIO_SIZE,
    STATE_NAMES,
    Layout,
    Roles,
    SceneReading,
    SceneSensors,
    place_pieces,
    scene_spec,
)
from robotics.scenes.variant import SceneParts
from robotics.sim.randomization import RandomizationConfig

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.scenes.arms import ArmModel

SQUARE_M = 0.06
"""Size of a square of the checkerboard."""
LAYOUTS = 2**31
"""Number of layouts in a split: 0..LAYOUTS - 1."""
MAX_DRAWS = 20000
"""Number of draws before a layout counts as impossible; the fullest table takes 400 on average."""


@dataclass(frozen=True)
class Area:
    """Region in which a piece may be placed."""

    x_m: tuple[float, float]  # nearest and farthest
    y_m: tuple[float, float]  # rightmost and leftmost, seen from the base
    yaw_rad: float = 0.0  # largest turn to either side


@dataclass(frozen=True)
class TabletopTask:
    """One task: its setup and its scores."""

    name: str
    instruction: str
    roles: Roles
    areas: dict[str, Area]  # where each piece starts; also the pieces of the scene, in order
    apart_m: tuple[float, float]  # least and greatest distance between two pieces
    success: Callable[[SceneReading], NDArray[np.bool_]]
    progress: Callable[[SceneReading], NDArray[np.float64]]  # 0..1
    horizon: int = 60  # control steps

    def dense_reward(self, reading: SceneReading) -> NDArray[np.float64]:
        """Hand-written reward of readings with any leading shape: 1 at success, else at most 0.95."""
        # below 1, so that no progress is worth as much as success
        return np.where(self.success(reading), 1.0, 0.95 * np.clip(self.progress(reading), 0.0, 1.0))


class TabletopScene(Scene):
    """A task at a table with an arm."""

    arm: ArmModel
    task: TabletopTask
    state_names = STATE_NAMES
    proprio_size = PROPRIO_SIZE
    action_names = ACTION_NAMES
    control_hz = CONTROL_HZ
    substeps = PHYSICS_STEPS
    ring_rises = 0.0

    def __init__(
        self,
        task: TabletopTask,
        arm: ArmModel,
        split: str = "train",
        reward: str = "sparse",
        randomization: RandomizationConfig | None = None,
    ) -> None:
        self.arm = arm
        super().__init__(task, scene_spec(arm, tuple(task.areas), task.roles), split, reward, randomization)
        self.sensors: SceneSensors = SceneSensors(self.model)
        first = int(self.model.jnt_bodyid[int(self.model.joint(arm.joints[0]).id)])
        self.parts = SceneParts(
            pieces={name: PIECES[name].body for name in task.areas},
            servos=dict(zip(arm.joints, arm.actuators(self.model)[:-1], strict=True)),
            robot=(int(self.model.body_rootid[first]),),
            surfaces=SURFACES,
            noise=STATE_NOISE,
            hold=HOLD,
        )

    def surfaces(self, spec: Any) -> tuple[str, ...]:
        """Table and floor."""
        return SURFACES

    def controller(self, settings: ControlSettings | None = None) -> CartesianController:
        """Make the Cartesian controller."""
        return CartesianController(self.arm, settings)

    def expert(self, sensordata: NDArray[np.float64], commands: NDArray[np.float64]) -> NDArray[np.float32]:
        """(R, 5) actions of the scripted expert."""
        return Expert(self.task.name).act(self.sensors.state(sensordata, commands))

    def film_spec(self) -> tuple[Any, str]:
        """The table with legs on a tiled floor."""
        spec, roles = scene_spec(self.arm, tuple(self.task.areas), self.task.roles, FILM), self.task.roles
        dress(spec)
        return spec, PIECES[roles.goal or roles.first].handle

    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Put arm and pieces at the start of an episode."""
        start_arm(model, data, self.arm)
        place_pieces(model, data, draw_layout(self.task.areas, self.task.apart_m, self.split, rng))

    def object_poses(self, qpos: NDArray[np.float64], sensordata: NDArray[np.float64]) -> NDArray[np.float64]:
        """(R, 4, 4) T_world_object of the first piece: of a cube its body, of the drawer its handle.

        From positions (R, nq) and sensor values (R, nsensordata).
        """
        name = self.task.roles.first
        poses = np.tile(np.eye(4), (len(qpos), 1, 1))
        if PIECES[name].kind == "cube":
            start = int(self.model.jnt_qposadr[int(self.model.body(PIECES[name].body).jntadr[0])])
            poses[:, :3, 3], poses[:, :3, :3] = qpos[:, start : start + 3], rotations(qpos[:, start + 3 : start + 7])
            return poses
        reading = self.sensors.read(sensordata)
        turned = np.stack([np.cos(reading.first_yaw / 2), *np.zeros((2, len(qpos))), np.sin(reading.first_yaw / 2)], -1)
        poses[:, :3, 3], poses[:, :3, :3] = reading.first, rotations(turned)
        return poses


def find_task(name: str) -> TabletopTask:
    """Row of `TASKS` with a name; raises UserError if it does not exist."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; available: {', '.join(TASKS)}, or module:Class")
    return TASKS[name]


def layout_seed(split: str, layout: int) -> int:
    """Seed of a layout; the splits share no seed."""
    check_choice("split", split, SPLITS)
    if not 0 <= layout < LAYOUTS:
        raise UserError(f"layout is {layout}; must be 0 to {LAYOUTS - 1}")
    # even seeds for one split, odd ones for the other
    return 2 * layout + SPLITS.index(split)


def draw_layout(
    areas: Mapping[str, Area], apart_m: tuple[float, float], split: str, rng: np.random.Generator
) -> Layout:
    """Draw the positions of the pieces: within their areas, apart from each other, on squares of the split's colour."""
    near, far = apart_m
    for _ in range(MAX_DRAWS):
        # all pieces are drawn again after a failure: drawing them one by one would favour some layouts
        poses = {name: _draw_pose(area, rng) for name, area in areas.items()}
        if not all(_on_square(x, y, split) for x, y, _ in poses.values()):
            continue
        points = np.array([pose[:2] for pose in poses.values()])
        gaps = [np.hypot(*(one - other)) for index, one in enumerate(points) for other in points[:index]]
        if all(near <= gap <= far for gap in gaps):
            return poses
    raise RuntimeError(f"no layout of {', '.join(areas)} was found in {MAX_DRAWS} draws")


def _draw_pose(area: Area, rng: np.random.Generator) -> tuple[float, float, float]:
    x = rng.uniform(*area.x_m)
    y = rng.uniform(*area.y_m)
    yaw = rng.uniform(-1.0, 1.0) * area.yaw_rad
    return float(x), float(y), float(yaw)


def _on_square(x: float, y: float, split: str) -> bool:
    return int(np.floor(x / SQUARE_M) + np.floor(y / SQUARE_M)) % 2 == SPLITS.index(split)


def _gap(one: NDArray[np.float64], other: NDArray[np.float64], axes: int = 3) -> NDArray[np.float64]:
    """Distance along the first axes; spelled out, so that its bits do not depend on how many rows there are."""
    return np.sqrt(sum((one[..., axis] - other[..., axis]) ** 2 for axis in range(axes)))


def _nearness(distance: NDArray[np.float64], scale_m: float) -> NDArray[np.float64]:
    return 1.0 / (1.0 + distance / scale_m)


def _touched(found: SceneReading) -> NDArray[np.bool_]:
    return _gap(found.grip, found.first) < TOUCH_M


def _touch_progress(found: SceneReading) -> NDArray[np.float64]:
    return _nearness(np.maximum(_gap(found.grip, found.first) - TOUCH_M, 0.0), 0.1)


def _pushed(found: SceneReading) -> NDArray[np.bool_]:
    on_table = np.abs(found.first[..., 2] - CUBE_HALF_M) < 0.01
    return (_gap(found.first, found.goal, 2) < ZONE_M) & (found.first_speed < REST_M_S) & on_table


def _push_progress(found: SceneReading) -> NDArray[np.float64]:
    there = _nearness(np.maximum(_gap(found.first, found.goal, 2) - ZONE_M, 0.0), 0.08)
    return 0.2 * _nearness(_gap(found.grip, found.first), 0.1) + 0.8 * there


def _let_go(found: SceneReading) -> NDArray[np.bool_]:
    return (found.opening > RELEASED_M) & (found.first_speed < REST_M_S)


def _placed(found: SceneReading) -> NDArray[np.bool_]:
    level = np.abs(found.first[..., 2] - found.goal[..., 2] - CUBE_HALF_M) < 0.01
    return (_gap(found.first, found.goal, 2) < PLATE_M) & level & _let_go(found)


def _place_progress(found: SceneReading) -> NDArray[np.float64]:
    return _carry_progress(found, found.goal + np.array([0.0, 0.0, CUBE_HALF_M]))


def _stacked(found: SceneReading) -> NDArray[np.bool_]:
    level = np.abs(found.first[..., 2] - found.second[..., 2] - 2 * CUBE_HALF_M) < 0.01
    return (_gap(found.first, found.second, 2) < STACK_M) & level & _let_go(found)


def _stack_progress(found: SceneReading) -> NDArray[np.float64]:
    return _carry_progress(found, found.second + np.array([0.0, 0.0, 2 * CUBE_HALF_M]))


def _carry_progress(found: SceneReading, target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Progress of a carried cube: approach, hold (fingers on it), then closeness to the target, held or not."""
    near = _nearness(_gap(found.grip, found.first), 0.1)
    held = (_gap(found.grip, found.first) < 0.03) & (found.opening < 2 * CUBE_HALF_M + 0.005)
    return 0.2 * near + 0.2 * held + 0.6 * _nearness(_gap(found.first, target), 0.1) ** 2


def _opened(found: SceneReading) -> NDArray[np.bool_]:
    return found.drawer > DRAWER_M


def _open_progress(found: SceneReading) -> NDArray[np.float64]:
    return 0.3 * _nearness(_gap(found.grip, found.first), 0.1) + 0.7 * np.clip(found.drawer / DRAWER_M, 0.0, 1.0)


STATE_NOISE = (
    *(3 * ("position_m",)),
    *("yaw_rad", "opening_m"),
    *(5 * ("",)),  # what the robot was commanded is known exactly
    *(2 * (*(3 * ("pieces_m",)), "pieces_rad")),
    *(4 * ("pieces_m",)),
)
"""Field of `NoiseLevels` of each entry of the state."""
TOUCH_M = 0.035
ZONE_M = 0.04
PLATE_M = 0.045
STACK_M = 0.02
REST_M_S = 0.03
RELEASED_M = 0.056
"""Opening at which a cube is no longer held."""
DRAWER_M = 0.1

WHOLE = Area((0.38, 0.62), (-0.2, 0.2))
CUBE_AREA = Area(WHOLE.x_m, WHOLE.y_m, yaw_rad=0.3)
REACH_AREAS = {"red_cube": CUBE_AREA, "green_cube": CUBE_AREA}


TOUCH, PUSH, OPEN = (_touched, _touch_progress), (_pushed, _push_progress), (_opened, _open_progress)
PLACED, STACKED = (_placed, _place_progress), (_stacked, _stack_progress)
PLATE_AREAS = {"red_cube": CUBE_AREA, "yellow_plate": WHOLE}
DRAWER_AREAS = {"drawer": Area((0.56, 0.64), (-0.11, 0.11), yaw_rad=0.2)}
# One fixed motion opens the drawer above in four of ten layouts, and in at best two of ten here.
WIDE_AREAS = {"drawer": Area((0.54, 0.66), (-0.2, 0.2), yaw_rad=0.6)}
FAR_M = (0.14, 1.0)
"""Minimum and maximum distance of things between which a cube is carried."""
PUSH_ROLES, PUSH_AREAS = Roles("red_cube", goal="blue_zone"), {"red_cube": CUBE_AREA, "blue_zone": WHOLE}
TO_PLATE, STACK_ROLES = Roles("red_cube", goal="yellow_plate"), Roles("red_cube", second="green_cube")
GREEN_ROLES = Roles("green_cube", second="red_cube")

TASKS: dict[str, TabletopTask] = {
    task.name: task
    for task in (
        TabletopTask("reach", "touch the red cube", STACK_ROLES, REACH_AREAS, (0.12, 1.0), *TOUCH),
        TabletopTask("reach_green", "touch the green cube", GREEN_ROLES, REACH_AREAS, (0.12, 1.0), *TOUCH),
        TabletopTask("push", "push the red cube into the blue zone", PUSH_ROLES, PUSH_AREAS, (0.12, 0.22), *PUSH, 100),
        TabletopTask("pick_place", "put the red cube on the yellow plate", TO_PLATE, PLATE_AREAS, FAR_M, *PLACED, 80),
        TabletopTask("stack", "stack the red cube on the green cube", STACK_ROLES, REACH_AREAS, FAR_M, *STACKED, 80),
        TabletopTask("drawer", "open the drawer", Roles("drawer"), DRAWER_AREAS, (0.0, 1.0), *OPEN),
        TabletopTask("drawer_wide", "open the drawer", Roles("drawer"), WIDE_AREAS, (0.0, 1.0), *OPEN),
    )
}
