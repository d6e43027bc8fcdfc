"""Tasks at the table: what is said, what is moved, when it is done, and how it would ideally be done.

Objects lie on fields of a checkerboard, those of train layouts on one colour and those of held-out layouts on the
other, as in the robotics room's other tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.scenes.motions import along, moved, over, poured
from robotics.flow3d.scenes.shapes import (
    HOLDER_HEIGHT_M,
    HOLDER_INSIDE_M,
    SHAPES,
    Shape,
    add_bowl,
    add_cabinet,
    add_holder,
    add_pad,
)
from robotics.sim.tasks import Area, draw_layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.tabletop import Layout

__all__ = ["FLOW_TASKS", "FlowTask", "Furniture", "Outcome", "SceneState", "find_flow_task"]

CENTRE_M = 0.03
"""Greatest distance between the middles of object and pad."""
UPRIGHT_RAD = math.radians(15)
LEVEL_M = 0.01
"""Greatest distance of the object's underside from the table, once it is put down."""
POUR_RAD = math.radians(60)
"""Least tilt of a vessel that pours."""
LIP_M = 0.045
"""Greatest distance of the rim's lowest point from the bowl's axis."""
LIP_HEIGHT_M = 0.05
"""Least height of that point over the table."""
INSERTED_RAD = math.radians(25)
OPEN_M, OTHER_CLOSED_M = 0.07, 0.02
"""Least way of the drawer that is to be opened, and greatest way of the other one."""
IDEAL_OPEN_M = 0.1
LIFT_M = 0.1


@dataclass(frozen=True)
class SceneState:
    """What a criterion looks at; poses are those of frames in the world frame."""

    T_world_object: NDArray[np.float64]
    """(4, 4) the moved thing: its underside's middle, or the drawer's front."""
    T_world_start: NDArray[np.float64]
    """(4, 4) where that was at the start of the episode."""
    pieces: Mapping[str, NDArray[np.float64]]
    """(4, 4) of each piece of furniture."""
    openings_m: Mapping[str, float]
    """Way that each drawer is open."""
    shape: Shape
    """Size of the moved thing."""
    released: bool = True
    """Whether no gripper holds it."""


