"""Numbered files that grow one episode at a time and are readable at any time.

Each new episode is written to a separate file; these files are the tail of the series. Closing joins the tail: the
joined file replaces the first one, and the caller removes the others once nothing points to them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from robotics.data.features import DTYPES, IMAGES, SUCCESS, complete_features, names_of_feature
from robotics.data.layout import DATA_PATH, INFO_PATH, VIDEO_PATH, numbered_files
from robotics.data.tables import count_rows, read_schema, read_table, write_table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa


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
    fps: float = 0  # of a video, whose rows hold the times of an episode in the file; else 0
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
        # the joined file takes the number of the first one; the numbers of the others become free again
        self.number -= len(tail) - 1
        if self.join is not None and len(tail) > 1:
            self.join([segment.path for segment in tail], tail[0].path)
        frames = 0
        for segment in tail:
            segment.row.update(self.pointers(self.number - 1) | self._times(frames, segment.row["length"]))
            frames += segment.row["length"]
        # not removed here: until the changed rows are on disk, a reader still follows the old ones to these files
        return [segment.path for segment in tail[1:]]

    def _times(self, start: int, length: int) -> dict[str, float]:
        if not self.fps:
            return {}
        times = {"from": start / self.fps, "to": (start + length) / self.fps}
        return {f"{self.prefix}/{name}_timestamp": time for name, time in times.items()}


def check_appendable(
    folder: Path, info: Mapping[str, Any], fps: float | None, features: Mapping[str, Any] | None, robot_type: str | None
) -> None:
    """Reject appending to a dataset whose features, rate or robot differ from the given ones."""
    theirs = {key: (one["dtype"], list(one["shape"])) for key, one in info["features"].items()}
    ours = theirs
    if features is not None:
        ours = {key: (one["dtype"], list(one["shape"])) for key, one in complete_features(features).items()}
    different = [key for key in ours | theirs if ours.get(key) != theirs.get(key) and key != SUCCESS]
    if different:
        raise UserError(f"{folder} has other features than asked for: {', '.join(different)}")
    for key, feature in (features or {}).items():
        own, named = names_of_feature(feature), names_of_feature(info["features"].get(key, {}))
        if own and named and own != named and feature["dtype"] not in IMAGES:
            raise UserError(f"{folder} has {key} with the entries {', '.join(named)}, not {', '.join(own)}")
    for key, wanted in (("fps", fps), ("robot_type", robot_type)):
        if wanted is not None and info.get(key) != wanted:
            raise UserError(f"{folder} has {key} {info.get(key)!r}, not {wanted!r}")
    unknown = [key for key, (dtype, _) in theirs.items() if dtype not in (*IMAGES, *DTYPES, "string")]
    if unknown:
        raise UserError(
            f"{folder} has {unknown[0]} of dtype {theirs[unknown[0]][0]!r}, which this writer does not write"
        )
    for key, pattern in (("data_path", DATA_PATH), ("video_path", VIDEO_PATH)):
        if (info.get(key) or pattern) != pattern:
            raise UserError(f"{folder / INFO_PATH} has {key} {info[key]!r}; this writer appends to {pattern!r} only")


def row_schema(folder: Path) -> pa.Schema | None:
    """Columns of the rows in `meta/episodes`, taken from the first file as in lerobot; None if there are no rows."""
    files = numbered_files(folder / "meta/episodes", ".parquet")
    return read_schema(files[0]).remove_metadata() if files else None


def aligned_rows(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Rows converted to the existing columns and types; missing columns are null."""
    import pyarrow as pa

    if schema is None:
        return table
    for column in schema:
        if column.name not in table.column_names:
            table = table.append_column(column.name, pa.nulls(len(table), column.type))
    return table.select(schema.names).cast(schema)


def remove_leftovers(series: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    """Remove files that no row points to: interruptions leave them behind, and readers would read them as frames."""
    folder = series.folder / series.prefix
    used = {series.path(series.number_in(row)) for row in rows}
    for path in [*numbered_files(folder, series.suffix), *folder.glob("chunk-*/.*.partial.*")]:
        if path not in used:
            path.unlink()


def remove_joined(data: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    """Remove frames from joined files whose rows do not point there yet.

    After a join and before the rows are updated, episodes are both in the joined file and in their separate files.
    Extra images in a video are harmless, but readers rely on the index of a frame among all frames.
    """
    held: dict[Path, list[Mapping[str, Any]]] = {}
    for row in rows:
        held.setdefault(data.path(data.number_in(row)), []).append(row)
    for path, episodes in held.items():
        if count_rows(path) > sum(row["length"] for row in episodes):
            numbers = [row["episode_index"] for row in episodes]
            write_table(read_table(path, filters=[("episode_index", "in", numbers)]), path)
