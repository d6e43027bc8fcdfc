"""Objects and furniture, built from primitives.

An object's frame has its origin at the centre of its underside and z up; its geoms are grey, and an episode multiplies
them with a colour. Held-out shapes do not occur in training data by default.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

LIGHT, DARK = (1.0, 1.0, 1.0, 1.0), (0.75, 0.75, 0.75, 1.0)
WALL_M = 0.003
"""Half of a wall's thickness."""
PAD_RADIUS_M = 0.055
BOWL_RADIUS_M, BOWL_HEIGHT_M = 0.065, 0.045
HOLDER_INSIDE_M, HOLDER_HEIGHT_M = 0.027, 0.055
DRAWER_WAY_M = 0.13


@dataclass(frozen=True)
class Shape:
    """A shape of the moved object."""

    name: str
    build: Callable[[Any], None]  # adds its geoms to a body of an MjSpec
    radius_m: float  # half of its width, without a handle
    height_m: float
    grip_m: tuple[float, float, float]  # where a hand takes it, in its own frame
    held_out: bool = False  # from training data, by default
    has_front: bool = False  # shows which way it is turned


def add_pad(spec: Any, name: str, rgba: tuple[float, float, float, float]) -> None:
    """A flat disc without contacts."""
    import mujoco

    body = spec.worldbody.add_body(name=name, mocap=True)
    size = [PAD_RADIUS_M, 0.001, 0]
    kind = mujoco.mjtGeom.mjGEOM_CYLINDER
    body.add_geom(name=name, type=kind, size=size, pos=[0, 0, 0.001], rgba=rgba, contype=0, conaffinity=0)


def add_bowl(spec: Any, name: str) -> None:
    """A fixed bowl."""
    body = spec.worldbody.add_body(name=name, mocap=True)
    _tub(body, BOWL_RADIUS_M, BOWL_HEIGHT_M, 14, (0.92, 0.92, 0.88, 1.0), (0.7, 0.72, 0.75, 1.0))


def add_holder(spec: Any, name: str, rgba: tuple[float, float, float, float]) -> None:
    """A fixed square holder, open at the top."""
    body = spec.worldbody.add_body(name=name, mocap=True)
    _tub(body, HOLDER_INSIDE_M + 2 * WALL_M, HOLDER_HEIGHT_M, 4, rgba, rgba)


def add_cabinet(spec: Any, shape: Shape) -> None:
    """A low fixed cabinet; its two drawers, side by side, open along its own x axis.

    The origin of its frame is on the table under the centre of its front.
    """
    import mujoco

    body = spec.worldbody.add_body(name="cabinet", mocap=True)
    half = shape.radius_m
    tall = shape.height_m
    deep = 0.075
    wide = 2 * half + 3 * WALL_M
    _box(body, (deep, wide, WALL_M), (-deep, 0, tall - WALL_M), LIGHT, "cabinet_top")
    _box(body, (WALL_M, wide, tall / 2), (-2 * deep + WALL_M, 0, tall / 2), LIGHT, "cabinet_back")
    for number, y in enumerate((-wide + WALL_M, 0, wide - WALL_M)):
        _box(body, (deep, WALL_M, tall / 2), (-deep, y, tall / 2), LIGHT, f"cabinet_side_{number}")
    for name, side in (("red_drawer", 1), ("blue_drawer", -1)):
        drawer = body.add_body(name=name, pos=[0, side * (half + WALL_M / 2), 0], gravcomp=1)
        drawer.add_joint(
            name=name,
            type=mujoco.mjtJoint.mjJNT_SLIDE,
            axis=[1, 0, 0],
            range=[0, DRAWER_WAY_M],
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            damping=4,
            frictionloss=0.6,
            armature=0.05,
        )
        shape.build(drawer)
        paint = np.array(DRAWER_COLOURS[name])
        for geom in drawer.geoms:
            geom.rgba = geom.rgba * paint


def _container(body: Any, *, radius: float, height: float, sides: int, handle: float = 0.0) -> None:
    import mujoco

    _tub(body, radius, height, sides, LIGHT, DARK)
    if not handle:
        return
    low = 0.25 * height
    high = 0.8 * height
    start = radius - WALL_M
    corners = [(start, low), (start + handle, low), (start + handle, high), (start, high)]
    for (x, z), (x_next, z_next) in itertools.pairwise(corners):
        body.add_geom(
            type=mujoco.mjtGeom.mjGEOM_CAPSULE,
            fromto=[x, 0, z, x_next, 0, z_next],
            size=[0.006, 0, 0],
            rgba=DARK,
            density=DENSITY,
            **TOUCHES,
        )


def _tub(body: Any, radius: float, height: float, sides: int, wall: Any, floor: Any) -> None:
    """Walls around a floor; `radius` is that of the circle inside the outer faces."""
    half = (radius - WALL_M) * math.tan(math.pi / sides) + WALL_M
    for side in range(sides):
        angle = 2 * math.pi * side / sides
        place = ((radius - WALL_M) * math.cos(angle), (radius - WALL_M) * math.sin(angle), height / 2)
        _box(body, (WALL_M, half, height / 2), place, wall, yaw_rad=angle)
    # A round floor would reach through the walls at their middle or leave the corners open.
    inner = radius - 2 * WALL_M
    if sides == 4:
        _box(body, (inner, inner, WALL_M), (0, 0, WALL_M), floor)
    else:
        import mujoco

        kind = mujoco.mjtGeom.mjGEOM_CYLINDER
        size = [inner + WALL_M, WALL_M, 0]
        body.add_geom(type=kind, size=size, pos=[0, 0, WALL_M], rgba=floor, density=DENSITY, **TOUCHES)


