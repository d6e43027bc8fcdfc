"""Finding a benchmark's files in a user's copy, and reading their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.files import expanded, is_file
from mmrl.gui.benchmarks.annotations import Annotation, RowError
from mmrl.gui.benchmarks.layout import Benchmark, Layout, RowContext
from mmrl.gui.tables import image_size
from mmrl.hub.tables import Row, read_rows

if TYPE_CHECKING:
    from mmrl.gui.coords import Size

LANGUAGES = ("en", "cn")
DEPTH = 3
"""Folders above a single annotation file in which its images are looked for."""


@dataclass(frozen=True)
class BenchmarkFiles:
    """A user's copy of a benchmark."""

    benchmark: Benchmark
    layout: Layout
    files: tuple[Path, ...]
    """Annotation files in the published order."""
    image_roots: tuple[Path, ...]
    """Folders in which an image's path may start, the most likely first."""
    companion: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What the benchmark's second file says about samples."""


def locate(benchmark: Benchmark, path: str, images: str | None = None) -> BenchmarkFiles:
    """Find the annotation files and image folders of a copy."""
    place = expanded(path)
    if images is not None and not expanded(images).is_dir():
        raise UserError(f"{benchmark.title}: the image folder {images} does not exist")
    found = _one_file(benchmark, place) if is_file(place) else _in_folder(benchmark, place)
    if found is None:
        raise UserError(_nothing(benchmark, place))
    layout, files, roots = found
    folders = [root / name for root in roots for name in layout.images]
    companion = next((read for root in roots if benchmark.companion and (read := benchmark.companion(root))), {})
    given = () if images is None else (expanded(images),)
    return BenchmarkFiles(benchmark, layout, files, given or tuple(folders), companion)


def read_annotations(found: BenchmarkFiles, language: str = "en") -> Iterator[Annotation | tuple[str, str]]:
    """Read all rows of a copy."""
    for file in found.files:
        for number, row in enumerate(read_rows(str(file), "test", None), start=1):
            context = RowContext(file, number, row.place, found.layout.form, language, found.companion)
            yield _read(found.layout, row, context)


def _read(layout: Layout, row: Row, context: RowContext) -> Annotation | tuple[str, str]:
    if row.problem is not None:
        return row.place, row.problem
    try:
        return layout.read(row.cells, context)
    except RowError as error:
        return row.place, str(error)


class ImageFolder:
    """The images of a copy, by the paths that its rows name."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._sizes: dict[Path, Size] = {}

    def resolve(self, image: Any) -> Any:
        """The file that a row names, or the image that it holds."""
        if not isinstance(image, str):
            return image
        for root in self.roots:
            if is_file(root / image):
                return root / image
        looked = ", ".join(str(root) for root in self.roots[:2])
        raise RowError(f"there is no image {image} in {looked or 'any folder'}")

    def size(self, image: Any) -> Size:
        """(width, height) of an image as `resolve` returned it, from its header alone where it is a file."""
        if isinstance(image, Path) and image in self._sizes:
            return self._sizes[image]
        size = _size(image)
        if isinstance(image, Path):
            self._sizes[image] = size
        return size


def _size(image: Any) -> Size:
    source = image.read() if hasattr(image, "read") else image
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path")
    try:
        return image_size(source)
    except Exception as error:  # Pillow's readers raise OSError, ValueError, SyntaxError, DecompressionBombError, ...
        name = image if isinstance(image, Path) else "its image"
        raise RowError(f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from None


Found = tuple[Layout, tuple[Path, ...], list[Path]]


def _one_file(benchmark: Benchmark, file: Path) -> Found | None:
    """The layout of a file by its ending; images may lie beside it or in a folder above."""
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


def _nothing(benchmark: Benchmark, place: Path) -> str:
    if not place.exists():
        return f"{benchmark.title}: {place} does not exist; give the folder of your copy, or one annotation file"
    expected = "; or ".join(", ".join(layout.files) for layout in benchmark.layouts)
    return f"{benchmark.title}: {place} holds none of its annotation files; expected {expected}"
