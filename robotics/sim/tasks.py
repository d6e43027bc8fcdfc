"""The tabletop tasks: their instructions, how an episode starts, when it is done and how far it is.

A layout is a number within a split. Its pieces are drawn from a generator of their own for every pair of number and
split, and they stand on a checkerboard: the centres of all pieces of a train layout lie on fields of one colour, those
of a held_out layout on the other. So no held-out layout is seen in training, and not even a piece where a held-out one
lies.

Success and progress are functions of one moment, with nothing kept between calls. Where a thing in passing would count,
success asks for a thing at rest and an open gripper.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mmrl.errors import UserError
from robotics.sim.randomization import RandomizationConfig
from robotics.sim.tabletop import (
    CUBE_HALF_M,
    Layout,
    Roles,
    SceneReading,
    SceneSensors,
    build_scene,
    place_pieces,
)
from robotics.sim.variant import SceneVariants

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

    from robotics.sim.arms import ArmModel
    from robotics.sim.scene_steps import SceneSteps

SPLITS = ("train", "held_out")
REWARDS = ("sparse", "dense")
FIELD_M = 0.06
"""Side of a field of the checkerboard."""
LAYOUTS = 2**31
"""Layouts in a split: 0..LAYOUTS - 1."""
TRIES = 20000
"""Draws until a layout counts as impossible; the fullest table takes 400 in the mean."""


@dataclass(frozen=True)
class Area:
    """Where a piece may lie."""

    x_m: tuple[float, float]
    """Nearest and farthest."""
    y_m: tuple[float, float]
    """Rightmost and leftmost, seen from the base."""
    yaw_rad: float = 0.0
    """Largest turn to either side."""


@dataclass(frozen=True)
class TabletopTask:
    """One task, with everything that is needed to set it up and to score it."""

    name: str
    """Key in `TASKS`."""
    instruction: str
    """Language instruction."""
    roles: Roles
    """Which pieces are acted on."""
    areas: dict[str, Area]
    """Where each piece lies at the start; also the pieces of the scene, in order."""
    apart_m: tuple[float, float]
    """Least and greatest distance between two pieces."""
    success: Callable[[SceneReading], NDArray[np.bool_]]
    """Whether the task is done."""
    progress: Callable[[SceneReading], NDArray[np.float64]]
    """How far it is, in 0..1."""
    horizon: int
    """Control steps after which an episode ends."""

    def dense_reward(self, reading: SceneReading) -> NDArray[np.float64]:
        """Hand-written reward of each moment.

        Args:
            reading: sensors, with any leading shape.
        """
        return np.where(self.success(reading), 1.0, 0.95 * np.clip(self.progress(reading), 0.0, 1.0))


class TabletopScene:
    """A task at a table with an arm: the model, and starts and scores for `ImageRollout`."""

    def __init__(
        self,
        task: TabletopTask,
        arm: ArmModel,
        split: str = "train",
        reward: str = "sparse",
        randomization: RandomizationConfig | None = None,
    ) -> None:
        _check_choice("split", split, SPLITS)
        _check_choice("reward", reward, REWARDS)
        self.task, self.arm, self.split, self.reward = task, arm, split, reward
        config = randomization or RandomizationConfig()
        self.model = build_scene(arm, tuple(task.areas), task.roles, textured="textures" in config.active())
        self.variants = SceneVariants(self.model, arm, tuple(task.areas), config)
        self.sensors = SceneSensors(self.model)
        self._joints = [int(self.model.joint(name).qposadr[0]) for name in (*arm.joints, *arm.fingers)]
        self._home = np.array([*arm.home_rad, arm.opening_m, arm.opening_m])
        self._controls = [int(self.model.actuator(name).id) for name in (*arm.joints, arm.gripper)]
        # Targets pass through a filter whose state must start at them, or the arm would set off from zero angles.
        self._filtered = np.flatnonzero(self.model.actuator_actadr >= 0)

    def for_split(self, split: str) -> TabletopScene:
        """The same scene, model shared, with layouts of a split."""
        _check_choice("split", split, SPLITS)
        other = copy.copy(self)
        other.split = split
        return self if split == self.split else other

    def reset(self, model: mujoco.MjModel, data: mujoco.MjData, rng: np.random.Generator) -> None:
        """Put arm and pieces where an episode starts."""
        data.qpos[self._joints] = self._home
        data.ctrl[self._controls] = self._home[:-1]
        data.act[:] = data.ctrl[self._filtered]
        place_pieces(model, data, draw_layout(self.task, self.split, rng))

    def score(self, steps: SceneSteps) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Reward and success of each control step."""
        reading = self.sensors.read(steps.sensordata)
        done = self.task.success(reading)
        return (self.task.dense_reward(reading) if self.reward == "dense" else done.astype(np.float64)), done


