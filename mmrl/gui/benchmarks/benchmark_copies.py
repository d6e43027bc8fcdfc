"""A user's copy of a benchmark: its files, its samples (unaltered), and a check of its boxes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.files import expanded, is_file
from mmrl.gui.benchmarks.annotations import Annotation, RowContext, RowError, make_target
from mmrl.gui.benchmarks.benchmark_table import BENCHMARKS, OWN, Benchmark, BenchmarkLayout, find_benchmark, recognise
from mmrl.gui.grounding.conventions import BoxForm, Convention, FormedBox, fit_convention, has_area, inside
from mmrl.gui.grounding.coords import Box, Size
from mmrl.gui.grounding.samples import AnyOf, GroundingSample, Polygon, Refusal, Target, image_size
from mmrl.hub.tables import read_rows

LOGGER = logging.getLogger("mmrl")
DEPTH = 3
"""Parent folders of a single annotation file in which to look for its images."""
Problem = tuple[str, str]
"""A row's location and its problem."""


@dataclass
class BenchmarkConfig:
    """A user's copy of a published benchmark."""

    benchmark: str = MISSING
    """Name of the benchmark: screenspot, screenspot_v2, screenspot_pro, mmbench_gui_l2, ui_vision, osworld_g,
    osworld_g_refined or ui_i2e."""
    path: str = MISSING
    """Folder of the copy, or one of its annotation files."""
    images: str | None = rare(None)
    """Folder of the images. Default: the published location in the copy."""
    language: str = rare(choice("en", ("en", "cn")))
    """Language of the instructions, en or cn; only ScreenSpot-Pro has both."""
    max_samples: int = rare(bounded(0, at_least=0))
    """Use only the first N samples, for a trial; 0 = all."""


@dataclass
class Validation:
    """Findings in a copy of a benchmark."""

    benchmark: Benchmark
    files: tuple[Path, ...]
    rows: int = 0
    malformed: list[Problem] = field(default_factory=list)
    """Rows that cannot be evaluated."""
    suspicious: list[Problem] = field(default_factory=list)
    """Boxes that are evaluated as published but look wrong."""
    convention: Convention | None = None
    """None if there is no box."""
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    """Error that training would raise for custom data; empty if it accepts them."""

    @property
    def is_usable(self) -> bool:
        """Whether every row can be evaluated and the boxes mean what they are declared to mean."""
        right = self.convention is None or self.convention.verdict in ("right", "ambiguous")
        return bool(self.rows) and not self.malformed and (not self.refusal if self.benchmark is OWN else right)


@dataclass(frozen=True)
class BenchmarkFiles:
    """Files of a copy."""

    benchmark: Benchmark
    layout: BenchmarkLayout
    files: tuple[Path, ...]
    """Annotation files in the published order."""
    image_roots: tuple[Path, ...]
    """Folders that an image path may be relative to, most likely first."""
    companion: Mapping[str, tuple[str, ...]]
    """Columns of the benchmark's second file, by sample id."""

    def annotations(self, language: str = "en") -> Iterator[Annotation | Problem]:
        """All rows of the copy, in order."""
        for file in self.files:
            for number, row in enumerate(read_rows(str(file), "test", None), start=1):
                context = RowContext(file, number, row.place, self.layout.form, language, self.companion)
                try:
                    yield (row.place, row.problem) if row.problem else self.layout.read(row.cells, context)
                except RowError as error:
                    yield row.place, str(error)


def load_benchmark(config: BenchmarkConfig) -> list[GroundingSample]:
    """Read the samples of a copy; raises UserError for a missing file, a malformed row or boxes of another form."""
    benchmark = find_benchmark(config.benchmark)
    copy = locate(benchmark, config.path, config.images)
    images = ImageFolder(copy.image_roots)
    samples: list[GroundingSample] = []
    problems: list[Problem] = []
    boxes: list[FormedBox] = []
    places: list[str] = []
    ids: set[str] = set()
    for row in copy.annotations(config.language):
        if config.max_samples and len(samples) >= config.max_samples:
            break
        if not isinstance(row, Annotation):
            problems.append(row)
            continue
        try:
            image: Any = images.resolve(row.image)
            original_wh = images.size(image)
        except RowError as error:
            problems.append((row.place, str(error)))
            continue
        # boxes refer to the annotated size, even where the stored image has another
        size = row.size or original_wh
        boxes += [(box, row.form, size) for box in row.boxes if row.form is not None]
        # one place per box: a row may have several boxes
        places += [row.place] * (len(boxes) - len(places))
        name = f"{row.id} ({row.place})" if row.id in ids else row.id  # some copies repeat ids
        ids.add(name)
        meta = {"id": name, "place": row.place, "groups": row.groups, "suspicious": box_problem(row, size) or ""}
        target = make_target(row, original_wh)
        samples.append(GroundingSample(image, original_wh, row.instruction, target, meta=meta))
    if problems:
        (place, reason), count = problems[0], len(problems)
        raise UserError(
            f"{benchmark.title}: {'1 row is' if count == 1 else f'{count} rows are'} not in its format; the first: "
            f"{place}: {reason}; `mmrl gui validate {config.path} --benchmark {benchmark.name}` lists them"
        )
    if not samples:
        raise UserError(f"{benchmark.title}: {', '.join(map(str, copy.files))} has no rows")
    convention = fit_convention(copy.layout.form, boxes, places)
    if convention is not None and convention.verdict in ("mixed", "wrong", "thousandths"):
        # rows that say their own unit are read in it, so that the copy may be right
        if convention.is_refused and all(form is copy.layout.form for _, form, _ in boxes):
            raise UserError(
                f"{benchmark.title}: {convention.sentence}; set eval_data.NAME.path to a copy whose boxes are "
                f"{copy.layout.form}, as published"
            )
        LOGGER.warning("%s: %s", benchmark.title, convention.sentence)
    return samples


