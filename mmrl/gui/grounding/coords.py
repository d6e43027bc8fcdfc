"""Coordinate spaces of models and datasets, and the one resize between them.

Boxes and points are kept in pixels of the original image. They are converted at two edges only: where a prompt or a
training answer is written, and where a model's answer is read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from mmrl.errors import UserError
from mmrl.fields import bounded

if TYPE_CHECKING:
    from mmrl.vlm.families.family import VlmFamily

Point: TypeAlias = tuple[float, float]
"""(x, y), or (y, x) in the space rel1_yx."""
Size: TypeAlias = tuple[int, int]
"""(width, height) in pixels."""

MAX_RATIO = 200
MIN_TOKENS = 4
MAX_TOKENS = 16384


class CoordinateSpace(StrEnum):
    """Meaning of the two numbers of a point."""

    ABS_RESIZED = "abs_resized"
    """Pixels of the image after the resize, as the model sees it: Qwen2.5-VL, InfiGUI-G1, UI-TARS-1.5."""
    REL1000 = "rel1000"
    """Thousandths of width and height: Qwen-VL, Qwen2-VL, Qwen3-VL, UI-Venus-1.5, CogAgent."""
    REL1 = "rel1"
    """Fractions of width and height: SeeClick."""
    ABS_ORIGINAL = "abs_original"
    """Pixels of the stored image: the annotations of the benchmarks."""
    REL1_YX = "rel1_yx"
    """Fractions, y first: Auto-UI and DigiRL."""


class Box(NamedTuple):
    """A rectangle (left, top, right, bottom); its four edges belong to it."""

    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def center(self) -> Point:
        """The middle."""
        return (self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2

    def contains(self, point: Point) -> bool:
        """Whether a point of the same space is inside or on an edge; never for NaN."""
        x, y = point
        return self.x1 <= x <= self.x2 and self.y1 <= y <= self.y2


@dataclass(frozen=True)
class Resize:
    """The size at which a model sees an image, by the rule of qwen-vl-utils."""

    factor: int = bounded(28, at_least=1)
    """Sides are multiples of this: patch size times merge size, 28 for Qwen2-VL and Qwen2.5-VL, 32 for Qwen3-VL."""
    min_pixels: int | None = bounded(None, at_least=1)
    """Minimum area in pixels. Default: 4 factor^2."""
    max_pixels: int | None = bounded(None, at_least=1)
    """Maximum area in pixels. Default: 16384 factor^2."""
    shrink_to: int | None = bounded(None, at_least=1)
    """Larger images are first scaled to this area with sides rounded to whole pixels, as in InfiGUI-G1's evaluation
    (5600 * 784). Default: no scaling."""

    def model_wh(self, original_wh: Size) -> Size:
        """Width and height in pixels that the model sees.

        Args:
            original_wh: (width, height) of the stored image.

        Returns:
            (width, height) in pixels.

        Raises:
            ValueError: the image has no pixels or is over 200 times as long as wide.

        Source: InfiXAI/InfiGUI-G1 eval/data.py (`resize_image`), for `shrink_to`.
        """
        width, height = original_wh
        if self.shrink_to is not None and width * height > self.shrink_to:
            scale = math.sqrt(self.shrink_to / (width * height))
            width, height = max(1, round(width * scale)), max(1, round(height * scale))
        # qwen-vl-utils puts the height first
        height, width = smart_resize(height, width, self.factor, self.min_pixels, self.max_pixels)
        return width, height


def pointing_families() -> dict[str, VlmFamily]:
    """Model families whose point format is known, by transformers' `model_type`."""
    from mmrl.vlm.families.family import known_families

    return {name: family for name, family in known_families().items() if family.points}