def find_task(name: str) -> TabletopTask:
    """Row of `TASKS` with a name; raises UserError where there is none."""
    if name not in TASKS:
        raise UserError(f"task is {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name]


def layout_seed(split: str, layout: int) -> int:
    """Seed of a layout; none of one split is one of the other."""
    _check_choice("split", split, SPLITS)
    if not 0 <= layout < LAYOUTS:
        raise UserError(f"layout is {layout}; must be 0 to {LAYOUTS - 1}")
    return 2 * layout + SPLITS.index(split)


class Placing(Protocol):
    """Pieces and where they may lie: a `TabletopTask`, or furniture of another room."""

    @property
    def name(self) -> str:
        """What it is called in errors."""

    @property
    def areas(self) -> dict[str, Area]:
        """Where each piece may lie."""

    @property
    def apart_m(self) -> tuple[float, float]:
        """Least and greatest distance between two pieces."""


def draw_layout(task: Placing, split: str, rng: np.random.Generator) -> Layout:
    """Choose where the pieces lie: within their areas, apart from each other, on fields of the split's colour."""
    near, far = task.apart_m
    for _ in range(TRIES):
        places = {name: _draw_pose(area, rng) for name, area in task.areas.items()}
        if not all(_on_field(x, y, split) for x, y, _ in places.values()):
            continue
        points = np.array([pose[:2] for pose in places.values()])
        gaps = [np.hypot(*(one - other)) for at, one in enumerate(points) for other in points[:at]]
        if all(near <= gap <= far for gap in gaps):
            return places
    raise RuntimeError(f"no layout of {task.name} was found in {TRIES} draws")


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} is {value!r}; there are {' and '.join(known)}")


def _draw_pose(area: Area, rng: np.random.Generator) -> tuple[float, float, float]:
    x, y, yaw = rng.uniform(*area.x_m), rng.uniform(*area.y_m), rng.uniform(-1.0, 1.0) * area.yaw_rad
    return float(x), float(y), float(yaw)


def _on_field(x: float, y: float, split: str) -> bool:
    return int(np.floor(x / FIELD_M) + np.floor(y / FIELD_M)) % 2 == SPLITS.index(split)


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
    lies = np.abs(found.first[..., 2] - CUBE_HALF_M) < 0.01
    return (_gap(found.first, found.goal, 2) < ZONE_M) & (found.first_speed < REST_M_S) & lies


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
    """Approach, then hold (lifted, with the fingers on it), then the way to the target, which needs no holding."""
    near = _nearness(_gap(found.grip, found.first), 0.1)
    held = (_gap(found.grip, found.first) < 0.03) & (found.opening < 2 * CUBE_HALF_M + 0.005)
    return 0.2 * near + 0.2 * held + 0.6 * _nearness(_gap(found.first, target), 0.1) ** 2


def _opened(found: SceneReading) -> NDArray[np.bool_]:
    return found.drawer > DRAWER_M


def _open_progress(found: SceneReading) -> NDArray[np.float64]:
    return 0.3 * _nearness(_gap(found.grip, found.first), 0.1) + 0.7 * np.clip(found.drawer / DRAWER_M, 0.0, 1.0)


TOUCH_M = 0.035
"""Between grip and the centre of a cube that counts as touched."""
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

TASKS: dict[str, TabletopTask] = {
    task.name: task
    for task in (
        TabletopTask(
            name="reach",
            instruction="touch the red cube",
            roles=Roles("red_cube", second="green_cube"),
            areas=REACH_AREAS,
            apart_m=(0.12, 1.0),
            success=_touched,
            progress=_touch_progress,
            horizon=60,
        ),
        TabletopTask(
            name="reach_green",
            instruction="touch the green cube",
            roles=Roles("green_cube", second="red_cube"),
            areas=REACH_AREAS,
            apart_m=(0.12, 1.0),
            success=_touched,
            progress=_touch_progress,
            horizon=60,
        ),
        TabletopTask(
            name="push",
            instruction="push the red cube into the blue zone",
            roles=Roles("red_cube", goal="blue_zone"),
            areas={"red_cube": CUBE_AREA, "blue_zone": WHOLE},
            apart_m=(0.12, 0.22),
            success=_pushed,
            progress=_push_progress,
            horizon=100,
        ),
        TabletopTask(
            name="pick_place",
            instruction="put the red cube on the yellow plate",
            roles=Roles("red_cube", goal="yellow_plate"),
            areas={"red_cube": CUBE_AREA, "yellow_plate": WHOLE},
            apart_m=(0.14, 1.0),
            success=_placed,
            progress=_place_progress,
            horizon=80,
        ),
        TabletopTask(
            name="stack",
            instruction="stack the red cube on the green cube",
            roles=Roles("red_cube", second="green_cube"),
            areas=REACH_AREAS,
            apart_m=(0.14, 1.0),
            success=_stacked,
            progress=_stack_progress,
            horizon=80,
        ),
        TabletopTask(
            name="drawer",
            instruction="open the drawer",
            roles=Roles("drawer"),
            areas={"drawer": Area((0.56, 0.64), (-0.11, 0.11), yaw_rad=0.2)},
            apart_m=(0.0, 1.0),
            success=_opened,
            progress=_open_progress,
            horizon=60,
        ),
        TabletopTask(  # what opens one drawer opens four in ten above and at best two in ten here
            name="drawer_wide",
            instruction="open the drawer",
            roles=Roles("drawer"),
            areas={"drawer": Area((0.54, 0.66), (-0.2, 0.2), yaw_rad=0.6)},
            apart_m=(0.0, 1.0),
            success=_opened,
            progress=_open_progress,
            horizon=60,
        ),
    )
}
