"""Writes LeRobotDataset v3.0 one episode at a time into numbered files; the process may be killed at any point.

An unfinished parquet or mp4 file is unreadable, so each episode is first written to separate files and exists once
`meta/info.json` counts it. These files are merged by `finish`, or when a file reaches its size limit: the merged file
replaces the first one, `meta/episodes` is rewritten to point to it, and only then are the others deleted. At any point
`LeRobotReader` finds each finished episode exactly once. lerobot's reader reads every file, so it needs `finish`, or a
writer that opens the dataset again and removes leftovers.

Deviations from lerobot 0.6.1: H.264 at crf 18 instead of AV1 at crf 30, because it plays everywhere and every PyAV
encodes it; `meta/stats.json` has the quantiles of all frames instead of the mean of the episodes'; a dataset made here
stores success. Datasets made by lerobot are appended to as they are, and lerobot appends to those made here.

Numbered files that grow one episode at a time and are readable at any time.

Each new episode is written to a separate file; these files are the tail of the series. Closing joins the tail: the
joined file replaces the first one, and the caller removes the others once nothing points to them any more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError, require_packages
from mmrl.hub.video_writing import copy_video, write_mp4
from robotics.data.dataset_card import write_recording_card
from robotics.data.features import (
    ACTION,
    DTYPES,
    IMAGES,
    STATE,
    SUCCESS,
    bookkeeping,
    by_feature,
    checked_columns,
    complete_features,
    frame_tasks,
    is_depth,
    names_of_feature,
)
from robotics.data.images import DepthCodes, depth_unit_of, describe_video, metres_of, write_depth_mp4
from robotics.data.layout import (
    DATA_PATH,
    INFO_PATH,
    STATS_PATH,
    TASKS_PATH,
    VIDEO_PATH,
    StorageSettings,
    hold_folder,
    kept_settings,
    new_info,
    numbered_files,
    write_json,
)
from robotics.data.reader import LeRobotReader
from robotics.data.statistics import (
    Statistics,
    aggregate_statistics,
    depth_statistics,
    image_statistics,
    vector_statistics,
)
from robotics.data.tables import (
    column_array,
    count_rows,
    episode_table,
    read_schema,
    read_table,
    task_table,
    write_table,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import ArrayLike, NDArray


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
        """Join the tail and point its rows to the joined file; returns the files that are no longer needed."""
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
        raise UserError(f"{folder} has different features from the requested ones: {', '.join(different)}")
    for key, feature in (features or {}).items():
        own, named = names_of_feature(feature), names_of_feature(info["features"].get(key, {}))
        if own and named and own != named and feature["dtype"] not in IMAGES:
            raise UserError(f"{folder} has {key} with the entries {', '.join(named)}, not {', '.join(own)}")
        before, now = (one.get("info") or {} for one in (info["features"].get(key, {}), feature))
        # the same number would mean another command
        for about in ("units", "low", "high"):
            if about in before and about in now and before[about] != now[about]:
                raise UserError(f"{folder} has {key} with {about} {before[about]}, not {now[about]}")
    for key, wanted in (("fps", fps), ("robot_type", robot_type)):
        if wanted is not None and info.get(key) != wanted:
            raise UserError(f"{folder} has {key} {info.get(key)!r}, not {wanted!r}")
    unknown = [key for key, (dtype, _) in theirs.items() if dtype not in (*IMAGES, *DTYPES, "string")]
    if unknown:
        raise UserError(
            f"{folder} has {unknown[0]} of dtype {theirs[unknown[0]][0]!r}, which this writer does not support"
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


MEGABYTE = 1024**2


class EpisodeWriter:
    """Writes episodes to a folder, after any existing ones.

        features = robot_features(state=8, action=7, cameras={"front": (128, 128)})
        with EpisodeWriter("demos", fps=20, features=features, robot_type="panda") as writer:
            writer.add_episode(states, actions, {"front": frames}, task="stack the cubes", success=True)

    One writer holds the folder until it is finished; another one is refused. An existing dataset keeps the limits it
    was made with; `EpisodeWriter("demos")` appends to it.

    Args:
        folder: of the dataset; made when missing.
        fps: frames a second, also a fraction such as 12.5; that of the dataset when None.
        features: from `robot_features`, or more; those of the dataset when None.
        robot_type: that of the dataset when None.
        settings: sizes of files and the encoder; `StorageSettings()` when None.

    Raises:
        UserError: fps or a feature is invalid or missing, or the existing dataset has others; another writer holds the
            folder; pyarrow is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fps: float | None = None,
        features: Mapping[str, Any] | None = None,
        robot_type: str | None = None,
        settings: StorageSettings | None = None,
    ) -> None:
        require_packages("a LeRobotDataset", ["pyarrow"], "vla")
        if fps is not None and not (math.isfinite(fps) and fps > 0):
            raise UserError(f"fps is {fps}; expected frames per second, above 0")
        self.folder = Path(folder)
        self.settings = settings or StorageSettings()
        self._tasks: list[str] = []
        self._stats: dict[str, Statistics] = {}
        self._rows: list[dict[str, Any]] = []
        self._row_schema: pa.Schema | None = None
        self._frames: dict[str, list[Any]] = {}
        self._finished = False
        exists = (self.folder / INFO_PATH).exists()
        if not exists and (fps is None or features is None):
            raise UserError(f"no dataset found in {self.folder}; pass fps and features to create one")
        complete = {} if exists else complete_features(features or {})
        # before anything is read: another writer may be changing it
        self._release = hold_folder(self, self.folder)
        try:
            # read again: the folder may have been made while the lock was taken
            if (self.folder / INFO_PATH).exists():
                reader = LeRobotReader(self.folder)
                check_appendable(self.folder, reader.info, fps, features, robot_type)
                self._info = dict(reader.info)
                self._continue(reader)
            else:
                self._info = new_info(_rate(fps or 0), complete, robot_type, self.settings)
                self._open_series()
                write_json(self._info, self.folder / INFO_PATH)
        except BaseException:
            self._release()
            raise

    @property
    def features(self) -> dict[str, Any]:
        """Features of the dataset, as in `meta/info.json`."""
        features: dict[str, Any] = self._info["features"]
        return features

    @property
    def fps(self) -> float:
        """Frames per second."""
        return _rate(self._info["fps"])

    @property
    def episodes(self) -> int:
        """Number of episodes in the dataset."""
        return int(self._info["total_episodes"])

    def add_frame(
        self,
        state: ArrayLike | None,
        action: ArrayLike,
        images: Mapping[str, ArrayLike] | None = None,
        extra: Mapping[str, ArrayLike] | None = None,
    ) -> None:
        """Keep a frame in memory until `save_episode`.

        Args:
            state: (S,) before the action; None if the dataset has no state.
            action: (A,).
            images: (H, W, 3) uint8 by camera, before the action; depth (H, W) as in `add_episode`.
            extra: values of the other features by name.

        Raises:
            ValueError: the frame has other parts than those before it.
        """
        frame = {STATE: state, ACTION: action, **by_feature(self.features, images or {}), **(extra or {})}
        # copied: callers reuse their buffers
        frame = {key: np.array(value) for key, value in frame.items() if value is not None}
        if self._frames and set(frame) != set(self._frames):
            raise ValueError(f"the frame has {sorted(frame)}; the previous frames have {sorted(self._frames)}")
        for key, value in frame.items():
            self._frames.setdefault(key, []).append(value)

    def save_episode(self, task: str | Sequence[str], success: bool | None) -> int:
        """Write the frames kept by `add_frame` as an episode; arguments and result as in `add_episode`."""
        columns = {key: np.stack(values) for key, values in self._frames.items()}
        number = self._add(columns, task, success)
        self._frames = {}
        return number

    def discard_frames(self) -> None:
        """Forget the frames kept by `add_frame`."""
        self._frames = {}

    def add_episode(
        self,
        states: ArrayLike | None,
        actions: ArrayLike,
        images: Mapping[str, NDArray[Any]] | None,
        task: str | Sequence[str],
        success: bool | None,
        extra: Mapping[str, ArrayLike] | None = None,
    ) -> int:
        """Write an episode; it is in the dataset when this returns.

        Args:
            states: (T, S) before each action; None if the dataset has no state.
            actions: (T, A).
            images: (T, H, W, 3) uint8 by camera, before each action; by depth camera (T, H, W) uint16 millimetres or
                float32 metres, the same in all episodes.
            task: instruction, or T of them, one for each frame.
            success: whether the task was solved; then `next.success` is True in the last frame. None if the dataset,
                made elsewhere, does not store it.
            extra: (T, ...) values of the other features by name.

        Returns:
            Index of the episode.

        Raises:
            ValueError: a feature is missing, unknown, not finite, or of another shape, type or number of frames, or
                success does not fit what the dataset stores.
        """
        given = {STATE: states, ACTION: actions, **by_feature(self.features, images or {}), **(extra or {})}
        columns = {key: np.asarray(value) for key, value in given.items() if value is not None}
        return self._add(columns, task, success)

    def finish(self) -> None:
        """Join the files, compute the statistics of all frames and close; called again it does nothing.

        Raises:
            ValueError: frames of `add_frame` are in no episode yet; the writer stays open.
        """
        if self._finished:
            return
        self._check_saved()
        self._finished = True
        self._seal()
        if self.episodes:
            self._stats |= self._whole_statistics()
            self._write_stats(self._stats)
            write_recording_card(self.folder, self._info, self._tasks)
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        # `finish` would refuse unsaved frames, although an error in the block may be why they are unsaved
        frames, self._frames = self._frames, {}
        self.finish()
        self._frames = frames
        if kind is None:
            self._check_saved()

    def _check_saved(self) -> None:
        count = len(next(iter(self._frames.values()), []))
        if count:
            raise ValueError(
                f"{count} frames from add_frame have not been saved to {self.folder}; call save_episode(task, "
                "success), or discard_frames() to drop them"
            )

    def _add(self, given: dict[str, NDArray], task: str | Sequence[str], success: bool | None) -> int:
        if self._finished:
            raise ValueError(f"the writer of {self.folder} is finished; create a new one to append episodes")
        columns = checked_columns(given, self.features)
        self._check_success(success)
        number, first = self.episodes, int(self._info["total_frames"])
        length = len(next(iter(columns.values())))
        tasks = frame_tasks(task, length)
        numbers = [self._task_number(one) for one in tasks]
        columns |= bookkeeping(self.features, number, first, self.fps, success, numbers)
        row: dict[str, Any] = {"episode_index": number, "tasks": list(dict.fromkeys(tasks)), "length": length}
        row |= {"success": None if success is None else bool(success)}
        row |= {"dataset_from_index": first, "dataset_to_index": first + length}
        try:
            self._write(row, columns)
        except BaseException:
            for series in (self._meta, self._data, *self._videos.values()):
                # a half-written episode must not shift the files of the next one
                series.undo(row)
            raise
        if self._meta.size > self._meta.limit:
            self._seal()
        return number

    def _check_success(self, success: bool | None) -> None:
        stored = SUCCESS in self.features or self._row_schema is None or "success" in self._row_schema.names
        if stored and success is None:
            raise ValueError(f"success is None; {self.folder} stores whether the task succeeded: pass True or False")
        if not stored and success is not None:
            raise ValueError(f"{self.folder} was made without {SUCCESS} and does not store success; pass None")

    def _task_number(self, task: str) -> int:
        if task not in self._tasks:
            self._tasks.append(task)
            # before the frames refer to its index
            write_table(task_table(self._tasks), self.folder / TASKS_PATH)
        return self._tasks.index(task)

    def _write(self, row: dict[str, Any], columns: Mapping[str, NDArray]) -> None:
        # videos first, `meta/info.json` last: until that counts it, the episode does not exist
        for key, series in self._videos.items():
            self._write_video(key, columns[key], series.path(series.number))
            self._place(series, row)
        write_table(episode_table(columns, self.features), self._data.path(self._data.number))
        self._place(self._data, row)
        stored = {key: one for key, one in columns.items() if self.features[key]["dtype"] != "string"}
        statistics = {key: _statistics(self.features[key], one) for key, one in stored.items()}
        row |= {f"stats/{key}/{name}": one.tolist() for key, part in statistics.items() for name, one in part.items()}
        row |= self._meta.pointers(self._meta.number)
        write_table(_row_table([row], self._row_schema), self._meta.path(self._meta.number))
        self._meta.append(row)
        self._commit(row, statistics, columns)

    def _write_video(self, key: str, frames: NDArray, path: Path) -> None:
        if is_depth(self.features[key]):
            codes = DepthCodes.from_info(self.features[key].get("info"))
            write_depth_mp4(path, metres_of(frames), self.fps, codes)
        else:
            write_mp4(path, frames, self.fps, self.settings.video)

    def _place(self, series: FileSeries, row: dict[str, Any]) -> None:
        written = series.path(series.number)
        # joined before it grows over the limit, not after
        if series.tail and series.size + written.stat().st_size > series.limit:
            self._join([series])
            target = series.path(series.number)
            target.parent.mkdir(parents=True, exist_ok=True)
            written.replace(target)
        series.append(row)

    def _commit(
        self, row: dict[str, Any], statistics: Mapping[str, Statistics], columns: Mapping[str, NDArray]
    ) -> None:
        known = self._stats
        stats = known | {
            key: aggregate_statistics([known[key], part]) if key in known else part for key, part in statistics.items()
        }
        self._write_stats(stats)
        episodes = row["episode_index"] + 1
        info = self._info | {"total_episodes": episodes, "total_frames": row["dataset_to_index"]}
        info |= {"total_tasks": len(self._tasks), "splits": {"train": f"0:{episodes}"}}
        for key, feature in self.features.items():
            if feature["dtype"] in IMAGES:
                self._describe(key, feature, columns[key])
        # the moment at which the episode counts
        write_json(info, self.folder / INFO_PATH)
        # only now: a failed write must leave the old values
        self._info = info
        self._stats = stats
        self._rows.append(row)

    def _describe(self, key: str, feature: dict[str, Any], frames: NDArray) -> None:
        about = dict(feature.get("info") or {})
        if is_depth(feature):
            about.setdefault("depth_unit", depth_unit_of(frames))
        if feature["dtype"] == "video" and "video.codec" not in about:
            codes = DepthCodes.from_info(about).to_info() if is_depth(feature) else None
            about |= describe_video(self._videos[key].tail[-1].path, codes)
        if about:
            feature["info"] = about

    def _join(self, several: Iterable[FileSeries]) -> None:
        stale = [path for series in several for path in series.close()]
        if not self._rows or (not stale and len(self._meta.tail) == 1):
            return
        stale += self._meta.close()
        number = self._meta.number - 1
        for row in self._rows:
            row |= self._meta.pointers(number)
        # pointers first: until the rows name the joined file, readers still need the parts
        write_table(_row_table(self._rows, self._row_schema), self._meta.path(number))
        self._meta.number = number
        # One file with all rows of this writer, to be rewritten by the next join.
        self._meta.append(self._rows[0])
        # last: whenever the writer is killed, every row points to a file that exists
        for path in stale:
            path.unlink()

    def _seal(self) -> None:
        self._join([self._data, *self._videos.values()])
        self._rows = []
        self._meta.tail = []

    def _whole_statistics(self) -> dict[str, Statistics]:
        files = numbered_files(self.folder / "data", ".parquet")
        found = {}
        # over all frames: quantiles cannot be combined from those of the episodes
        for key, feature in self.features.items():
            if feature["dtype"] in DTYPES:
                parts = [column_array(read_table(path, columns=[key])[key]) for path in files]
                found[key] = vector_statistics(np.concatenate(parts))
        return found

    def _write_stats(self, stats: Mapping[str, Statistics]) -> None:
        content = {key: {name: one.tolist() for name, one in part.items()} for key, part in stats.items()}
        write_json(content, self.folder / STATS_PATH)

    def _open_series(self) -> None:
        data, video = int(self.settings.data_mb * MEGABYTE), int(self.settings.video_mb * MEGABYTE)
        chunk = self.settings.files_per_chunk
        self._data = FileSeries(self.folder, "data", ".parquet", data, chunk, _join_tables)
        self._meta = FileSeries(self.folder, "meta/episodes", ".parquet", data, chunk)
        self._videos = {
            key: FileSeries(self.folder, f"videos/{key}", ".mp4", video, chunk, copy_video, self.fps)
            for key, feature in self.features.items()
            if feature["dtype"] == "video"
        }

    def _continue(self, reader: LeRobotReader) -> None:
        self._tasks = list(reader.tasks)
        self._stats = dict(reader.stats)
        for key, feature in self.features.items():
            known = self._stats.get(key, {})
            # vectors are computed again from all frames; images only from those of new episodes
            if len(reader) and (known or feature["dtype"] in IMAGES) and "count" not in known:
                raise UserError(
                    f"{self.folder / STATS_PATH} does not say from how many frames of {key} it was computed, so "
                    "statistics of new episodes cannot be added; compute it again with lerobot"
                )
        self._row_schema = row_schema(self.folder)
        self.settings = kept_settings(self._info, self.settings)
        self._open_series()
        for series in (self._data, self._meta, *self._videos.values()):
            remove_leftovers(series, reader.episodes)
            # after all files that any episode uses
            series.number = max((series.number_in(row) + 1 for row in reader.episodes), default=0)
        remove_joined(self._data, reader.episodes)


def _rate(fps: float) -> float:
    """A rate as lerobot writes it, as a whole number where it is one."""
    return int(fps) if fps == int(fps) else float(fps)


def _row_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None) -> pa.Table:
    import pyarrow as pa

    return aligned_rows(pa.Table.from_pylist(list(rows)), schema)


def _statistics(feature: Mapping[str, Any], values: NDArray) -> Statistics:
    if feature["dtype"] not in IMAGES:
        return vector_statistics(values.astype(feature["dtype"]))
    return depth_statistics(values) if is_depth(feature) else image_statistics(values)


def _join_tables(paths: Sequence[Path], target: Path) -> None:
    write_table([read_table(path) for path in paths], target)
