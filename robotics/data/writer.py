"""Writing of LeRobotDataset v3.0: an episode at a time, safe against a kill at any moment.

A parquet or mp4 file that still grows is unreadable, so each episode first gets files of its own and is there once
`meta/info.json` counts it. `finish`, and a file at its limit, join such files: the joined file takes the place of
the first, the rows of `meta/episodes` are replaced to point to it, and only then the others go. Whatever the moment
of a kill, `LeRobotReader` finds each finished episode once; lerobot's own reader, which takes all files it sees, does
so after `finish`, or after the dataset was opened for writing again, which removes what was left over.

Deviations from lerobot 0.4.4: H.264 at crf 18 instead of AV1 at crf 30, for it plays everywhere and every PyAV encodes
it; `meta/stats.json` has the quantiles of all frames instead of the mean of the episodes'; success is always stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.video import VideoSettings, copy_video, write_mp4
from robotics.data.clips import describe_video
from robotics.data.layout import (
    ACTION,
    DATA_PATH,
    INFO_PATH,
    STATE,
    STATS_PATH,
    SUCCESS,
    TASKS_PATH,
    VERSION,
    VIDEO_PATH,
    camera_features,
    camera_name,
    complete_features,
    numbered_files,
    write_json,
)
from robotics.data.reader import LeRobotReader
from robotics.data.series import FileSeries
from robotics.data.statistics import Statistics, aggregate_statistics, image_statistics, vector_statistics
from robotics.data.tables import column_array, count_rows, episode_table, read_table, task_table, write_table

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import ArrayLike, NDArray

__all__ = ["EpisodeWriter", "StorageSettings"]

MEGABYTE = 1024**2


@dataclass(frozen=True)
class StorageSettings:
    """How a dataset is cut into files; the defaults are lerobot's."""

    data_mb: float = 100
    """Size that a data or metadata file does not exceed, unless a single episode does."""
    video_mb: float = 200
    """The same for videos."""
    files_per_chunk: int = 1000
    """Files in a folder chunk-XXX."""
    video: VideoSettings = field(default_factory=lambda: VideoSettings(gop=2))
    """Encoder; lerobot's two frames between key frames make single frames quick to read."""


