"""Tabletop tasks of 3D flow: instruction, object, criteria, and scripted motion.

Objects are placed on squares of a checkerboard, in train layouts on one colour and in held-out layouts on the other, as
in the tabletop tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import angle_rad, make_pose
from robotics.flow3d.objects.criteria import CriteriaOutcome, SceneState, inserted, opened, placed, poured_out
from robotics.flow3d.objects.shapes import HOLDER_HEIGHT_M, SHAPES, Shape, add_bowl, add_cabinet, add_holder, add_pad
from robotics.scenes.tabletop_tasks import Area, draw_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from robotics.scenes.tabletop import Layout


METRES_PER_RADIAN = 0.25
"""Translation that takes as long as a rotation by one radian."""
POUR_RAD = math.radians(78)
POUR_ABOVE_M = 0.15
"""Height of the rim's lowest point over the table while pouring."""


def along(poses: Sequence[NDArray[np.float64]], frames: int) -> NDArray[np.float64]:
    """(frames, 4, 4) poses through key poses (at least two, both ends included), slow at both ends.

    Straight lines, and rotations about one axis, between key poses.
    """
    from scipy.spatial.transform import Rotation, Slerp

    keys = np.stack(list(poses))
    # a turn takes time as well, or the object would spin in place within one frame
    turns = angle_rad(keys[:-1], keys[1:]) * METRES_PER_RADIAN
    ways = np.linalg.norm(np.diff(keys[:, :3, 3], axis=0), axis=-1)
    times = np.concatenate([[0.0], np.cumsum(np.maximum(ways + turns, 1e-6))])
    # slow at both ends, like a hand that picks up and sets down
    wanted = times[-1] * (1 - np.cos(np.linspace(0, np.pi, frames))) / 2
    positions = np.stack([np.interp(wanted, times, keys[:, axis, 3]) for axis in range(3)], -1)
    rotations = Slerp(times, Rotation.from_matrix(keys[:, :3, :3]))(np.clip(wanted, 0.0, times[-1]))
    return make_pose(rotations.as_matrix(), positions)