@dataclass(frozen=True)
class Outcome:
    """Which criteria of a task are met."""

    criteria: Mapping[str, bool]
    """By name."""

    @property
    def success(self) -> bool:
        """Whether all are."""
        return all(self.criteria.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of those that are not."""
        return tuple(name for name, met in self.criteria.items() if not met)


@dataclass(frozen=True)
class Furniture:
    """What stands on the table beside the moved thing."""

    name: str
    """Key in `FURNITURE`; also which shapes belong to it."""
    areas: dict[str, Area]
    """Where each piece may stand, the moved thing included unless it is part of a piece."""
    build: Callable[[Any, Shape], None]
    """Adds the pieces to an MjSpec."""
    painted: str
    """Body that takes the colour of an episode."""
    movable: tuple[str, ...]
    """Bodies that a gripper can hold."""
    apart_m: tuple[float, float] = (0.13, 1.0)
    """Least and greatest distance between two pieces."""
    fits: Callable[[Layout], bool] = lambda layout: True
    """Whether a drawn layout can be used."""

    def draw(self, split: str, rng: np.random.Generator) -> Layout:
        """x, y, yaw of each piece; raises UserError for an unknown split."""
        while not self.fits(layout := draw_layout(self, split, rng)):
            pass
        return layout


@dataclass(frozen=True)
class FlowTask:
    """One instruction with its criteria."""

    name: str
    """Key in `FLOW_TASKS`."""
    family: str
    """place, pour, insert or drawer; results are reported for each."""
    instruction: str
    """Language instruction, lower case."""
    furniture: Furniture
    """What stands on the table."""
    moved: str
    """Body that is to be moved."""
    criteria: Callable[[SceneState], dict[str, bool]]
    """Names of all criteria, and whether each is met."""
    keys: Callable[[SceneState], list[NDArray[np.float64]]]
    """Key poses of an ideal motion."""
    momentary: bool = False
    """Whether it is done once the criteria are met at any moment, rather than at the end."""
    shapes: dict[str, Shape] = field(init=False)
    """Shapes of the moved thing, by name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", SHAPES[self.furniture.name])

    def outcome(self, state: SceneState) -> Outcome:
        """Which criteria are met."""
        return Outcome(self.criteria(state))

    def ideal_motion(self, state: SceneState, frames: int) -> NDArray[np.float64]:
        """Poses of the moved thing on an ideal way from where it is.

        Args:
            state: at the start.
            frames: how many, the first and the last pose included.

        Returns:
            (frames, 4, 4) T_world_object.
        """
        return along(self.keys(state), frames)

    def shape_names(self, held_out: bool) -> tuple[str, ...]:
        """Shapes that training data may show, or those kept out of them."""
        return tuple(name for name, shape in self.shapes.items() if shape.held_out == held_out)


def find_flow_task(name: str) -> FlowTask:
    """Row of `FLOW_TASKS` with a name; raises UserError where there is none."""
    if name not in FLOW_TASKS:
        raise UserError(f"task is {name!r}; there are {', '.join(FLOW_TASKS)}")
    return FLOW_TASKS[name]


def _tilt_rad(T: NDArray[np.float64]) -> float:
    return math.acos(min(1.0, max(-1.0, float(T[2, 2]))))


def _flat_m(T: NDArray[np.float64], place: NDArray[np.float64]) -> float:
    return float(np.hypot(*(T[:2, 3] - place[:2, 3])))


def _placed(state: SceneState, *, goal: str) -> dict[str, bool]:
    T = state.T_world_object
    return {
        "on the pad": _flat_m(T, state.pieces[goal]) < CENTRE_M,
        "upright": _tilt_rad(T) < UPRIGHT_RAD,
        "on the table": abs(float(T[2, 3])) < LEVEL_M,
        "released": state.released,
    }


def _place_keys(state: SceneState, *, goal: str) -> list[NDArray[np.float64]]:
    way = state.pieces[goal][:3, 3] - state.T_world_object[:3, 3]
    return over(state.T_world_object, moved(state.T_world_object, (way[0], way[1], 0.0)), LIFT_M)


def _poured(state: SceneState) -> dict[str, bool]:
    lip = _lowest_rim_m(state)
    away = float(np.hypot(*(lip[:2] - state.pieces["bowl"][:2, 3])))
    return {
        "tilted": _tilt_rad(state.T_world_object) > POUR_RAD,
        "over the bowl": away < LIP_M,
        "high enough": float(lip[2]) > LIP_HEIGHT_M,
    }


def _lowest_rim_m(state: SceneState) -> NDArray[np.float64]:
    """The rim's lowest point: along the steepest way down in the plane of the rim."""
    T, shape = state.T_world_object, state.shape
    down = np.array([-T[2, 0], -T[2, 1], 0.0])
    size = float(np.linalg.norm(down))
    local = np.array([0.0, 0.0, shape.height_m]) + (shape.radius_m * down / size if size > 1e-9 else 0.0)
    return T[:3, :3] @ local + T[:3, 3]


def _pour_keys(state: SceneState) -> list[NDArray[np.float64]]:
    return poured(state.T_world_object, state.pieces["bowl"][:3, 3], state.shape.radius_m, state.shape.height_m)


def _inserted(state: SceneState, *, goal: str) -> dict[str, bool]:
    T, holder = state.T_world_object, state.pieces[goal]
    from_holder = holder[:3, :3].T @ (T[:3, 3] - holder[:3, 3])
    return {
        "in the holder": bool(np.abs(from_holder[:2]).max() < HOLDER_INSIDE_M),
        "all the way down": -0.01 < float(from_holder[2]) < HOLDER_HEIGHT_M / 2,
        "upright": _tilt_rad(T) < INSERTED_RAD,
        "released": state.released,
    }


def _insert_keys(state: SceneState, *, goal: str) -> list[NDArray[np.float64]]:
    # To 1 cm above the floor of the holder, on which the released object drops.
    end = state.pieces[goal][:3, 3] + np.array([0.0, 0.0, 0.012])
    final = moved(state.T_world_object, end - state.T_world_object[:3, 3])
    return over(state.T_world_object, final, HOLDER_HEIGHT_M + 0.03)


def _opened(state: SceneState, *, drawer: str) -> dict[str, bool]:
    others = [way for name, way in state.openings_m.items() if name != drawer]
    return {
        "open": state.openings_m[drawer] > OPEN_M,
        "the other one closed": max(others) < OTHER_CLOSED_M,
    }


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
    return abs(layout["bowl"][1] - layout["object"][1]) > 0.06


WHERE = Area((0.36, 0.6), (-0.23, 0.23))
ANY_TURN = Area(WHERE.x_m, WHERE.y_m, yaw_rad=math.pi)
SOME_TURN = Area(WHERE.x_m, WHERE.y_m, yaw_rad=0.4)

PADS = Furniture(
    name="pads",
    areas={"object": ANY_TURN, "red_pad": WHERE, "green_pad": WHERE, "bowl": WHERE},
    build=_build_pads,
    painted="object",
    movable=("object",),
    fits=_apart_sideways,
)
HOLDERS = Furniture(
    name="holders",
    areas={"object": SOME_TURN, "blue_holder": SOME_TURN, "yellow_holder": SOME_TURN},
    build=_build_holders,
    painted="object",
    movable=("object",),
)
CABINET = Furniture(
    name="cabinet",
    areas={"cabinet": Area((0.34, 0.43), (-0.14, 0.14), yaw_rad=0.35)},
    build=add_cabinet,
    painted="cabinet",
    movable=("red_drawer", "blue_drawer"),
)

FLOW_TASKS: dict[str, FlowTask] = {
    task.name: task
    for task in (
        *(
            FlowTask(
                name=f"place_{colour}",
                family="place",
                instruction=f"place the mug on the {colour} pad",
                furniture=PADS,
                moved="object",
                criteria=partial(_placed, goal=f"{colour}_pad"),
                keys=partial(_place_keys, goal=f"{colour}_pad"),
            )
            for colour in ("red", "green")
        ),
        FlowTask(
            name="pour",
            family="pour",
            instruction="pour the mug into the bowl",
            furniture=PADS,
            moved="object",
            criteria=_poured,
            keys=_pour_keys,
            momentary=True,
        ),
        *(
            FlowTask(
                name=f"insert_{colour}",
                family="insert",
                instruction=f"put the peg into the {colour} holder",
                furniture=HOLDERS,
                moved="object",
                criteria=partial(_inserted, goal=f"{colour}_holder"),
                keys=partial(_insert_keys, goal=f"{colour}_holder"),
            )
            for colour in ("blue", "yellow")
        ),
        *(
            FlowTask(
                name=f"open_{colour}",
                family="drawer",
                instruction=f"open the {colour} drawer",
                furniture=CABINET,
                moved=f"{colour}_drawer",
                criteria=partial(_opened, drawer=f"{colour}_drawer"),
                keys=partial(_open_keys, drawer=f"{colour}_drawer"),
            )
            for colour in ("red", "blue")
        ),
    )
}
