"""Finds coloured shapes in an image with rules instead of a learned model.

Saturated pixels are assigned to the nearest of the four hues; connected pixels of one hue form an object, and the way
it fills its box determines its shape. Texture is ignored, since an object has to be one clean connected area.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffusion.toy.shapes.captions import COLOURS

UNKNOWN = "unknown"
"""Shape of an object that is large enough to count but matches no known shape."""
MIN_SATURATION = 60
"""Minimum difference between the largest and the smallest colour channel, 0..255."""
MIN_AREA_SHARE = 20 / 32**2
"""Minimum area of an object as a fraction of the image's; 20 pixels of 32 x 32."""
ASPECT_RANGE = (0.7, 1.43)
TRIANGLE_ASYMMETRY, TRIANGLE_EXTENT = 0.22, 0.75
CIRCLE_EXTENT, SQUARE_EXTENT = 0.66, 0.90
BOX_MARGIN = 0.1
MIN_COSINE = 0.5
GREY = -1


@dataclass(frozen=True)
class Detection:
    """One object of an image."""

    colour: str
    """Key of `COLOURS`."""
    shape: str
    """Entry of `SHAPES`, or `UNKNOWN`."""
    box: tuple[int, int, int, int]
    """x0, y0, x1, y1 in pixels; x1 and y1 are just outside."""
    area: int
    """Pixels."""


class Run(NamedTuple):
    """Neighbouring pixels of a row with the same hue."""

    row: int
    start: int
    stop: int
    hue: int

    @property
    def length(self) -> int:
        """Pixels."""
        return self.stop - self.start


def detect(image: NDArray[np.uint8]) -> list[Detection]:
    """Find the coloured objects of an image.

    Args:
        image: RGB (H, W, 3) uint8.

    Returns:
        Objects from top to bottom; those of no clear shape are there as `UNKNOWN`.

    Raises:
        ValueError: the image is of another shape or type.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(f"the image is {image.dtype} {image.shape}; must be uint8 (H, W, 3)")
    least = max(1, math.ceil(MIN_AREA_SHARE * image.shape[0] * image.shape[1]))
    found = [_describe(runs) for runs in _components(_nearest_hue(image))]
    return [item for item in found if item.area >= least]


def relative_position(
    box: tuple[float, float, float, float], other: tuple[float, float, float, float]
) -> frozenset[str]:
    """Name the direction of a box from another one.

    The centres' offset, shortened in each direction by a tenth of both boxes' sizes, must be more than half of the
    centres' distance.

    Args:
        box: x0, y0, x1, y1 in pixels, y down.
        other: the box it is compared with.

    Returns:
        None, one or two of "left of", "right of", "above" and "below".

    Source: djghosh13/geneval evaluation/evaluate_images.py, relative_position.
    """
    first, second = np.reshape(box, (2, 2)).astype(np.float64), np.reshape(other, (2, 2)).astype(np.float64)
    offset = first.mean(0) - second.mean(0)
    distance = float(np.hypot(*offset))
    if distance == 0.0:
        return frozenset()
    sizes = np.abs(first[1] - first[0]) + np.abs(second[1] - second[0])
    x, y = np.sign(offset) * np.maximum(np.abs(offset) - BOX_MARGIN * sizes, 0.0) / distance
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return frozenset(name for name, true in holds.items() if true)


def _nearest_hue(image: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Row of `COLOURS` of each pixel (H, W), or `GREY`.

    Compared are directions from grey and not the colours themselves: a red edge blended with the light background is
    nearer to yellow than to red.
    """
    chroma = image.astype(np.float32)
    chroma -= chroma.mean(2, keepdims=True)
    saturated = image.max(2).astype(np.int16) - image.min(2) > MIN_SATURATION
    cosine = chroma @ HUES.T / np.maximum(np.linalg.norm(chroma, axis=2, keepdims=True), 1e-6)
    known = saturated & (cosine.max(2) > MIN_COSINE)
    return np.where(known, cosine.argmax(2), GREY)


def _hue_directions() -> NDArray[np.float32]:
    palette = np.asarray(list(COLOURS.values()), dtype=np.float32)
    chroma = palette - palette.mean(1, keepdims=True)
    directions: NDArray[np.float32] = chroma / np.linalg.norm(chroma, axis=1, keepdims=True)
    return directions


def _runs(hues: NDArray[np.int64]) -> Iterator[Run]:
    """Pieces of rows that have one hue, row by row."""
    width = hues.shape[1] + 1
    # a grey column at the right end keeps a run from going on in the next row
    flat = np.pad(hues, ((0, 0), (0, 1)), constant_values=GREY).ravel()
    starts = np.flatnonzero(np.diff(flat, prepend=GREY))
    ends = np.append(starts, len(flat))[1:]  # empty if all pixels are grey
    for start, end, hue in zip(starts.tolist(), ends.tolist(), flat[starts].tolist(), strict=True):
        if hue != GREY:
            yield Run(start // width, start % width, end - start // width * width, hue)


def _components(hues: NDArray[np.int64]) -> list[list[Run]]:
    """Runs of one hue that touch in neighbouring rows, as groups in the order of their first runs."""
    parent: list[int] = []
    runs = list(_runs(hues))
    first_above = 0
    for index, run in enumerate(runs):
        parent.append(index)
        while runs[first_above].row < run.row - 1 or (
            runs[first_above].row == run.row - 1 and runs[first_above].stop <= run.start
        ):
            first_above += 1
        above = first_above
        while runs[above].row < run.row and runs[above].start < run.stop:
            if runs[above].hue == run.hue:
                one, other = sorted((_root(parent, above), _root(parent, index)))
                parent[other] = one
            above += 1
    groups: dict[int, list[Run]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(_root(parent, index), []).append(run)
    return list(groups.values())


def _root(parent: list[int], index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = parent[index]
    return index


def _describe(runs: list[Run]) -> Detection:
    top, bottom = runs[0].row, max(run.row for run in runs) + 1
    left, right = min(run.start for run in runs), max(run.stop for run in runs)
    half = (bottom - top) // 2
    area = sum(run.length for run in runs)
    upper = sum(run.length for run in runs if run.row < top + half)
    lower = sum(run.length for run in runs if run.row >= bottom - half)
    extent = area / ((bottom - top) * (right - left))
    shape = _shape_of((right - left) / (bottom - top), extent, (lower - upper) / area)
    return Detection(list(COLOURS)[runs[0].hue], shape, (left, top, right, bottom), area)


def _shape_of(aspect: float, extent: float, asymmetry: float) -> str:
    if not ASPECT_RANGE[0] <= aspect <= ASPECT_RANGE[1]:
        return UNKNOWN
    if asymmetry > TRIANGLE_ASYMMETRY and extent < TRIANGLE_EXTENT:
        return "triangle"
    if extent > SQUARE_EXTENT:
        return "square"
    return "circle" if extent >= CIRCLE_EXTENT else UNKNOWN


HUES = _hue_directions()
