"""One row of an annotation file: what the benchmarks publish in common, and the checks that all rows share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mmrl.gui.coords import Box, Size
from mmrl.gui.samples import Polygon, Refusal, Target


class RowError(Exception):
    """A row that does not have the benchmark's format; the message says what was found and what was expected."""


class BoxForm(StrEnum):
    """What the four numbers of a published box mean."""

    XYWH = "xywh"
    """Left, top, width, height in pixels."""
    XYXY = "xyxy"
    """Left, top, right, bottom in pixels."""
    XYWH_RELATIVE = "xywh_relative"
    """Left, top, width, height as fractions of the image's sides."""
    XYXY_RELATIVE = "xyxy_relative"
    """Left, top, right, bottom as fractions of the image's sides."""

    @property
    def is_relative(self) -> bool:
        """Whether the numbers are fractions of the image's sides."""
        return self in (BoxForm.XYWH_RELATIVE, BoxForm.XYXY_RELATIVE)

    @property
    def has_size(self) -> bool:
        """Whether the last two numbers are width and height."""
        return self in (BoxForm.XYWH, BoxForm.XYWH_RELATIVE)


@dataclass(frozen=True)
class Annotation:
    """A row as it was published; nothing is repaired or converted."""

    id: str
    """Name of the sample: the row's own, or file and number."""
    place: str
    """File and number of the row, for messages."""
    image: Any
    """Path inside the image folder, or a stored image."""
    instruction: str
    target: Sequence[float] | Refusal
    """Four numbers of a box, the corners of a polygon as x, y, x, y, ..., or nothing to be found."""
    form: BoxForm | None
    """Meaning of a box; None for polygons and refusals."""
    size: Size | None = None
    """(width, height) of the image as annotated; None where the row does not say."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the sample in each column that results are broken down by."""

    @property
    def is_box(self) -> bool:
        """Whether the target is a box."""
        return self.form is not None


def make_target(annotation: Annotation, original_wh: Size) -> Target:
    """The place of an annotation in pixels of the stored image."""
    if isinstance(annotation.target, Refusal):
        return annotation.target
    relative = annotation.form is not None and annotation.form.is_relative
    width, height = (1, 1) if relative else (annotation.size or original_wh)
    x_scale, y_scale = original_wh[0] / width, original_wh[1] / height
    if annotation.form is None:
        xs, ys = annotation.target[0::2], annotation.target[1::2]
        return Polygon(tuple((x * x_scale, y * y_scale) for x, y in zip(xs, ys, strict=True)))
    x1, y1, x2, y2 = corners(annotation.target, annotation.form)
    return Box(x1 * x_scale, y1 * y_scale, x2 * x_scale, y2 * y_scale)


def corners(numbers: Sequence[float], form: BoxForm) -> Box:
    """Left, top, right and bottom of a published box, in its own unit."""
    x, y, third, fourth = numbers
    return Box(x, y, x + third, y + fourth) if form.has_size else Box(x, y, third, fourth)


def read_text(cells: Mapping[str, Any], name: str) -> str:
    """A column with text.

    Raises:
        RowError: it is missing, blank or no text.
    """
    value = _cell(cells, name)
    if not isinstance(value, str):
        raise RowError(f"{name} is {_shown(value)}; expected a text")
    if not value.strip():
        raise RowError(f"{name} is blank")
    return value


def read_box(cells: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """A column with the four numbers of a box."""
    numbers = read_numbers(cells, name)
    if len(numbers) != 4:
        raise RowError(f"{name} has {len(numbers)} numbers; expected 4")
    return numbers


def read_numbers(cells: Mapping[str, Any], name: str) -> tuple[float, ...]:
    """A column with a list of finite numbers."""
    value = _cell(cells, name)
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} is {_shown(value)}; expected a list of numbers")
    for number in value:
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise RowError(f"{name} holds {_shown(number)}; expected finite numbers")
    return tuple(value)


def read_size(cells: Mapping[str, Any], name: str) -> Size | None:
    """A column with width and height; None where the row has no such column."""
    if cells.get(name) is None:
        return None
    numbers = read_numbers(cells, name)
    if len(numbers) != 2 or min(numbers) < 1 or any(number != int(number) for number in numbers):
        raise RowError(f"{name} is {_shown(list(numbers))}; expected [width, height] in pixels")
    return int(numbers[0]), int(numbers[1])


def _cell(cells: Mapping[str, Any], name: str) -> Any:
    if cells.get(name) is None:
        found = ", ".join(key for key, value in cells.items() if value is not None) or "none"
        raise RowError(f"no column {name}; the row has: {found}")
    return cells[name]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
