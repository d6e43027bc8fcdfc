"""Checks of a benchmark's files: malformed rows, suspicious boxes, and the test that tells xywh from xyxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.gui.benchmarks.annotations import Annotation, BoxForm, RowError, corners
from mmrl.gui.benchmarks.files import BenchmarkFiles, ImageFolder, locate, read_annotations
from mmrl.gui.benchmarks.layout import Benchmark
from mmrl.gui.benchmarks.table import find_benchmark, recognise
from mmrl.gui.coords import Size
from mmrl.gui.samples import Refusal
from mmrl.hub.tables import read_rows

__all__ = ["Convention", "Validation", "box_problem", "validate"]

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


@dataclass
class Validation:
    """What was found in a copy of a benchmark."""

    benchmark: Benchmark
    files: tuple[Path, ...]
    rows: int = 0
    malformed: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of each row that cannot be evaluated."""
    suspicious: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of each box that is evaluated as published but looks wrong."""
    convention: Convention | None = None
    """None where there is no box."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_usable(self) -> bool:
        """Whether the copy can be evaluated: every row is sound and the boxes mean what they are declared to mean."""
        right = self.convention is None or self.convention.verdict in ("right", "ambiguous")
        return bool(self.rows) and not self.malformed and right


def validate(path: str, benchmark: str | None = None, images: str | None = None) -> Validation:
    """Check a copy of a benchmark, or one of its annotation files.

    Args:
        path: annotation file, or folder of the copy.
        benchmark: its name; None recognises a file by its name or columns.
        images: folder of the images, where it is not the published one.

    Returns:
        Malformed rows, suspicious boxes and the test of the box convention. Without the image folder, boxes are
        compared with the annotated sizes.

    Raises:
        UserError: there is no such file, or no benchmark fits it.
    """
    chosen = find_benchmark(benchmark) if benchmark else _recognised(path)
    found = locate(chosen, path, images)
    result = Validation(chosen, found.files)
    folder = _image_folder(found, result)
    boxes: list[tuple[Annotation, Size]] = []
    for annotation in read_annotations(found):
        result.rows += 1
        size = _checked(annotation, folder, result)
        if isinstance(annotation, Annotation) and annotation.is_box and size is not None:
            boxes.append((annotation, size))
    result.convention = _test_convention(found.layout.form, boxes)
    _note_size(result)
    return result


def box_problem(annotation: Annotation, size: Size) -> str | None:
    """Why a target looks wrong; None where it does not.

    Args:
        annotation: a row.
        size: (width, height) that its numbers refer to.
    """
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


def _recognised(path: str) -> Benchmark:
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{file} is a folder; say which benchmark it holds with --benchmark")
    first = next((row.cells for row in read_rows(path, "test", None) if row.cells), {})
    return recognise(file, first)


def _image_folder(found: BenchmarkFiles, result: Validation) -> ImageFolder | None:
    """The images, or None where the copy has none of their folders."""
    if not found.layout.images or any(root.is_dir() for root in found.image_roots):
        return ImageFolder(found.image_roots)
    result.notes.append("no image folder was found: images are not checked, boxes only against the annotated sizes")
    return None


def _checked(annotation: Annotation | tuple[str, str], folder: ImageFolder | None, result: Validation) -> Size | None:
    """Note what is wrong with a row; return the size that its numbers refer to, where that is known."""
    if not isinstance(annotation, Annotation):
        result.malformed.append(annotation)
        return None
    stored = None
    if folder is not None:
        try:
            stored = folder.size(folder.resolve(annotation.image))
        except RowError as error:
            result.malformed.append((annotation.place, str(error)))
            return None
    size = annotation.size or stored
    if annotation.size is not None and stored is not None and annotation.size != stored:
        (aw, ah), (sw, sh) = annotation.size, stored
        result.suspicious.append((annotation.place, f"annotated as {aw} x {ah}, the image is {sw} x {sh}"))
    problem = None if size is None else box_problem(annotation, size)
    if problem is not None:
        result.suspicious.append((annotation.place, problem))
    return size


def _test_convention(declared: BoxForm, boxes: Sequence[tuple[Annotation, Size]]) -> Convention | None:
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


def _note_size(result: Validation) -> None:
    published = result.benchmark.size
    if published is not None and published != result.rows:
        result.notes.append(
            f"{result.rows} rows, {result.benchmark.title} has {published}: its numbers are comparable only when whole"
        )


VERDICTS = {
    "right": "the declared convention is right",
    "ambiguous": "these boxes do not tell which one it is",
    "unsure": "neither fits; look at the boxes",
    "wrong": "the file is in the other convention",
}
