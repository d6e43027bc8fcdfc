"""How a benchmark is published: its annotation files, its images, the meaning of its boxes, and how a row is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from mmrl.gui.benchmarks.annotations import Annotation, BoxForm

Cells: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class RowContext:
    """What a row's reader knows beside the row."""

    file: Path
    """The annotation file."""
    number: int
    """Number of the row in its file, from 1."""
    place: str
    """File and row, for messages."""
    form: BoxForm
    """Meaning of the boxes of this layout."""
    language: str = "en"
    """Language of the instructions."""
    companion: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What a second file says about samples, by their ids."""

    @property
    def default_id(self) -> str:
        """Name of a row that has none of its own."""
        return f"{self.file.stem}-{self.number}"


@dataclass(frozen=True)
class Layout:
    """One of the forms in which a benchmark is published."""

    files: tuple[str, ...]
    """Annotation files below the benchmark's folder, as patterns; every one that is there is read, in this order."""
    images: tuple[str, ...]
    """Folders of images below the benchmark's folder; the first that has the images is used. Empty: the rows hold
    them."""
    form: BoxForm
    """Meaning of the boxes."""
    read: Callable[[Cells, RowContext], Annotation]
    """Reads a row; raises RowError where it has another format."""


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark."""

    name: str
    """Name used in configurations."""
    title: str
    """Name that papers use."""
    source: str
    """Where it is published, and whose loader and metric are followed."""
    layouts: tuple[Layout, ...]
    """The forms in which it is published."""
    roots: tuple[str, ...] = ("",)
    """Folders below the given one in which the files may lie."""
    known_by: tuple[str, ...] = ()
    """Columns that only its rows have together."""
    columns: tuple[str, ...] = ()
    """Columns that its tables break results down by."""
    crosses: tuple[tuple[str, str], ...] = ()
    """Pairs of columns whose combinations its tables show."""
    details: tuple[str, ...] = ()
    """Further columns, for the written results only: they have many values."""
    macro: tuple[str, ...] = ()
    """Columns over whose cells its published average is a plain mean; empty: published averages are over samples."""
    size: int | None = None
    """Number of published samples; None where that is not known."""
    sorts_corners: bool = False
    """Whether the official metric sorts swapped corners."""
    companion: Callable[[Path], Mapping[str, tuple[str, ...]]] | None = None
    """Reads a second file of the benchmark's folder."""
