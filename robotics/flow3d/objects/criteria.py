"""Success criteria of a tabletop task, each as an error in units of its tolerance, met below 1.

The error of an upper limit L on x is x / L, of a lower limit 2 - x / L, of an interval the distance to its middle over
half its length, of a boolean 0 or infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.objects.shapes import HOLDER_HEIGHT_M, HOLDER_INSIDE_M, Shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

CENTRE_M = 0.03
"""Maximum distance between the centres of object and pad."""
UPRIGHT_RAD = math.radians(15)
LEVEL_M = 0.01
"""Maximum distance of the object's underside from the table, once it is put down."""
POUR_RAD = math.radians(60)
"""Minimum tilt of a vessel that pours."""
LIP_M = 0.045
"""Maximum distance of the rim's lowest point from the bowl's axis."""
LIP_HEIGHT_M = 0.05
"""Minimum height of the rim's lowest point over the table."""
INSERTED_RAD = math.radians(25)
INSERTED_M = (-0.01, HOLDER_HEIGHT_M / 2)
"""Heights of the object's underside over that of its holder, once it is in."""
OPEN_M, OTHER_CLOSED_M = 0.07, 0.02
"""Minimum opening of the drawer in question, and maximum opening of the other one."""


@dataclass(frozen=True)
class SceneState:
    """Input of the criteria; poses are (4, 4) in the world frame."""

    T_world_object: NDArray[np.float64]  # the moved object: its underside's centre, or the drawer's front
    T_world_start: NDArray[np.float64]  # the object at the start of the episode
    pieces: Mapping[str, NDArray[np.float64]]  # each piece of furniture
    openings_m: Mapping[str, float]  # how far each drawer is open
    shape: Shape  # size of the object
    released: bool = True  # whether no gripper holds it


@dataclass(frozen=True)
class CriteriaOutcome:
    """Errors of a task's criteria."""

    errors: Mapping[str, float]  # by criterion, in units of its tolerance; below 1 it is met

    @property
    def criteria(self) -> dict[str, bool]:
        """Whether each criterion is met, by name."""
        return {name: error < 1 for name, error in self.errors.items()}

    @property
    def success(self) -> bool:
        """Whether all criteria are met."""
        return all(self.criteria.values())

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the criteria that are not met."""
        return tuple(name for name, met in self.criteria.items() if not met)


def placed(state: SceneState, *, goal: str) -> dict[str, float]:
    """Errors of an object to be placed on a pad."""
    T = state.T_world_object
    return {
        "on the pad": float(np.hypot(*(T[:2, 3] - state.pieces[goal][:2, 3]))) / CENTRE_M,
        "upright": _tilt_rad(T) / UPRIGHT_RAD,
        "on the table": abs(float(T[2, 3])) / LEVEL_M,
        "released": _unless(state.released),
    }


def poured_out(state: SceneState) -> dict[str, float]:
    """Errors of a vessel that should be poured into the bowl."""
    lip = _lowest_rim_m(state)
    away = float(np.hypot(*(lip[:2] - state.pieces["bowl"][:2, 3])))
    return {
        "tilted": 2 - _tilt_rad(state.T_world_object) / POUR_RAD,
        "over the bowl": away / LIP_M,
        "high enough": 2 - float(lip[2]) / LIP_HEIGHT_M,
    }


def inserted(state: SceneState, *, goal: str) -> dict[str, float]:
    """Errors of an object that should be in a holder."""
    T, holder = state.T_world_object, state.pieces[goal]
    from_holder = holder[:3, :3].T @ (T[:3, 3] - holder[:3, 3])
    low, high = INSERTED_M
    return {
        "in the holder": float(np.abs(from_holder[:2]).max()) / HOLDER_INSIDE_M,
        "all the way down": abs(float(from_holder[2]) - (low + high) / 2) / ((high - low) / 2),
        "upright": _tilt_rad(T) / INSERTED_RAD,
        "released": _unless(state.released),
    }


def opened(state: SceneState, *, drawer: str) -> dict[str, float]:
    """Errors of a drawer that should be open while the others stay closed."""
    others = [way for name, way in state.openings_m.items() if name != drawer]
    return {
        "open": 2 - state.openings_m[drawer] / OPEN_M,
        "the other one closed": max(others) / OTHER_CLOSED_M,
    }


def _unless(met: bool) -> float:
    return 0.0 if met else math.inf


def _tilt_rad(T: NDArray[np.float64]) -> float:
    # rounding may leave the cosine just outside of -1..1
    return math.acos(min(1.0, max(-1.0, float(T[2, 2]))))


def _lowest_rim_m(state: SceneState) -> NDArray[np.float64]:
    """(3,) lowest point of the rim: along the steepest descent in the plane of the rim."""
    T, shape = state.T_world_object, state.shape
    # the direction of gravity in the plane of the rim, in the object's frame
    down = np.array([-T[2, 0], -T[2, 1], 0.0])
    size = float(np.linalg.norm(down))
    local = np.array([0.0, 0.0, shape.height_m]) + (shape.radius_m * down / size if size > 1e-9 else 0.0)
    return T[:3, :3] @ local + T[:3, 3]