def moved(T: NDArray[np.float64], shift_m: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """A pose shifted in world axes."""
    shifted = T.copy()
    shifted[:3, 3] += np.asarray(shift_m)
    return shifted


def over(start: NDArray[np.float64], goal: NDArray[np.float64], height_m: float) -> list[NDArray[np.float64]]:
    """Key poses that lift an object by a height, carry it over its goal (4, 4) and set it down."""
    high = max(float(start[2, 3]), float(goal[2, 3])) + height_m
    above = [moved(T, (0, 0, high - T[2, 3])) for T in (start, goal)]
    return [start, *above, goal]


def poured(
    start: NDArray[np.float64], bowl_m: NDArray[np.float64], radius_m: float, height_m: float
) -> list[NDArray[np.float64]]:
    """Key poses that lift an upright vessel and tilt it sideways, its rim over the centre (3,) of a bowl."""
    side = 1.0 if bowl_m[1] > start[1, 3] else -1.0
    sine, cosine = side * math.sin(POUR_RAD), math.cos(POUR_RAD)
    # Tilting to the left, +y, is a negative rotation about x.
    tilt = np.array([[1.0, 0.0, 0.0], [0.0, cosine, sine], [0.0, -sine, cosine]])
    lip = tilt @ np.array([0.0, side * radius_m, height_m])
    end = make_pose(tilt @ start[:3, :3], np.array([bowl_m[0], bowl_m[1], POUR_ABOVE_M]) - lip)
    next_to_end = make_pose(start[:3, :3], np.array([end[0, 3], end[1, 3] - side * 0.02, end[2, 3]]))
    lifted = moved(start, (0, 0, next_to_end[2, 3] - start[2, 3]))
    return [start, lifted, next_to_end, end]


IDEAL_OPEN_M = 0.1
LIFT_M = 0.1


@dataclass(frozen=True)
class Furniture:
    """Pieces on the table in addition to the moved object."""

    name: str  # key of `SHAPES`
    areas: dict[str, Area]  # where each piece may be placed, the object included unless it is part of a piece
    build: Callable[[Any, Shape], None]  # adds the pieces to an MjSpec
    painted: str  # body that takes the colour of an episode
    movable: tuple[str, ...]  # bodies that a gripper can hold
    apart_m: tuple[float, float] = (0.13, 1.0)  # least and greatest distance between two pieces
    fits: Callable[[Layout], bool] = lambda layout: True  # whether a drawn layout can be used

    def draw(self, split: str, rng: np.random.Generator) -> Layout:
        """x, y, yaw of each piece; raises UserError for an unknown split."""
        while not self.fits(layout := draw_layout(self.areas, self.apart_m, split, rng)):
            pass
        return layout


@dataclass(frozen=True)
class FlowTask:
    """One instruction with its criteria."""

    name: str  # key in `FLOW_TASKS`
    family: str  # place, pour, insert or drawer; results are reported for each
    instruction: str  # language instruction, lower case
    furniture: Furniture
    moved: str  # body to move
    errors: Callable[[SceneState], dict[str, float]]  # by criterion, in units of its tolerance; met below 1
    keys: Callable[[SceneState], list[NDArray[np.float64]]]  # key poses of an ideal motion
    momentary: bool = False  # whether it is solved once the criteria are met at any time, rather than at the end
    shapes: dict[str, Shape] = field(init=False)  # shapes of the object, by name

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", SHAPES[self.furniture.name])

    def outcome(self, state: SceneState) -> CriteriaOutcome:
        """Judge the criteria."""
        return CriteriaOutcome(self.errors(state))

    def ideal_motion(self, state: SceneState, frames: int) -> NDArray[np.float64]:
        """(frames, 4, 4) T_world_object of an ideal motion from a state, both ends included."""
        return along(self.keys(state), frames)

    def shape_names(self, held_out: bool) -> tuple[str, ...]:
        """Shapes of training data, or those held out."""
        return tuple(name for name, shape in self.shapes.items() if shape.held_out == held_out)


def find_flow_task(name: str) -> FlowTask:
    """Row of `FLOW_TASKS` with a name; raises UserError if it does not exist."""
    if name not in FLOW_TASKS:
        raise UserError(f"unknown task {name!r}; available: {', '.join(FLOW_TASKS)}")
    return FLOW_TASKS[name]


def _place_keys(state: SceneState, *, goal: str) -> list[NDArray[np.float64]]:
    shift = state.pieces[goal][:3, 3] - state.T_world_object[:3, 3]
    return over(state.T_world_object, moved(state.T_world_object, (shift[0], shift[1], 0.0)), LIFT_M)


def _pour_keys(state: SceneState) -> list[NDArray[np.float64]]:
    return poured(state.T_world_object, state.pieces["bowl"][:3, 3], state.shape.radius_m, state.shape.height_m)


def _insert_keys(state: SceneState, *, goal: str) -> list[NDArray[np.float64]]:
    # To 1 cm above the floor of the holder, on which the released object drops.
    end = state.pieces[goal][:3, 3] + np.array([0.0, 0.0, 0.012])
    final = moved(state.T_world_object, end - state.T_world_object[:3, 3])
    return over(state.T_world_object, final, HOLDER_HEIGHT_M + 0.03)


def _open_keys(state: SceneState, *, drawer: str) -> list[NDArray[np.float64]]:
    out = state.T_world_object[:3, 0] * (IDEAL_OPEN_M - state.openings_m[drawer])
    return [state.T_world_object, moved(state.T_world_object, out)]


def _build_pads(spec: Any, shape: Shape) -> None:
    add_pad(spec, "red_pad", (0.85, 0.1, 0.1, 1.0))
    add_pad(spec, "green_pad", (0.1, 0.65, 0.2, 1.0))
    add_bowl(spec, "bowl")
    _add_object(spec, shape)


def _build_holders(spec: Any, shape: Shape) -> None:
    add_holder(spec, "blue_holder", (0.15, 0.3, 0.9, 1.0))
    add_holder(spec, "yellow_holder", (0.95, 0.8, 0.1, 1.0))
    _add_object(spec, shape)


def _add_object(spec: Any, shape: Shape) -> None:
    body = spec.worldbody.add_body(name="object")
    body.add_freejoint(name="object")
    shape.build(body)


def _apart_sideways(layout: Layout) -> bool:
    # a vessel is tilted sideways, towards the bowl, so the bowl must not be straight ahead
    return abs(layout["bowl"][1] - layout["object"][1]) > 0.06


WHERE = Area((0.36, 0.6), (-0.23, 0.23))
ANY_TURN = Area(WHERE.x_m, WHERE.y_m, yaw_rad=math.pi)
SOME_TURN = Area(WHERE.x_m, WHERE.y_m, yaw_rad=0.4)

PAD_AREAS = {"object": ANY_TURN, "red_pad": WHERE, "green_pad": WHERE, "bowl": WHERE}
PADS = Furniture("pads", PAD_AREAS, _build_pads, "object", ("object",), fits=_apart_sideways)
HOLDER_AREAS = dict.fromkeys(("object", "blue_holder", "yellow_holder"), SOME_TURN)
HOLDERS = Furniture("holders", HOLDER_AREAS, _build_holders, "object", ("object",))
CABINET_AREAS = {"cabinet": Area((0.34, 0.43), (-0.14, 0.14), yaw_rad=0.35)}
CABINET = Furniture("cabinet", CABINET_AREAS, add_cabinet, "cabinet", ("red_drawer", "blue_drawer"))


def _place(colour: str) -> FlowTask:
    errors, keys = partial(placed, goal=f"{colour}_pad"), partial(_place_keys, goal=f"{colour}_pad")
    return FlowTask(f"place_{colour}", "place", f"place the mug on the {colour} pad", PADS, "object", errors, keys)


def _insert(colour: str) -> FlowTask:
    errors, keys = partial(inserted, goal=f"{colour}_holder"), partial(_insert_keys, goal=f"{colour}_holder")
    instruction = f"put the peg into the {colour} holder"
    return FlowTask(f"insert_{colour}", "insert", instruction, HOLDERS, "object", errors, keys)


def _open(colour: str) -> FlowTask:
    drawer = f"{colour}_drawer"
    errors, keys = partial(opened, drawer=drawer), partial(_open_keys, drawer=drawer)
    return FlowTask(f"open_{colour}", "drawer", f"open the {colour} drawer", CABINET, drawer, errors, keys)


POUR = FlowTask("pour", "pour", "pour the mug into the bowl", PADS, "object", poured_out, _pour_keys, momentary=True)

FLOW_TASKS: dict[str, FlowTask] = {
    task.name: task
    for task in (
        *(_place("red"), _place("green"), POUR),
        *(_insert("blue"), _insert("yellow"), _open("red"), _open("blue")),
    )
}
