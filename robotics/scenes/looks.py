"""Looks of the tabletop: lights, materials and the camera `film` for videos, and patterns on its surfaces.

Policies see only the patterns, a part of the domain randomisation. The rest belongs to a second model of the same
scene, which is only drawn (`robotics.scenes.presentation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.scenes.arms import ASSETS

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray


FILM = ASSETS / "film.xml"
CAMERA = "film"
"""Camera in front and to the side, from where the arm hides little and heights can be judged."""
RING = "outcome_ring"
"""Body and geom of the ring around the goal; invisible until an episode has ended."""
RING_RADIUS_M = 0.078
LIGHTS = ("film_key", "film_fill")
"""Lights of `FILM`, the only ones in videos."""


def dress(spec: Any) -> None:
    """Give the tabletop, in a spec that includes `FILM`, its look for videos."""
    import mujoco

    light_sky(spec)
    floor = spec.geom("floor")
    floor.material = "film_floor"
    floor.pos = [0.0, 0.0, -0.72]
    floor.size = [0.0, 0.0, 0.1]
    spec.geom("table").material = "film_table"
    for x, y in ((-0.07, -0.45), (-0.07, 0.45), (0.83, -0.45), (0.83, 0.45)):
        leg: dict[str, Any] = {"pos": [x, y, -0.38], "size": [0.025, 0.025, 0.34], "contype": 0, "conaffinity": 0}
        spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_BOX, material="film_legs", **leg)
    spec.worldbody.add_camera(name=CAMERA, pos=CAMERA_POS, xyaxes=_look_at(CAMERA_POS, CAMERA_TARGET), fovy=CAMERA_FOVY)


def light_sky(spec: Any) -> None:
    """Make the sky a bright gradient."""
    import mujoco

    for sky in (texture for texture in spec.textures if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX):
        sky.builtin = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
        sky.rgb1 = [0.62, 0.67, 0.73]
        sky.rgb2 = [0.80, 0.84, 0.88]


def light_up(spec: Any) -> None:
    """Give any scene in a spec that includes `FILM` its lights and materials, and a ring for the outcome."""
    import mujoco

    for light in list(spec.lights):
        if light.name not in LIGHTS:
            spec.delete(light)
    for geom in spec.geoms:
        if not geom.material:  # arm files often define colours alone
            geom.material = "film_matt" if max(geom.rgba[:3]) < 0.2 else "film_paint"
    ring, size = spec.worldbody.add_body(name=RING, mocap=True), [RING_RADIUS_M, 0.0006, 0.0]
    hidden: dict[str, Any] = {"rgba": [0.0] * 4, "contype": 0, "conaffinity": 0}
    ring.add_geom(name=RING, type=mujoco.mjtGeom.mjGEOM_CYLINDER, size=size, material="outcome", **hidden)


def add_camera(spec: Any, center: NDArray[np.float64], extent: float) -> None:
    """Add the camera `film` to a scene of somebody else's, in front and to the side of its centre."""
    place = center + 2.2 * extent * (CAMERA_POS - CAMERA_TARGET) / np.linalg.norm(CAMERA_POS - CAMERA_TARGET)
    spec.worldbody.add_camera(name=CAMERA, pos=place, xyaxes=_look_at(place, center), fovy=CAMERA_FOVY)


def _look_at(position: NDArray[np.float64], target: NDArray[np.float64]) -> list[float]:
    back = (position - target) / np.linalg.norm(position - target)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    return [*right, *np.cross(back, right)]


CAMERA_POS = np.array([1.45, -0.88, 0.88])
CAMERA_TARGET = np.array([0.33, 0.0, 0.23])
CAMERA_FOVY = 38.0


SURFACES = ("table", "floor")
"""Materials of `tabletop.xml`."""
SIDE_PX = 64


def add_blank_textures(spec: Any, surfaces: Sequence[str]) -> None:
    """Give each surface's material a white texture, which does not change its colour."""
    import mujoco

    kind = mujoco.mjtTexture.mjTEXTURE_2D
    for name in surfaces:
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
    # stretched to the whole range, so that every pattern has the contrast that was drawn
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