class EpisodeWriter:
    """Writes episodes into a folder, behind those that are there.

        features = robot_features(state=8, action=7, cameras={"front": (128, 128)})
        with EpisodeWriter("demos", fps=20, features=features, robot_type="panda") as writer:
            writer.add_episode(states, actions, {"front": frames}, task="stack the cubes", success=True)

    One process writes at a time. A dataset that exists keeps the limits it was made with.

    Args:
        folder: of the dataset; made when missing.
        fps: frames a second, a whole number.
        features: from `robot_features`, with more of them if wanted.
        robot_type: name of the robot.
        settings: sizes of files and the encoder; `StorageSettings()` when None.

    Raises:
        UserError: fps or a feature is not possible, or the dataset that is there has others.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        fps: int,
        features: Mapping[str, Any],
        robot_type: str | None = None,
        settings: StorageSettings | None = None,
    ) -> None:
        if fps != int(fps) or fps < 1:
            raise UserError(f"fps is {fps}; the format takes a whole number of at least 1")
        self.folder, self.fps = Path(folder), int(fps)
        self.settings = settings or StorageSettings()
        self.features = complete_features(features)
        self._info = _new_info(self.fps, self.features, robot_type, self.settings)
        self._tasks: list[str] = []
        self._stats: dict[str, Statistics] = {}
        self._rows: list[dict[str, Any]] = []
        self._frames: dict[str, list[Any]] = {}
        self._finished = False
        self._open_series()
        if (self.folder / INFO_PATH).exists():
            self._continue(LeRobotReader(self.folder))
        else:
            write_json(self._info, self.folder / INFO_PATH)

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
            state: (S,) what the robot saw before the action; None where the dataset has no state.
            action: (A,) what it did.
            images: (H, W, 3) uint8 by camera, seen before the action.
            extra: values of the other features by name.

        Raises:
            ValueError: the frame has other parts than those before it.
        """
        frame = {STATE: state, ACTION: action, **_by_feature(self.features, images or {}), **(extra or {})}
        frame = {key: np.array(value) for key, value in frame.items() if value is not None}
        if self._frames and set(frame) != set(self._frames):
            raise ValueError(f"the frame has {sorted(frame)}; those before it have {sorted(self._frames)}")
        for key, value in frame.items():
            self._frames.setdefault(key, []).append(value)

    def save_episode(self, task: str, success: bool) -> int:
        """Write the frames kept by `add_frame` as an episode.

        Args:
            task: instruction.
            success: whether the task was done in the end.

        Returns:
            Number of the episode.

        Raises:
            ValueError: there are no frames, or as in `add_episode`.
        """
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
        images: Mapping[str, NDArray[np.uint8]] | None,
        task: str,
        success: bool,
        extra: Mapping[str, ArrayLike] | None = None,
    ) -> int:
        """Write an episode; it is in the dataset when this returns.

        Args:
            states: (T, S) what the robot saw before each action; None where the dataset has no state.
            actions: (T, A).
            images: (T, H, W, 3) uint8 by camera, seen before each action.
            task: instruction.
            success: whether the task was done in the end; `next.success` is true in the last frame then.
            extra: (T, n) or (T,) values of the other features by name.

        Returns:
            Number of the episode.

        Raises:
            ValueError: a feature is missing, unknown or of another shape or number of frames, or a value is not finite.
        """
        given = {STATE: states, ACTION: actions, **_by_feature(self.features, images or {}), **(extra or {})}
        columns = {key: np.asarray(value) for key, value in given.items() if value is not None}
        return self._add(columns, task, success)

    def finish(self) -> None:
        """Join the files, compute the statistics of all frames and close; called again it does nothing."""
        if self._finished:
            return
        self._finished = True
        self._seal()
        if self.episodes:
            self._stats |= self._whole_statistics()
            self._write_stats(self._stats)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def _add(self, columns: dict[str, NDArray], task: str, success: bool) -> int:
        if self._finished:
            raise ValueError(f"the writer of {self.folder} is finished; a new one on the folder appends")
        length = self._check(columns)
        number, first = self.episodes, int(self._info["total_frames"])
        columns |= self._columns(length, task, success)
        row: dict[str, Any] = {"episode_index": number, "tasks": [task], "length": length, "success": bool(success)}
        row |= {"dataset_from_index": first, "dataset_to_index": first + length}
        try:
            self._write(row, columns)
        except BaseException:
            for series in (self._meta, self._data, *self._videos.values()):
                series.undo(row)
            raise
        if self._meta.size > self._meta.limit:
            self._seal()
        return number

    def _check(self, columns: Mapping[str, NDArray]) -> int:
        wanted = {key: feature for key, feature in self.features.items() if key not in BOOKKEPT}
        if set(columns) != set(wanted):
            raise ValueError(f"the episode has {sorted(columns)}; the dataset has {sorted(wanted)}")
        first = columns[next(iter(wanted))]
        length = len(first) if first.ndim else 0
        for key, feature in wanted.items():
            values, shape = columns[key], (length, *feature["shape"])
            is_image = feature["dtype"] in ("video", "image")
            if not length or (values.shape != shape and (*values.shape, 1) != shape):
                raise ValueError(f"{key} has shape {values.shape}; expected {shape} with at least one frame")
            if is_image and values.dtype != np.uint8:
                raise ValueError(f"{key} has type {values.dtype}; images are uint8")
            if not is_image and not np.isfinite(values.astype(np.float64)).all():
                raise ValueError(f"{key} has values that are not finite")
        return length

    def _columns(self, length: int, task: str, success: bool) -> dict[str, NDArray]:
        if task not in self._tasks:
            self._tasks.append(task)
            write_table(task_table(self._tasks), self.folder / TASKS_PATH)
        frames, reached = np.arange(length), np.zeros(length, np.bool_)
        reached[-1] = success
        return {
            SUCCESS: reached,
            "timestamp": (frames / self.fps).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full(length, self.episodes),
            "index": frames + int(self._info["total_frames"]),
            "task_index": np.full(length, self._tasks.index(task)),
        }

    def _statistics(self, key: str, values: NDArray) -> Statistics:
        dtype = self.features[key]["dtype"]
        return image_statistics(values) if dtype in ("video", "image") else vector_statistics(values.astype(dtype))

    def _write(self, row: dict[str, Any], columns: Mapping[str, NDArray]) -> None:
        for key, series in self._videos.items():
            write_mp4(series.path(series.number), columns[key], self.fps, self.settings.video)
            self._place(series, row)
        write_table(episode_table(columns, self.features), self._data.path(self._data.number))
        self._place(self._data, row)
        statistics = {key: self._statistics(key, values) for key, values in columns.items()}
        row |= {f"stats/{key}/{name}": one.tolist() for key, part in statistics.items() for name, one in part.items()}
        row |= self._meta.pointers(self._meta.number)
        write_table(_row_table([row]), self._meta.path(self._meta.number))
        self._meta.append(row)
        self._commit(row, statistics)

    def _place(self, series: FileSeries, row: dict[str, Any]) -> None:
        written = series.path(series.number)
        if series.tail and series.size + written.stat().st_size > series.limit:
            self._join([series])
            target = series.path(series.number)
            target.parent.mkdir(parents=True, exist_ok=True)
            written.replace(target)
        series.append(row)

    def _commit(self, row: dict[str, Any], statistics: Mapping[str, Statistics]) -> None:
        known = self._stats
        stats = {
            key: aggregate_statistics([known[key], part]) if key in known else part for key, part in statistics.items()
        }
        self._write_stats(stats)
        episodes = row["episode_index"] + 1
        info = self._info | {"total_episodes": episodes, "total_frames": row["dataset_to_index"]}
        info |= {"total_tasks": len(self._tasks), "splits": {"train": f"0:{episodes}"}}
        for key, series in self._videos.items():
            if "info" not in self.features[key]:
                self.features[key]["info"] = describe_video(series.tail[-1].path)
        write_json(info, self.folder / INFO_PATH)
        self._info, self._stats = info, stats
        self._rows.append(row)

    def _join(self, several: Iterable[FileSeries]) -> None:
        stale = [path for series in several for path in series.close()]
        if not self._rows or (not stale and len(self._meta.tail) == 1):
            return
        stale += self._meta.close()
        number = self._meta.number - 1
        for row in self._rows:
            row |= self._meta.pointers(number)
        write_table(_row_table(self._rows), self._meta.path(number))
        self._meta.number = number
        # One file of all rows of this writer, to be written again with the next join.
        self._meta.append(self._rows[0])
        for path in stale:
            path.unlink()

    def _seal(self) -> None:
        self._join([self._data, *self._videos.values()])
        self._rows = []
        self._meta.tail = []

    def _whole_statistics(self) -> dict[str, Statistics]:
        files = numbered_files(self.folder / "data", ".parquet")
        found = {}
        for key, feature in self.features.items():
            if feature["dtype"] not in ("video", "image"):
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
            for key in camera_features(self.features, ["video"])
        }

    def _continue(self, reader: LeRobotReader) -> None:
        theirs = {key: _essence(feature) for key, feature in reader.info["features"].items()}
        ours = {key: _essence(feature) for key, feature in self.features.items()}
        if theirs != ours:
            different = [key for key in ours | theirs if ours.get(key) != theirs.get(key)]
            raise UserError(f"{self.folder} has other features than asked for: {', '.join(different)}")
        for key in ("fps", "robot_type"):
            if reader.info.get(key) != self._info[key]:
                raise UserError(f"{self.folder} has {key} {reader.info.get(key)!r}, not {self._info[key]!r}")
        self._info, self._tasks, self._stats = dict(reader.info), list(reader.tasks), dict(reader.stats)
        self.features = self._info["features"]
        self.settings = _kept_settings(self._info, self.settings)
        self._open_series()
        for series in (self._data, self._meta, *self._videos.values()):
            _remove_leftovers(series, reader.episodes)
            series.number = max((series.number_in(row) + 1 for row in reader.episodes), default=0)
        _remove_joined(self._data, reader.episodes)


