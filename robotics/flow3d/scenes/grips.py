"""Grips of scripted demonstrations, and which of them an arm can follow."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import inverse_pose, make_pose
from robotics.flow3d.scenes.motions import along, moved

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from robotics.flow3d.act.ik import ArmIk
    from robotics.flow3d.scenes.criteria import SceneState

BACK_M = 0.08
"""Distance from which a grip is approached, along the fingers."""
HANDLE_RAD = math.radians(35)
"""Least angle between a vessel's handle and the line on which the fingers close."""


def scripted_grips(state: SceneState, family: str) -> Iterator[NDArray[np.float64]]:
    """T_object_grip (4, 4) of grips, the most natural first."""
    T = state.T_world_object
    place = (T @ np.array([*state.shape.grip_m, 1.0]))[:3]
    for rotation in _orientations(state, family):
        yield inverse_pose(T) @ make_pose(rotation, place)


def reach_out(start: NDArray[np.float64], grip: NDArray[np.float64], frames: int) -> NDArray[np.float64]:
    """(frames, 4, 4) poses of a hand from a start to 8 cm behind a grip and from there almost to it."""
    return along([start, moved(grip, -BACK_M * grip[:3, 2]), grip], frames + 1)[:-1]


def arm_path(
    ik: ArmIk, T_object_grip: NDArray[np.float64], T_world_object: NDArray[np.float64], approach: int
) -> NDArray[np.float64] | None:
    """Angles of an arm that goes from home to a grip and then moves the object by (L, 4, 4); None if out of reach.

    The approach poses are followed too: from a distant start the search may end with an elbow in the table.
    """
    grips = T_world_object @ T_object_grip
    way = reach_out(ik.pose(ik.home_rad), grips[0], approach)
    found = ik.follow(np.concatenate([way, grips]), ik.home_rad)
    return found.joint_rad if found.complete else None


def _orientations(state: SceneState, family: str) -> Iterator[NDArray[np.float64]]:
    T = state.T_world_object
    if family == "drawer":
        # A bar lies across the drawer, a knob sticks out along it: the fingers close on its thin side.
        thin = 1 if state.shape.name == "knob" else 0
        for sign in (1.0, -1.0):
            yield _frame(np.array([0.0, 0.0, -1.0]), sign * T[:3, thin])
        return
    # A vessel that is tilted sideways is gripped from the robot's side, so that the hand rolls and does not dive.
    slopes = (30, 50, 15, 70, 90) if family == "pour" else (90, 65, 40)
    headings = (0, 30, -30, 50, -50) if family == "pour" else (0, 30, -30, 60, -60, 90, -90)
    handle = math.atan2(T[1, 0], T[0, 0]) if state.shape.has_front else None
    for slope in np.radians(slopes):
        for heading in np.radians(headings):
            along = np.array([math.cos(heading), math.sin(heading), 0.0])
            close = np.array([-along[1], along[0], 0.0])
            between = abs(math.sin(heading + math.pi / 2 - handle)) if handle is not None else 1.0
            behind = handle is not None and slope < 1.5 and math.cos(heading - handle) < -math.cos(HANDLE_RAD)
            if between > math.sin(HANDLE_RAD) and not behind:
                fingers = math.cos(slope) * along - math.sin(slope) * np.array([0.0, 0.0, 1.0])
                yield from (_frame(fingers, sign * close) for sign in (1.0, -1.0))


def _frame(fingers: NDArray[np.float64], close: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation with z along the fingers and y along the line on which they close."""
    return np.stack([np.cross(close, fingers), close, fingers], -1)
