"""Numbered files that grow by an episode at a time and are readable at any time.

Each new episode gets a file of its own; such files are the tail of the series. Closing joins the tail: the joined file
replaces the first of them, and the caller removes the others once nothing points to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class _Segment:
    """A file of the tail, and the row of its episode."""

    path: Path
    size: int
    row: dict[str, Any]


@dataclass
class FileSeries:
    """Files of one kind: data, episode rows, or the videos of a camera."""

    folder: Path  # of the dataset
    prefix: str  # of the files, and of the columns that point to them
    suffix: str  # .parquet or .mp4
    limit: int  # bytes that a file of several episodes does not exceed
    chunk: int  # files in a folder chunk-XXX
    join: Callable[[Sequence[Path], Path], None] | None = None  # into one, maybe the first; None: the caller does it
    fps: int = 0  # of a video, whose rows hold the times of an episode in the file; else 0
    number: int = 0  # of the next file
    tail: list[_Segment] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the tail."""
        return sum(segment.size for segment in self.tail)

    def path(self, number: int) -> Path:
        """Path of a file by its number over all chunks: `<prefix>/chunk-XXX/file-YYY<suffix>`."""
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
        """Add the file with the next number, already written, to the tail; `row` gets the columns that point to it."""
        path = self.path(self.number)
        row |= self.pointers(self.number) | self._times(0, row["length"])
        self.tail.append(_Segment(path, path.stat().st_size, row))
        self.number += 1

    def undo(self, row: Mapping[str, Any]) -> None:
        """Drop the last file if it belongs to an unfinished episode, `row`."""
        if self.tail and self.tail[-1].row is row:
            self.tail.pop().path.unlink(missing_ok=True)
            self.number -= 1

    def close(self) -> list[Path]:
        """Join the tail and point its rows to the joined file; returns the files that nothing needs any more."""
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