def validate(path: str, benchmark: str | None = None, images: str | None = None) -> Validation:
    """Check a copy of a benchmark, one of its annotation files, or a file of custom grounding data.

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
    found = find_benchmark(benchmark) if benchmark else _recognised(path)
    if found is OWN:
        return _validate_own(path, images)
    copy = locate(found, path, images)
    result = Validation(copy.benchmark, copy.files)
    folder = None
    if not copy.layout.images or any(root.is_dir() for root in copy.image_roots):
        folder = ImageFolder(copy.image_roots)
    else:
        result.notes.append(
            "no image folder was found, so images are not checked and boxes are only checked against the annotated "
            "sizes"
        )
    boxes: list[FormedBox] = []
    places: list[str] = []
    for row in copy.annotations():
        result.rows += 1
        if not isinstance(row, Annotation):
            result.malformed.append(row)
            continue
        try:
            stored = None if folder is None else folder.size(folder.resolve(row.image))
        except RowError as error:
            result.malformed.append((row.place, str(error)))
            continue
        if row.size is not None and stored is not None and row.size != stored:
            (aw, ah), (sw, sh) = row.size, stored
            swapped = "; the sides are swapped, width comes first" if (ah, aw) == stored else ""
            problem = f"annotated as {aw} x {ah}, the image is {sw} x {sh}{swapped}"
            result.suspicious.append((row.place, problem))  # published copies are evaluated all the same
        size = row.size or stored
        # without images and without an annotated size there is nothing to compare with
        if size is None:
            continue
        if wrong := box_problem(row, size):
            result.suspicious.append((row.place, wrong))
        boxes += [(box, row.form, size) for box in row.boxes if row.form is not None]
        places += [row.place] * (len(boxes) - len(places))
    result.convention = fit_convention(copy.layout.form, boxes, places)
    published = copy.benchmark.size
    if published is not None and published != result.rows:
        result.notes.append(
            f"{result.rows} rows, but {copy.benchmark.title} has {published}; results are only comparable on the "
            "complete benchmark"
        )
    return result


def _validate_own(path: str, images: str | None) -> Validation:
    """Check own grounding data with the code that training reads it with, all rows of it."""
    from mmrl.gui.grounding.grounding_tasks import GroundingSettings, sample_of, write_tasks
    from mmrl.vlm.data.dataset import DataConfig, load_tasks
    from mmrl.vlm.model.model_config import ModelConfig

    loaded = load_tasks(DataConfig(path=path, image_dir=images, on_bad_row="skip"))
    settings = GroundingSettings()
    written = write_tasks(loaded.tasks, settings, settings.resize(ModelConfig()), training=True)
    result = Validation(OWN, (expanded(path),), len(loaded.tasks) + len(loaded.problems))
    result.malformed = [(error.place, error.message) for error in (*loaded.problems, *written.bad)]
    result.convention = written.convention
    result.refusal = written.refusal
    result.notes = written.doubts
    # a data set that is refused as a whole leaves out nothing in particular
    left_out = set() if written.refusal else {error.place for error in written.dropped}
    if left_out:
        reason = written.dropped[0].message
        result.notes.append(f"training skips {len(written.dropped)} of {result.rows} rows: {reason}")
    bad = {error.place for error in written.bad}
    for task in (task for task in loaded.tasks if task.id not in bad):
        sample = sample_of(task)
        wrong = box_problem(_annotation(task.id, sample.target), sample.original_wh)
        if task.id in left_out:
            wrong = f"training skips it; {wrong}" if wrong else "training skips it"
        if wrong:
            result.suspicious.append((task.id, wrong))
    return result


def _annotation(place: str, target: Target) -> Annotation:
    """A target of own data as one of a benchmark, for the same test of it."""
    parts = target.targets if isinstance(target, AnyOf) else (target,)
    boxes = [list(part) for part in parts if isinstance(part, Box)]
    if boxes:
        return Annotation(place, place, None, "", boxes[0], BoxForm.XYXY, other_boxes=boxes[1:])
    corners = [number for part in parts if isinstance(part, Polygon) for point in part.points for number in point]
    return Annotation(place, place, None, "", corners or Refusal(), None)


def locate(benchmark: Benchmark, path: str, images: str | None = None) -> BenchmarkFiles:
    """Find the annotation files and image folders of a copy; raises UserError."""
    place = expanded(path)
    if images is not None and not expanded(images).is_dir():
        raise UserError(f"{benchmark.title}: the image folder {images} does not exist")
    found = _one_file(benchmark, place) if is_file(place) else _in_folder(benchmark, place)
    if found is None:
        if not place.exists():
            raise UserError(
                f"{benchmark.title}: {place} does not exist; give the folder of your copy, or one annotation file"
            )
        expected = "; or ".join(", ".join(layout.files) for layout in benchmark.layouts)
        raise UserError(f"{benchmark.title}: {place} contains none of its annotation files; expected {expected}")
    layout, files, roots = found
    folders = tuple(root / name for root in roots for name in layout.images)
    # the second file of a benchmark, in the first folder that has it
    companion = next((read for root in roots if benchmark.companion and (read := benchmark.companion(root))), {})
    return BenchmarkFiles(benchmark, layout, files, folders if images is None else (expanded(images),), companion)


class ImageFolder:
    """The images of a copy, by the paths in its rows."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        # copies show the same screen in many rows
        self._sizes: dict[Path, Size] = {}

    def resolve(self, image: Any) -> Any:
        """The image file that a row refers to, or the image that it contains; raises RowError."""
        if not isinstance(image, str):
            return image
        for root in self.roots:
            if is_file(root / image):
                return root / image
        looked = ", ".join(str(root) for root in self.roots[:2])
        raise RowError(f"there is no image {image} in {looked or 'any folder'}")

    def size(self, image: Any) -> Size:
        """(width, height) of a resolved image, only from the header if it is a file; raises RowError."""
        if isinstance(image, Path) and image in self._sizes:
            return self._sizes[image]
        source = image.read() if hasattr(image, "read") else image
        if isinstance(source, Mapping):
            source = source.get("bytes") or source.get("path")
        try:
            size = image_size(source)
        except Exception as error:  # Pillow raises OSError, ValueError, SyntaxError, DecompressionBombError, ...
            name = image if isinstance(image, Path) else "its image"
            raise RowError(f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from None
        if isinstance(image, Path):
            self._sizes[image] = size
        return size


def box_problem(annotation: Annotation, size: Size) -> str | None:
    """Reason why a target looks wrong in an image of the given (width, height); None if it looks right."""
    if isinstance(annotation.target, Refusal):
        return None
    if annotation.form is None:
        width, height = size
        xs, ys = annotation.target[0::2], annotation.target[1::2]
        outside = any(not 0 <= x <= width for x in xs) or any(not 0 <= y <= height for y in ys)
        return f"a corner of the polygon is outside the image of {width} x {height}" if outside else None
    for box in annotation.boxes:
        text = f"[{', '.join(f'{number:g}' for number in box)}] ({annotation.form})"
        if not has_area(box, annotation.form):
            return f"the box {text} has no area"
        if not inside(box, annotation.form, size):
            return f"the box {text} extends outside the image of {size[0]} x {size[1]}"
    return None


def _recognised(path: str) -> Benchmark:
    file = Path(path).expanduser()
    if file.is_dir():
        raise UserError(f"{file} is a folder; specify the benchmark with --benchmark: {', '.join(BENCHMARKS)}")
    first = next((row.cells for row in read_rows(path, "test", None) if row.cells), {})
    return recognise(file, first)


Found = tuple[BenchmarkLayout, tuple[Path, ...], list[Path]]


def _one_file(benchmark: Benchmark, file: Path) -> Found | None:
    """The layout of a file by its ending; images may be next to it or in a parent folder."""
    for layout in benchmark.layouts:
        if file.suffix.lower() in {Path(pattern).suffix for pattern in layout.files}:
            return layout, (file,), [file.parent, *list(file.absolute().parent.parents)[: DEPTH - 1]]
    return None


def _in_folder(benchmark: Benchmark, folder: Path) -> Found | None:
    for layout in benchmark.layouts:
        for name in benchmark.roots:
            root = folder / name
            files = [file for pattern in layout.files for file in sorted(root.glob(pattern))]
            if files:
                return layout, tuple(files), [root]
    return None
