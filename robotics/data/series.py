"""Numbered files that grow by an episode at a time and are readable at any moment.

Each new episode gets a file of its own; together such files are the tail of the series. Closing joins the tail: the
joined file takes the place of the first of them, and the others are left for the caller to remove once nothing points
to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Segment:
    """File of the tail, and the row of the episode in it."""

    path: Path
    size: int
    row: dict[str, Any]


@dataclass
class FileSeries:
    """Files of one kind: data, episode rows, or the videos of a camera."""

    folder: Path
    """Of the dataset."""
    prefix: str
    """Of the columns that point to these files, and of the files."""
    suffix: str
    """.parquet or .mp4."""
    limit: int
    """Bytes that a file of several episodes does not exceed."""
    chunk: int
    """Files in a folder chunk-XXX."""
    join: Callable[[Sequence[Path], Path], None] | None = None
    """Joins files into one, which may be the first of them; None where the caller writes the joined file."""
    fps: int = 0
    """Frames a second of a video, whose rows say where in the file an episode lies; else 0."""
    number: int = 0
    """Of the next file."""
    tail: list[_Segment] = field(default_factory=list)
    """Files that are not joined yet."""

    @property
    def size(self) -> int:
        """Bytes of the tail."""
        return sum(segment.size for segment in self.tail)

    def path(self, number: int) -> Path:
        """Path of a file by its number through all chunks: `<prefix>/chunk-XXX/file-YYY<suffix>`."""
        chunk, file = divmod(number, self.chunk)
        return self.folder / self.prefix / f"chunk-{chunk:03d}" / f"file-{file:03d}{self.suffix}"

    def pointers(self, number: int) -> dict[str, int]:
        """Columns of an episode that point to a file: `<prefix>/chunk_index` and `<prefix>/file_index`."""
        chunk, file = divmod(number, self.chunk)
        return {f"{self.prefix}/chunk_index": chunk, f"{self.prefix}/file_index": file}

    def number_in(self, row: Mapping[str, Any]) -> int:
        """Number of the file that a row points to."""
        return int(row[f"{self.prefix}/chunk_index"] * self.chunk + row[f"{self.prefix}/file_index"])

    def append(self, row: dict[str, Any]) -> None:
        """Take the file with the next number, which has been written, into the tail; `row` gets the columns to it."""
        path = self.path(self.number)
        row |= self.pointers(self.number) | self._times(0, row["length"])
        self.tail.append(_Segment(path, path.stat().st_size, row))
        self.number += 1

    def undo(self, row: Mapping[str, Any]) -> None:
        """Drop the last file where it is the one of an episode, `row`, that was not finished."""
        if self.tail and self.tail[-1].row is row:
            self.tail.pop().path.unlink(missing_ok=True)
            self.number -= 1

    def close(self) -> list[Path]:
        """Join the tail and point its rows to the joined file; the next number is the one behind it."""
        tail, self.tail = self.tail, []
        if not tail:
            return []
        self.number -= len(tail) - 1
        if self.join is not None and len(tail) > 1:
            self.join([segment.path for segment in tail], tail[0].path)
        frames = 0
        for segment in tail:
            segment.row.update(self.pointers(self.number - 1) | self._times(frames, segment.row["length"]))
            frames += segment.row["length"]
        return [segment.path for segment in tail[1:]]

    def _times(self, start: int, length: int) -> dict[str, float]:
        if not self.fps:
            return {}
        times = {"from": start / self.fps, "to": (start + length) / self.fps}
        return {f"{self.prefix}/{name}_timestamp": time for name, time in times.items()}
