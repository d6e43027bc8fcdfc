"""Boxes that look wrong, and the test that tells xywh from xyxy and pixels from fractions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.gui.benchmarks.annotations import Annotation, BoxForm, corners
from mmrl.gui.coords import Size
from mmrl.gui.samples import Refusal

ENOUGH = 0.995
"""Share of the boxes that must have an area and lie in their image under the declared convention."""
OTHER = {
    BoxForm.XYWH: BoxForm.XYXY,
    BoxForm.XYXY: BoxForm.XYWH,
    BoxForm.XYWH_RELATIVE: BoxForm.XYXY_RELATIVE,
    BoxForm.XYXY_RELATIVE: BoxForm.XYWH_RELATIVE,
}


@dataclass(frozen=True)
class Convention:
    """How many boxes fit the declared meaning of their numbers, and how many another one."""

    declared: BoxForm
    fits: float
    """Share of the boxes with a positive area inside the image, as declared."""
    other: BoxForm
    other_fits: float
    """The same under the other convention."""
    in_unit_range: float
    """Share of the boxes whose numbers all lie in 0 to 1."""
    boxes: int

    @property
    def verdict(self) -> str:
        """right, ambiguous, unsure or wrong: `wrong` says that another convention fits and the declared one does not.

        Few or centred boxes fit both (ambiguous); boxes that fit neither are bad data (unsure).
        """
        if not self.boxes:
            return "ambiguous"
        if self._units_are_wrong:
            return "wrong"
        if self.fits >= ENOUGH:
            return "ambiguous" if self.other_fits >= ENOUGH else "right"
        return "wrong" if self.other_fits >= ENOUGH else "unsure"

    @property
    def sentence(self) -> str:
        """The verdict in a line."""
        shares = f"{self.fits:.1%} of {self.boxes} boxes fit {self.declared}, {self.other_fits:.1%} fit {self.other}"
        if self._units_are_wrong:
            unit = "fractions of the image's sides" if not self.declared.is_relative else "pixels"
            return f"boxes are declared as {self.declared}, but their numbers are {unit}"
        return f"{shares}: {VERDICTS[self.verdict]}"

    @property
    def _units_are_wrong(self) -> bool:
        return self.in_unit_range < 1 - ENOUGH if self.declared.is_relative else self.in_unit_range >= ENOUGH


def box_problem(annotation: Annotation, size: Size) -> str | None:
    """Why a target looks wrong; None where it does not."""
    if isinstance(annotation.target, Refusal):
        return None
    if annotation.form is None:
        width, height = size
        outside = any(not 0 <= x <= width for x in annotation.target[0::2])
        outside = outside or any(not 0 <= y <= height for y in annotation.target[1::2])
        return f"a corner of the polygon is outside the image of {width} x {height}" if outside else None
    box = corners(annotation.target, annotation.form)
    shown = f"[{', '.join(f'{number:g}' for number in annotation.target)}] ({annotation.form})"
    if box.x2 <= box.x1 or box.y2 <= box.y1:
        return f"the box {shown} has no area"
    if not _inside(annotation.target, annotation.form, size):
        return f"the box {shown} leaves the image of {size[0]} x {size[1]}"
    return None


def fit_convention(declared: BoxForm, boxes: Sequence[tuple[Annotation, Size]]) -> Convention | None:
    """Count how many boxes fit the declared meaning of their numbers and how many the other one."""
    if not boxes:
        return None
    # a row may be in pixels where the benchmark's boxes are fractions (MMBench-GUI): it is tested as it says itself
    forms = [annotation.form or declared for annotation, _ in boxes]
    numbers: list[Any] = [annotation.target for annotation, _ in boxes]
    sizes = [size for _, size in boxes]

    def share(each: Sequence[BoxForm]) -> float:
        return sum(map(_fits, numbers, each, sizes)) / len(boxes)

    return Convention(
        declared=declared,
        fits=share(forms),
        other=OTHER[declared],
        other_fits=share([OTHER[form] for form in forms]),
        in_unit_range=sum(all(0 <= number <= 1 for number in row) for row in numbers) / len(boxes),
        boxes=len(boxes),
    )


def _fits(numbers: Sequence[float], form: BoxForm, size: Size) -> bool:
    box = corners(numbers, form)
    return box.x2 > box.x1 and box.y2 > box.y1 and _inside(numbers, form, size)


def _inside(numbers: Sequence[float], form: BoxForm, size: Size) -> bool:
    box = corners(numbers, form)
    width, height = (1, 1) if form.is_relative else size
    return box.x1 >= 0 and box.y1 >= 0 and box.x2 <= width and box.y2 <= height


VERDICTS = {
    "right": "the declared convention is right",
    "ambiguous": "these boxes do not tell which one it is",
    "unsure": "neither fits; look at the boxes",
    "wrong": "the file is in the other convention",
}
