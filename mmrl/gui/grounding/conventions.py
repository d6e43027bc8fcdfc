"""Meaning of the four numbers of a box, tested on all boxes of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from mmrl.gui.grounding.coords import Box, Size

ENOUGH = 0.995
"""Minimum fraction of boxes that must have an area and be inside their image under the declared convention."""
MANY = 0.9
"""Below this fraction, there are more than a few bad boxes."""
ENOUGH_BOXES = 20
"""With fewer boxes, another convention may be a coincidence."""
CHANCE = 1e-6
"""Maximum probability at which boxes of wide images all below 1000 pixels still count as chance."""
FEW = 0.05
"""Below this fraction, boxes in another convention count as bad boxes, unless their unit is evident."""
SCALED = 1.4
"""Minimum ratio of the screen size to the area that boxes occupy at which the boxes may be in CSS pixels."""
NAMED = 5
"""Maximum number of rows listed in a message."""
VERDICTS = {
    "mixed": "rows follow different conventions",
    "right": "the declared convention is right",
    "ambiguous": "these boxes fit both conventions",
    "unsure": "neither fits; look at the boxes",
    "wrong": "the file is in the other convention",
    "thousandths": "the numbers are thousandths of the image's sides",
}


class BoxForm(StrEnum):
    """Meaning of the four numbers of a published box."""

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


def corners(numbers: Sequence[float], form: BoxForm) -> Box:
    """Left, top, right and bottom of a published box, in its own unit."""
    x, y, third, fourth = numbers
    has_size = form in (BoxForm.XYWH, BoxForm.XYWH_RELATIVE)
    return Box(x, y, x + third, y + fourth) if has_size else Box(x, y, third, fourth)


FormedBox: TypeAlias = "tuple[Sequence[float], BoxForm, Size]"
"""Four numbers, their declared meaning, and (width, height) of the image."""


@dataclass(frozen=True)
class Convention:
    """How many boxes fit the declared meaning of their coordinates, and how many fit another one."""

    declared: BoxForm
    fits: float
    """Fraction of boxes with a positive area inside the image, as declared."""
    other: BoxForm
    other_fits: float
    """Fraction of boxes with a positive area inside the image, under the other convention."""
    in_unit_range: float
    """Fraction of boxes whose numbers are all between 0 and 1."""
    boxes: int
    in_thousandths: float = 0.0
    """Fraction of boxes that fit as left, top, right and bottom in thousandths."""
    chance_below_1000: float = 1.0
    """Probability that, by chance, no box edge in pixels is beyond 1000; 1 if an edge is."""
    mixed: str = ""
    """Rows that contradict the others, and how; empty if none does."""
    reach: float = 1.0
    """Largest relative position of a right or lower edge within its image."""

    @property
    def verdict(self) -> str:
        """Key of `VERDICTS`: few or centred boxes may fit both (ambiguous); bad data fit neither (unsure)."""
        if self.mixed:
            return "mixed"
        # wrong only if the other meaning fits almost all; bad data fit neither
        if self._units_are_wrong or (self.fits < ENOUGH <= self.other_fits):
            return "wrong"
        # boxes in thousandths fit small screens too, so one of two further signs is needed
        too_far, too_near = self.fits < MANY, self.chance_below_1000 < CHANCE
        if not self.declared.is_relative and self.in_thousandths >= ENOUGH and (too_far or too_near):
            return "thousandths"
        if self.fits >= ENOUGH:
            return "ambiguous" if self.other_fits >= ENOUGH else "right"
        return "unsure"

    @property
    def is_refused(self) -> bool:
        """Whether the boxes cannot be used, as they are not what they are declared to be."""
        if self.verdict not in ("mixed", "wrong", "thousandths"):
            return False
        return self.verdict == "mixed" or self.boxes >= ENOUGH_BOXES or self.in_unit_range == 1

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        if self.mixed:
            return f"{VERDICTS['mixed']}: {self.mixed}"
        if self._units_are_wrong:
            unit = "pixels" if self.declared.is_relative else "fractions of the image's sides"
            return f"boxes are declared as {self.declared}, but their numbers are {unit}"
        if self.verdict == "thousandths":
            found = f"{self.in_thousandths:.1%} of {self.boxes} fit in 0 to 1000"
            return f"boxes are declared as {self.declared}, but {found}: {VERDICTS['thousandths']}"
        shares = f"{self.fits:.1%} of {self.boxes} boxes fit {self.declared}, {self.other_fits:.1%} fit {self.other}"
        return f"{shares}: {VERDICTS[self.verdict]}"

    @property
    def doubt(self) -> str:
        """A question if all boxes in pixels are in the upper left of their screens; empty otherwise."""
        if self.declared.is_relative or self.verdict in ("mixed", "wrong", "thousandths") or self.reach <= 0:
            return ""
        # the reach is a maximum over boxes, so its chance falls with the power of their number
        # each box has a right and a lower edge
        if 1 / self.reach < SCALED or self.reach ** (2 * self.boxes) > CHANCE:
            return ""
        return (
            f"none of {self.boxes} boxes extends beyond {self.reach:.0%} of its screen: are they in CSS pixels of "
            f"screens with a device pixel ratio of {1 / self.reach:.1f}? Multiply them by the ratio"
        )

    @property
    def _units_are_wrong(self) -> bool:
        return self.in_unit_range < 1 - ENOUGH if self.declared.is_relative else self.in_unit_range >= ENOUGH


def fit_convention(
    declared: BoxForm, boxes: Sequence[FormedBox], places: Sequence[str] | None = None
) -> Convention | None:
    """Count how many boxes fit the declared meaning of their numbers and how many fit another one.

    Args:
        declared: meaning of the boxes of a file.
        boxes: each with its own meaning, since a row may be in pixels where the benchmark's boxes are fractions
            (MMBench-GUI).
        places: name of the row of each box, for messages.

    Returns:
        The counts; None without boxes.
    """
    if not boxes:
        return None

    def share(fit: Callable[[Sequence[float], BoxForm, Size], bool]) -> float:
        return sum(fit(*box) for box in boxes) / len(boxes)

    # a single number beyond 1000 rules thousandths out
    farthest = max(number for row, _, _ in boxes for number in row)
    # only screens that have pixels beyond 1000 can tell pixels from thousandths
    sides = [side for _, _, size in boxes for side in size if side > 1000]
    return Convention(
        declared=declared,
        fits=share(fits),
        other=OTHER[declared],
        other_fits=share(lambda row, form, size: fits(row, OTHER[form], size)),
        in_unit_range=share(lambda row, form, size: all(0 <= number <= 1 for number in row)),
        boxes=len(boxes),
        in_thousandths=share(lambda row, form, size: fits(row, BoxForm.XYXY, (1000, 1000))),
        chance_below_1000=1.0 if farthest > 1000 else math.prod(1000 / side for side in sides),
        mixed=_mixture(boxes, places or [f"box {number}" for number in range(1, len(boxes) + 1)]),
        reach=max(_reach(*box) for box in boxes),
    )


def _mixture(boxes: Sequence[FormedBox], places: Sequence[str]) -> str:
    """The rows that contradict the others: fractions among pixels, sizes among corners, thousandths among pixels."""
    rows = list(zip(boxes, places, strict=True))
    units = {
        "fractions of the image's sides": [place for (box, _, _), place in rows if _is_fraction(box)],
        "pixels": [place for (box, _, _), place in rows if max(box) > 1],
    }
    if all(units.values()):
        return _told(units, len(rows))
    if units["fractions of the image's sides"]:
        # all boxes are fractions: they have no other form to compare
        return ""
    forms: dict[str, list[str]] = {}
    for (box, form, size), place in rows:
        ways = [way for way in (form, OTHER[form]) if fits(box, way, size)]
        # boxes that fit both forms say nothing
        if len(ways) == 1:
            forms.setdefault(f"numbers that only fit {ways[0]}", []).append(place)
    # a few contradictions are bad rows, many are two kinds of data in one file
    if len(forms) == 2 and min(map(len, forms.values())) > max(1, FEW * len(rows)):
        return _told(forms, len(rows))
    scales = {
        "thousandths of the image's sides": [
            place
            for (box, _, (width, height)), place in rows
            # beyond its image, although below 1000: thousandths of a small screen
            if max(box) <= 1000 and has_area(box, BoxForm.XYXY) and (box[0] >= width or box[1] >= height)
        ],
        "numbers above 1000": [place for (box, _, _), place in rows if max(box) > 1000],
    }
    return _told(scales, len(rows)) if min(map(len, scales.values())) > max(1, FEW * len(rows)) else ""


def _is_fraction(box: Sequence[float]) -> bool:
    """Whether numbers are fractions for certain: whole numbers up to 1 may be pixels of a corner."""
    return all(0 <= number <= 1 for number in box) and any(number != int(number) for number in box)


def _told(found: dict[str, list[str]], rows: int) -> str:
    parts = []
    for kind, places in found.items():
        shown = ", ".join(places[:NAMED]) + (", ..." if len(places) > NAMED else "")
        parts.append(f"{len(places)} of {rows} have {kind} ({shown})")
    return ", ".join(parts)


def _reach(numbers: Sequence[float], form: BoxForm, size: Size) -> float:
    box, (width, height) = corners(numbers, form), ((1, 1) if form.is_relative else size)
    return max(box.x2 / width, box.y2 / height)


def fits(numbers: Sequence[float], form: BoxForm, size: Size) -> bool:
    """Whether a box has an area and is inside its image."""
    return has_area(numbers, form) and inside(numbers, form, size)


def has_area(numbers: Sequence[float], form: BoxForm) -> bool:
    """Whether a box has an area."""
    box = corners(numbers, form)
    return box.x2 > box.x1 and box.y2 > box.y1


def inside(numbers: Sequence[float], form: BoxForm, size: Size) -> bool:
    """Whether a box is inside its image."""
    box = corners(numbers, form)
    width, height = (1, 1) if form.is_relative else size
    return box.x1 >= 0 and box.y1 >= 0 and box.x2 <= width and box.y2 <= height


OTHER = {
    BoxForm.XYWH: BoxForm.XYXY,
    BoxForm.XYXY: BoxForm.XYWH,
    BoxForm.XYWH_RELATIVE: BoxForm.XYXY_RELATIVE,
    BoxForm.XYXY_RELATIVE: BoxForm.XYWH_RELATIVE,
}
