"""Colours of objects, table tops, floors and light, drawn for each episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray

OBJECT_RGB = {
    "train": ((0.93, 0.93, 0.9), (0.3, 0.5, 0.85), (0.92, 0.8, 0.25), (0.5, 0.52, 0.56), (0.35, 0.25, 0.2)),
    "held_out": ((0.6, 0.25, 0.7), (0.95, 0.55, 0.15), (0.2, 0.65, 0.7)),
}
FLOOR_RGB = {
    "train": ((0.45, 0.5, 0.55), (0.3, 0.3, 0.33), (0.6, 0.58, 0.55)),
    "held_out": ((0.7, 0.75, 0.6), (0.42, 0.16, 0.44)),
}
JITTER = 0.04
"""Largest change of a colour in an episode."""
LIGHT = (0.75, 1.15)
"""Least and greatest factor of the lamp's light."""


@dataclass(frozen=True)
class Look:
    """Colours of an episode."""

    object_rgb: tuple[float, float, float]  # of the object, or of the cabinet
    table: int  # index of the table top among those of its split
    floor_rgb: tuple[float, float, float]
    light: float  # factor of the lamp's light


class Painter:
    """Changes the looks of a model."""

    def __init__(self, model: mujoco.MjModel, painted: tuple[str, ...]) -> None:
        self._model = model
        bodies = [int(model.body(name).id) for name in painted]
        self._geoms = np.flatnonzero(np.isin(model.geom_bodyid, bodies))
        self._grey = model.geom_rgba[self._geoms, :3].copy()
        self._lamp = model.light_diffuse.copy()
        names = [model.material(number).name for number in range(model.nmat)]
        self._tops = {
            split: [index for index, name in enumerate(names) if name.startswith("top_") and name.endswith(split)]
            for split in ("train", "held_out")
        }

    def paint(self, look: Look, background: str) -> None:
        """Give the model a look; its renderers have to be refreshed."""
        model, tops = self._model, self._tops[background]
        model.geom_rgba[self._geoms, :3] = self._grey * look.object_rgb
        model.geom_matid[int(model.geom("table").id)] = tops[look.table % len(tops)]
        model.mat_rgba[int(model.material("floor").id), :3] = look.floor_rgb
        model.light_diffuse[:] = self._lamp * look.light


def draw_look(rng: np.random.Generator, objects: str, background: str) -> Look:
    """Draw colours and light."""
    thing = _jittered(OBJECT_RGB[objects], rng)
    table = int(rng.integers(1 << 16))
    floor = _jittered(FLOOR_RGB[background], rng)
    return Look(thing, table, floor, float(rng.uniform(*LIGHT)))


def _jittered(palette: tuple[tuple[float, ...], ...], rng: np.random.Generator) -> tuple[float, float, float]:
    base = np.array(palette[int(rng.integers(len(palette)))])
    red, green, blue = np.clip(base + rng.uniform(-JITTER, JITTER, 3), 0.0, 1.0).tolist()
    return red, green, blue


def depth_holes(shape: tuple[int, ...], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """(H, W) holes of a depth image: squares of 2 to 8 pixels that cover a fraction of it."""
    holes = np.zeros(shape, dtype=np.bool_)
    while holes.mean() < share:
        side, row, column = int(rng.integers(2, 9)), int(rng.integers(shape[0])), int(rng.integers(shape[1]))
        holes[row : row + side, column : column + side] = True
    return holes