def coordinate_space(name: str) -> CoordinateSpace:
    """The space with a given name; raises UserError for an unknown name."""
    try:
        return CoordinateSpace(name)
    except ValueError:
        known = ", ".join(space.value for space in CoordinateSpace)
        raise UserError(f"unknown coordinate space {name!r}; available: {known}") from None


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int | None = None, max_pixels: int | None = None
) -> tuple[int, int]:
    """Sides after qwen-vl-utils' resize: multiples of `factor`, an area within bounds, about the same aspect ratio.

    The copy in transformers differs on slivers and has a smaller default area, so images are resized here and its
    processors find nothing left to do.

    Args:
        height: in pixels.
        width: in pixels.
        factor: patch size times merge size.
        min_pixels: smallest area; None is 4 factor^2.
        max_pixels: largest area; None is 16384 factor^2.

    Raises:
        ValueError: the image has no pixels, is over 200 times as long as wide, the bounds are reversed, or no side of
            at least `factor` fits into the area.

    Source: QwenLM/Qwen3-VL qwen-vl-utils/src/qwen_vl_utils/vision_process.py, version 0.0.14.
    """
    lowest = MIN_TOKENS * factor**2 if min_pixels is None else min_pixels
    highest = MAX_TOKENS * factor**2 if max_pixels is None else max_pixels
    _check_sides(height, width, lowest, highest)
    # Python rounds halves to even: with a factor of 28, 42 and 70 both give 56.
    new_height, new_width = (max(factor, round(side / factor) * factor) for side in (height, width))
    if new_height * new_width > highest:
        shrink = math.sqrt(height * width / highest)
        # ratio of the sides before rounding, as qwen-vl-utils does, not of the rounded ones
        new_height, new_width = (math.floor(side / shrink / factor) * factor for side in (height, width))
    elif new_height * new_width < lowest:
        # ceil, so that the area is not below the bound again
        grow = math.sqrt(lowest / (height * width))
        new_height, new_width = (math.ceil(side * grow / factor) * factor for side in (height, width))
    if min(new_height, new_width) < 1:
        raise ValueError(
            f"an image of {width} x {height} pixels would have a side below {factor} pixels within "
            f"max_pixels={highest}; raise max_pixels or crop the image"
        )
    return new_height, new_width


def _check_sides(height: int, width: int, lowest: int, highest: int) -> None:
    if min(height, width) < 1:
        raise ValueError(f"the image is {width} x {height} pixels; both sides must be at least 1")
    if lowest > highest:
        raise ValueError(f"min_pixels={lowest} is above max_pixels={highest}")
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"the image is {width} x {height} pixels; the aspect ratio must be at most {MAX_RATIO}")


def to_original(point: Point, space: CoordinateSpace, original_wh: Size, model_wh: Size | None = None) -> Point:
    """A model's point in pixels of the original image; points are not clipped.

    Args:
        point: the two numbers of the answer in their order.
        space: their meaning, also by name such as "rel1000".
        original_wh: (width, height) of the stored image.
        model_wh: (width, height) that the model saw; only abs_resized needs it.

    Returns:
        (x, y) in pixels of the original image.

    Raises:
        UserError: there is no space of this name.
        ValueError: `model_wh` is missing.
    """
    space = coordinate_space(space)
    first, second = point
    x, y = (second, first) if space is CoordinateSpace.REL1_YX else (first, second)
    width, height = _extent(space, original_wh, model_wh)
    return _scaled(x, original_wh[0], width), _scaled(y, original_wh[1], height)


def from_original(point: Point, space: CoordinateSpace, original_wh: Size, model_wh: Size | None = None) -> Point:
    """The inverse of `to_original`, not rounded."""
    space = coordinate_space(space)
    width, height = _extent(space, original_wh, model_wh)
    x, y = _scaled(point[0], width, original_wh[0]), _scaled(point[1], height, original_wh[1])
    return (y, x) if space is CoordinateSpace.REL1_YX else (x, y)


def _scaled(number: float, to: float, of: float) -> float:
    """Exact for equal sides and for integer results of integers: multiply before dividing."""
    return number if to == of else number * to / of


def _extent(space: CoordinateSpace, original_wh: Size, model_wh: Size | None) -> tuple[float, float]:
    """Width and height of the whole image in units of the space."""
    if space is CoordinateSpace.ABS_RESIZED:
        if model_wh is None:
            raise ValueError("points in the space abs_resized need model_wh, the size that the model saw")
        return model_wh
    if space is CoordinateSpace.ABS_ORIGINAL:
        return original_wh
    return (1000, 1000) if space is CoordinateSpace.REL1000 else (1, 1)


def clean_box(
    box: tuple[float, float, float, float], width: int, height: int, min_side: float = 2, min_visible: float = 0.5
) -> Box | None:
    """A training box clipped to its image, or None if it is not usable.

    Opposite corners `box` may come in any order, in pixels of the original image. Benchmarks must not use it: their
    boxes are never dropped or altered.
    """
    if not all(math.isfinite(number) for number in box):
        return None
    (x1, x2), (y1, y2) = sorted((box[0], box[2])), sorted((box[1], box[3]))
    clipped = Box(max(x1, 0), max(y1, 0), min(x2, width), min(y2, height))
    sides = clipped.x2 - clipped.x1, clipped.y2 - clipped.y1
    # the whole box, not the visible part
    area = (x2 - x1) * (y2 - y1)
    if area <= 0 or min(sides) < min_side or sides[0] * sides[1] < min_visible * area:
        return None
    return clipped
