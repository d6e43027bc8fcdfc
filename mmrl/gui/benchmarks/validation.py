"""Check of a copy of a benchmark: malformed rows, suspicious boxes, and whether they mean what they are declared to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mmrl.errors import UserError
from mmrl.gui.benchmarks.annotations import Annotation, RowError
from mmrl.gui.benchmarks.box_checks import Convention, box_problem, fit_convention
from mmrl.gui.benchmarks.files import BenchmarkFiles, ImageFolder, locate, read_annotations
from mmrl.gui.benchmarks.layout import Benchmark
from mmrl.gui.benchmarks.table import BENCHMARKS, find_benchmark, recognise
from mmrl.gui.coords import Size
from mmrl.hub.tables import read_rows


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
    result.convention = fit_convention(found.layout.form, boxes)
    _note_size(result)
    return result


def _recognised(path: str) -> Benchmark:
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{file} is a folder; say which benchmark it holds with --benchmark: {', '.join(BENCHMARKS)}")
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


def _note_size(result: Validation) -> None:
    published = result.benchmark.size
    if published is not None and published != result.rows:
        result.notes.append(
            f"{result.rows} rows, {result.benchmark.title} has {published}: its numbers are comparable only when whole"
        )
