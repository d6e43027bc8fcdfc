"""Looks of the tabletop: lights, materials and the camera `film` of videos, and patterns on its surfaces.

Policies see only the patterns, a part of the domain randomisation. The rest belongs to a second model of the same
scene, which is only drawn (`robotics.scenes.presentation`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray


CAMERA = "film"
"""Camera at the side and in front, where the arm hides little and heights can be judged."""
RING = "outcome_ring"
"""Body and geom of the ring around the goal; invisible until an episode has ended."""
RING_RADIUS_M = 0.078


def dress(spec: Any) -> None:
    """Give a scene its look for videos."""
    import mujoco

    visual = spec.visual
    visual.headlight.ambient, visual.headlight.diffuse, visual.headlight.specular = [0.38] * 3, [0.12] * 3, [0.0] * 3
    visual.quality.shadowsize, visual.quality.offsamples = 1024, 4
    visual.map.shadowclip, visual.map.haze = 0.6, 0.6
    _replace_lights(spec)
    _add_materials(spec)
    _dress_room(spec)
    for geom in spec.geoms:
        if not geom.material:  # the arm files only define colours
            geom.material = "film_matt" if max(geom.rgba[:3]) < 0.2 else "film_paint"
    spec.worldbody.add_camera(name=CAMERA, pos=CAMERA_POS, xyaxes=_look_at(CAMERA_POS, CAMERA_TARGET), fovy=CAMERA_FOVY)
    ring, size = spec.worldbody.add_body(name=RING, mocap=True), [RING_RADIUS_M, 0.0006, 0.0]
    hidden: dict[str, Any] = {"rgba": [0.0] * 4, "contype": 0, "conaffinity": 0}
    ring.add_geom(name=RING, type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, material="outcome", **hidden)


def _replace_lights(spec: Any) -> None:
    import mujoco

    for light in list(spec.lights):
        spec.delete(light)
    sun = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    spec.worldbody.add_light(
        name="key",
        type=sun,
        pos=[0.9, -0.9, 2.1],
        dir=[-0.35, 0.55, -1.2],
        diffuse=[0.5, 0.49, 0.46],
        specular=[0.3] * 3,
        castshadow=True,
    )
    spec.worldbody.add_light(
        name="fill",
        type=sun,
        pos=[0, 2, 2],
        dir=[-0.2, -1.0, -0.9],
        diffuse=[0.17, 0.19, 0.23],
        specular=[0.0] * 3,
        castshadow=False,
    )


def _add_materials(spec: Any) -> None:
    import mujoco

    spec.add_texture(
        name="tiles",
        type=mujoco.mjtTexture.mjTEXTURE_2D,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT,
        mark=mujoco.mjtMark.mjMARK_EDGE,
        rgb1=[0.5, 0.53, 0.56],
        markrgb=[0.42, 0.45, 0.48],
        width=256,
        height=256,
    )
    for name, values in MATERIALS.items():
        spec.add_material(name=name, **values)
    floor = spec.material("film_floor")
    textures = list(floor.textures)
    textures[int(mujoco.mjtTextureRole.mjTEXROLE_RGB)] = "tiles"
    floor.textures = textures


def _dress_room(spec: Any) -> None:
    """A table with legs on a tiled floor, under a plain bright wall."""
    import mujoco

    sky = spec.texture("sky")
    sky.builtin = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    sky.rgb1, sky.rgb2 = [0.62, 0.67, 0.73], WALL
    spec.visual.rgba.haze = [*WALL, 1.0]
    spec.geom("floor").material, spec.geom("floor").pos = "film_floor", [0.0, 0.0, -0.72]
    spec.geom("floor").size = [0.0, 0.0, 0.1]
    table = spec.geom("table")
    table.material = "film_table"
    x, y, z = table.pos
    for side_x in (-1, 1):
        for side_y in (-1, 1):
            spec.worldbody.add_geom(
                type=mujoco.mjtGeom.mjGEOM_BOX,
                size=[0.025, 0.025, 0.34],
                pos=[x + 0.45 * side_x, y + 0.45 * side_y, z - 0.36],
                material="film_legs",
                contype=0,
                conaffinity=0,
            )


def _look_at(position: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    back = (position - target) / np.linalg.norm(position - target)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    return [*right, *np.cross(back, right)]


CAMERA_POS = np.array([1.45, -0.88, 0.88])
CAMERA_TARGET = np.array([0.33, 0.0, 0.23])
CAMERA_FOVY = 38.0
WALL = [0.80, 0.84, 0.88]

MATERIALS: dict[str, dict[str, Any]] = {
    "film_table": {"rgba": [0.80, 0.75, 0.67, 1.0], "specular": 0.1, "shininess": 0.2},
    "film_floor": {"texrepeat": [2, 2], "texuniform": True, "specular": 0.0},
    "film_legs": {"rgba": [0.3, 0.31, 0.33, 1.0], "specular": 0.2},
    "film_paint": {"rgba": [1.0, 1.0, 1.0, 1.0], "specular": 0.35, "shininess": 0.6},
    "film_matt": {"rgba": [1.0, 1.0, 1.0, 1.0], "specular": 0.1, "shininess": 0.2},
    "outcome": {"rgba": [1.0, 1.0, 1.0, 1.0], "emission": 0.6, "specular": 0.0},
}


SURFACES = ("table", "floor")
"""Materials of `tabletop.xml`."""
SIDE_PX = 64


def add_blank_textures(spec: Any) -> None:
    """Give the materials of the surfaces a white texture each, which leaves their colours as they are."""
    import mujoco

    kind = mujoco.mjtTexture.mjTEXTURE_2D
    for name in SURFACES:
        texture = spec.add_texture(name=_texture(name), type=kind, width=SIDE_PX, height=SIDE_PX, nchannel=3)
        texture.data = np.full((SIDE_PX, SIDE_PX, 3), 255, np.uint8).tobytes()
        spec.material(name).textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = _texture(name)


def write_texture(model: mujoco.MjModel, surface: str, shade: NDArray[np.float64]) -> None:
    """Write a pattern, factors (64, 64) of the surface's colour in 0..1, into a model with blank textures."""
    start = int(model.tex_adr[int(model.texture(_texture(surface)).id)])
    pixels = np.repeat(np.rint(255 * shade).astype(np.uint8).reshape(-1), 3)
    model.tex_data[start : start + pixels.size] = pixels