def _peg(body: Any, *, half: float, height: float, square: bool, cap: float) -> None:
    """An upright staff, its upper part darker and `cap` wider."""
    import mujoco

    kinds = mujoco.mjtGeom
    low = 0.6 * height
    for bottom, top, wide, rgba in ((0, low, half, LIGHT), (low, height, half + cap, DARK)):
        middle, tall = (bottom + top) / 2, (top - bottom) / 2
        if square:
            _box(body, (wide, wide, tall), (0, 0, middle), rgba)
        else:
            size, place = [wide, tall, 0], [0, 0, middle]
            body.add_geom(type=kinds.mjGEOM_CYLINDER, size=size, pos=place, rgba=rgba, density=DENSITY, **TOUCHES)


def _drawer(body: Any, *, half: float, height: float, knob: bool) -> None:
    """A front with a handle, and a tray behind it without contacts, so that it cannot jam."""
    front = (WALL_M, half - 0.002, height / 2 - 2 * WALL_M)
    _box(body, front, (WALL_M, 0, height / 2 - WALL_M), LIGHT)
    for side in (-1, 1):
        _box(body, (0.066, 0.002, 0.02), (-0.066, side * (half - 0.008), 0.028), DARK, touches=False)
    _box(body, (0.066, half - 0.01, 0.002), (-0.066, 0, 0.01), DARK, touches=False)
    z = GRIP_OF_HANDLE_M[2]
    if knob:
        _box(body, (0.034, 0.006, 0.006), (2 * WALL_M + 0.034, 0, z), DARK)
        _box(body, (0.008, 0.014, 0.014), (GRIP_OF_HANDLE_M[0], 0, z), DARK)
    else:
        for side in (-1, 1):
            _box(body, (0.034, 0.004, 0.006), (2 * WALL_M + 0.034, side * (half - 0.018), z), DARK)
        _box(body, (0.006, half - 0.014, 0.008), (GRIP_OF_HANDLE_M[0], 0, z), DARK)


def _box(
    body: Any, half: Any, place: Any, rgba: Any, name: str | None = None, yaw_rad: float = 0.0, touches: bool = True
) -> None:
    import mujoco

    contacts = TOUCHES if touches else {"contype": 0, "conaffinity": 0}
    named = {"name": name} if name else {}
    quat = [math.cos(yaw_rad / 2), 0, 0, math.sin(yaw_rad / 2)]
    kind = mujoco.mjtGeom.mjGEOM_BOX
    body.add_geom(type=kind, size=half, pos=place, quat=quat, rgba=rgba, density=DENSITY, **contacts, **named)


DENSITY = 400.0
TOUCHES: dict[str, Any] = {"contype": 1, "conaffinity": 3, "friction": [1.0, 0.01, 0.001], "condim": 4}
DRAWER_COLOURS = {"red_drawer": (0.85, 0.12, 0.1, 1.0), "blue_drawer": (0.15, 0.3, 0.9, 1.0)}
GRIP_OF_HANDLE_M = (0.074, 0.0, 0.055)
"""Far enough in front of the drawer for an open finger to fit behind it."""
HALF_DRAWER_M = 0.062


def _mug(name: str, radius: float, height: float, sides: int, handle: float, held_out: bool = False) -> Shape:
    build = partial(_container, radius=radius, height=height, sides=sides, handle=handle)
    return Shape(name, build, radius, height, (0.0, 0.0, 0.6 * height), held_out, has_front=handle > 0)


def _staff(name: str, half: float, height: float, square: bool, cap: float = 0.0, held_out: bool = False) -> Shape:
    build = partial(_peg, half=half, height=height, square=square, cap=cap)
    return Shape(name, build, half + cap, height, (0.0, 0.0, 0.88 * height), held_out)


def _front(name: str, height: float, knob: bool, held_out: bool = False) -> Shape:
    build = partial(_drawer, half=HALF_DRAWER_M, height=height, knob=knob)
    return Shape(name, build, HALF_DRAWER_M, height, GRIP_OF_HANDLE_M, held_out, has_front=True)


SHAPES: dict[str, dict[str, Shape]] = {
    kind: {shape.name: shape for shape in shapes}
    for kind, shapes in {
        "pads": (
            _mug("mug", 0.035, 0.08, 12, 0.03),
            _mug("tumbler", 0.032, 0.095, 10, 0.0),
            _mug("jug", 0.036, 0.11, 14, 0.04, held_out=True),
            _mug("square_cup", 0.031, 0.075, 4, 0.0, held_out=True),
        ),
        "holders": (
            _staff("peg", 0.013, 0.12, square=False),
            _staff("candle", 0.011, 0.13, square=False, cap=0.004),
            _staff("square_peg", 0.012, 0.115, square=True, held_out=True),
            _staff("hammer", 0.01, 0.125, square=True, cap=0.006, held_out=True),
        ),
        "cabinet": (
            _front("bar_handle", 0.09, knob=False),
            _front("knob", 0.09, knob=True, held_out=True),
        ),
    }.items()
}