def _new_info(fps: int, features: dict[str, Any], robot: str | None, settings: StorageSettings) -> dict[str, Any]:
    return {
        "codebase_version": VERSION,
        "robot_type": robot,
        "total_episodes": 0,
        "total_frames": 0,
        "total_tasks": 0,
        "chunks_size": settings.files_per_chunk,
        "data_files_size_in_mb": settings.data_mb,
        "video_files_size_in_mb": settings.video_mb,
        "fps": fps,
        "splits": {},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if camera_features(features, ["video"]) else None,
        "features": features,
    }


def _by_feature(features: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    cameras = {camera_name(key): key for key in camera_features(features)}
    unknown = [name for name in images if name not in cameras]
    if unknown:
        raise ValueError(f"no camera {', '.join(unknown)}; the dataset has {', '.join(cameras) or 'none'}")
    return {cameras[name]: frames for name, frames in images.items()}


def _row_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(list(rows))


def _join_tables(paths: Sequence[Path], target: Path) -> None:
    write_table([read_table(path) for path in paths], target)


def _essence(feature: Mapping[str, Any]) -> tuple[str, list[int]]:
    return feature["dtype"], list(feature["shape"])


def _kept_settings(info: Mapping[str, Any], settings: StorageSettings) -> StorageSettings:
    return StorageSettings(
        data_mb=info.get("data_files_size_in_mb", settings.data_mb),
        video_mb=info.get("video_files_size_in_mb", settings.video_mb),
        files_per_chunk=info.get("chunks_size", settings.files_per_chunk),
        video=settings.video,
    )


def _remove_leftovers(series: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    # An interruption leaves files that no row points to; readers that take all files would take them for frames.
    folder = series.folder / series.prefix
    used = {series.path(series.number_in(row)) for row in rows}
    for path in [*numbered_files(folder, series.suffix), *folder.glob("chunk-*/.*.partial.*")]:
        if path not in used:
            path.unlink()


def _remove_joined(data: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    # Between a join and the rows that point to it, the episodes lie in the joined file and in their own. More images
    # than a video needs do no harm, but readers count on the place of a frame among all frames.
    held: dict[Path, list[Mapping[str, Any]]] = {}
    for row in rows:
        held.setdefault(data.path(data.number_in(row)), []).append(row)
    for path, episodes in held.items():
        if count_rows(path) > sum(row["length"] for row in episodes):
            numbers = [row["episode_index"] for row in episodes]
            write_table(read_table(path, filters=[("episode_index", "in", numbers)]), path)


BOOKKEPT = (SUCCESS, "timestamp", "frame_index", "episode_index", "index", "task_index")