def draw_pattern(kind: str, contrast: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """(64, 64) factors of a colour, from 1 - contrast to 1."""
    pattern = PATTERNS_OF[kind](rng)
    low, high = pattern.min(), pattern.max()
    return 1.0 - contrast * (pattern - low) / max(high - low, 1e-9)


def _checker(rng: np.random.Generator) -> NDArray[np.float64]:
    cells = int(rng.integers(2, 9))
    cell = np.arange(SIDE_PX) * cells // SIDE_PX
    return ((cell[:, None] + cell) % 2).astype(np.float64)


def _stripes(rng: np.random.Generator) -> NDArray[np.float64]:
    return (np.sin(2 * np.pi * rng.integers(2, 9) * _along(rng)) > 0).astype(np.float64)


def _noise(rng: np.random.Generator) -> NDArray[np.float64]:
    """Blocks of 4 x 4 pixels; single pixels would blur into grey."""
    return rng.random((SIDE_PX // 4, SIDE_PX // 4)).repeat(4, axis=0).repeat(4, axis=1)


def _along(rng: np.random.Generator) -> NDArray[np.float64]:
    """(64, 64) distance along a random direction; a side is 1 long."""
    angle = rng.uniform(0.0, 2 * np.pi)
    side = np.linspace(0.0, 1.0, SIDE_PX, endpoint=False)
    ramp: NDArray[np.float64] = np.cos(angle) * side[:, None] + np.sin(angle) * side
    return ramp


def _texture(surface: str) -> str:
    return f"{surface}_pattern"


PATTERNS_OF: dict[str, Callable[[np.random.Generator], NDArray[np.float64]]] = {
    "checker": _checker,
    "stripes": _stripes,
    "gradient": _along,
    "noise": _noise,
}
