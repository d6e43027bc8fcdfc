"""Reading LeRobotDataset v3.0: whole episodes, and frames with the actions around them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError, require_packages
from mmrl.files import read_json_object
from mmrl.hub.images import ImageError, read_image_file
from robotics.data.features import (
    ACTION,
    BOOKKEPT,
    DTYPES,
    IMAGES,
    STATE,
    SUCCESS,
    camera_features,
    camera_name,
    image_size,
    is_depth,
)
from robotics.data.images import DepthCodes, decode_depth, decode_png, metres_of, read_clip
from robotics.data.layout import (
    DATA_PATH,
    INFO_PATH,
    STATS_PATH,
    TASKS_PATH,
    VERSION,
    VIDEO_PATH,
    check_info,
    check_row,
    dataset_file,
    named_errors,
    numbered_files,
)
from robotics.data.statistics import Statistics
from robotics.data.tables import column_array, read_schema, read_table, task_texts

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")
TIME_TOLERANCE_S = 1e-4
MOST_CORRUPT = 0.1
"""Fraction of an episode's images that may be lost; more would show a still scene that the actions move."""
FEW_CORRUPT = 3
"""Images that any episode may lose: one damaged frame of a video also loses those that are coded as changes of it."""


@dataclass(frozen=True)
class EpisodeData:
    """One episode of T frames."""

    number: int
    """Index of the episode."""
    state: NDArray[np.float32]
    """(T, S) before each action; (T, 0) if the dataset has none."""
    action: NDArray[np.float32]
    """(T, A); (T, 0) if the dataset has none."""
    images: Mapping[str, NDArray[np.uint8]]
    """(T, H, W, 3) RGB by camera, decoded on each access."""
    depth_m: Mapping[str, NDArray[np.float32]]
    """(T, H, W) metres by depth camera, decoded on each access."""
    task: str
    """Instruction of the first frame."""
    frame_tasks: Sequence[str]
    """T instructions, which differ if the task changes within the episode."""
    success: bool | None
    """Whether the task succeeded; None if the dataset does not store it."""
    timestamp_s: NDArray[np.float32]
    """(T,) seconds since the first frame."""
    extra: Mapping[str, NDArray]
    """(T, ...) all other features by name in their own dtype, such as `next.reward`; texts as objects."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True)
class FrameSample:
    """A frame and the actions around it."""

    episode: int
    """Index of the episode."""
    frame: int
    """Index of the frame within the episode."""
    state: NDArray[np.float32]
    """(S,)."""
    action: NDArray[np.float32]
    """(K, A) an action for each requested time; beyond the ends of the episode, the nearest one."""
    valid: NDArray[np.bool_]
    """(K,) False for times beyond the ends of the episode."""
    images: Mapping[str, NDArray[np.uint8]]
    """(H, W, 3) by requested camera."""
    task: str
    """Instruction of the frame."""


def action_chunks(actions: NDArray, offsets: Sequence[int]) -> tuple[NDArray, NDArray[np.bool_]]:
    """Actions around each frame of an episode.

    Args:
        actions: (T, A).
        offsets: K frames from the current one, 0 is its own action.

    Returns:
        Actions (T, K, A), padded with the first or last action of the episode, and (T, K) bool, False for padding.
    """
    index = np.arange(len(actions))[:, None] + np.asarray(offsets, np.int64)
    inside = np.clip(index, 0, len(actions) - 1)
    return actions[inside], inside == index


class LeRobotReader:
    """Reads a dataset in a folder.

        reader = LeRobotReader("demos")
        for sample in reader.frames(delta_timestamps=[k / reader.fps for k in range(8)]):
            ...

    Raises:
        UserError: a file is missing, broken or of a different version; episodes counted in the info are missing; or
            pyarrow is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        require_packages("a LeRobotDataset", ["pyarrow"], "vla")
        self.folder = Path(folder)
        content = read_json_object(self.folder / INFO_PATH)
        version = content.get("codebase_version")
        if version != VERSION:
            raise UserError(
                f"{self.folder} has codebase_version {version}; this reads {VERSION}. lerobot converts v2.1 with "
                "python -m lerobot.scripts.convert_dataset_v21_to_v30 (lerobot.datasets.v30.convert_dataset_v21_to_v30 "
                "before 0.5.1)"
            )
        self.info: dict[str, Any] = check_info(content, self.folder / INFO_PATH)
        """Content of `meta/info.json`."""
        with named_errors(f"the metadata of {self.folder}"):
            self.episodes: list[dict[str, Any]] = self._episode_rows()
            """Rows of `meta/episodes` without the statistics, by number of the episode."""
            tasks = self.folder / TASKS_PATH
            self.tasks: list[str] = task_texts(read_table(tasks)) if self.episodes or tasks.exists() else []
            """Instructions by index."""
            self.stats: dict[str, Statistics] = self._statistics()
            """Statistics by feature; empty if the dataset has none."""
        self.counts: Counter[str] = Counter()
        """`corrupt_frames`: accessed images that could not be decoded and were replaced by a neighbour."""

    @property
    def fps(self) -> float:
        """Frames per second."""
        return self.info["fps"]

    @property
    def cameras(self) -> list[str]:
        """Names of the cameras, without `observation.images.`."""
        return [camera_name(key) for key in camera_features(self.info["features"])]

    @property
    def depth_cameras(self) -> list[str]:
        """Names of the depth cameras, without `observation.images.`."""
        return [camera_name(key) for key in camera_features(self.info["features"], depth=True)]

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episodes)

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[EpisodeData]:
        return (self.episode(number) for number in range(len(self)))

    def episode(self, number: int) -> EpisodeData:
        """Read an episode, whose images are decoded on access.

        Args:
            number: 0 to `len(reader) - 1`.

        Raises:
            UserError: there is no such episode, or its part of a file is missing, broken or of another length.
        """
        if not 0 <= number < len(self):
            raise UserError(f"no episode {number}; {self.folder} has {len(self)}, numbered from 0")
        with named_errors(f"episode {number} of {self.folder}"):
            row = self.episodes[number]
            table, features = self._frames_of(row), self.info["features"]
            numeric = [
                name for name in table.column_names if name in features and features[name]["dtype"] not in IMAGES
            ]
            columns = {name: self._values(name, table) for name in numeric}
            length = len(table)
            tasks = [self._task(int(one)) for one in columns["task_index"]]
            return EpisodeData(
                number=number,
                state=_matrix(columns.pop(STATE, None), length),
                action=_matrix(columns.pop(ACTION, None), length),
                images=self._images(camera_features(features), row, table),
                depth_m=self._images(camera_features(features, depth=True), row, table),
                task=tasks[0],
                frame_tasks=tasks,
                success=_success(row, columns.get(SUCCESS)),
                timestamp_s=np.asarray(columns["timestamp"], np.float32),
                extra={name: values for name, values in columns.items() if name not in BOOKKEPT},
            )

    def _images(self, keys: Sequence[str], row: Mapping[str, Any], table: pa.Table) -> LazyImages:
        return LazyImages({camera_name(key): self._decoder(key, row, table) for key in keys})

    def _values(self, name: str, table: pa.Table) -> NDArray:
        values, declared = column_array(table[name]), self.info["features"][name]["dtype"]
        # only within a kind: casting texts or mixing integers and floats would hide a broken file
        same_kind = declared in DTYPES and np.dtype(declared).kind == values.dtype.kind
        return values.astype(declared, copy=False) if same_kind else values

    def images(self, number: int, camera: str) -> NDArray[np.uint8]:
        """Decode the images (T, H, W, 3) uint8 RGB of an episode and one of `cameras`; raises UserError."""
        self._check_cameras([camera])
        return self.episode(number).images[camera]

    def image_files(self, number: int, camera: str) -> list[Path]:
        """Files that the images of an episode are read from: its table, and its video if it has one."""
        row, features = self.episodes[number], self.info["features"]
        key = next(key for key in camera_features(features) if camera_name(key) == camera)
        video = features[key]["dtype"] == "video"
        return [self._table_path(row), *([self._video_path(key, row)] if video else [])]

    def image_contents(self, number: int, feature: str) -> list[bytes]:
        """Image files of an episode as they are stored, such as depth of 16 bits: T files of an image feature."""
        if self.info["features"].get(feature, {}).get("dtype") != "image":
            raise UserError(f"{self.folder} has no feature {feature!r} with dtype image")
        # checks that the episode is complete
        self.episode(number)
        with named_errors(f"episode {number} of {self.folder}"):
            return self._contents(self._frames_of(self.episodes[number])[feature].to_pylist())

    def frames(
        self,
        delta_timestamps: Sequence[float] = (0.0,),
        cameras: Sequence[str] = (),
        episodes: Sequence[int] | None = None,
    ) -> Iterator[FrameSample]:
        """Iterate over the frames in order.

        Args:
            delta_timestamps: K times in seconds, relative to the frame, of the actions; multiples of 1/fps.
            cameras: whose images are included.
            episodes: their indices; all when None.

        Raises:
            UserError: a time is no multiple of 1/fps, or a camera or episode is unknown.
        """
        offsets = self._offsets(delta_timestamps)
        self._check_cameras(cameras)
        return self._samples(offsets, cameras, range(len(self)) if episodes is None else episodes)

    def _samples(
        self, offsets: Sequence[int], cameras: Sequence[str], episodes: Sequence[int]
    ) -> Iterator[FrameSample]:
        for number in episodes:
            episode = self.episode(number)
            actions, valid = action_chunks(episode.action, offsets)
            images = {camera: episode.images[camera] for camera in cameras}
            for frame in range(len(episode)):
                seen = {camera: frames[frame] for camera, frames in images.items()}
                state, task = episode.state[frame], episode.frame_tasks[frame]
                yield FrameSample(number, frame, state, actions[frame], valid[frame], seen, task)

    def _check_cameras(self, cameras: Sequence[str]) -> None:
        unknown = [camera for camera in cameras if camera not in self.cameras]
        if unknown:
            raise UserError(
                f"unknown camera {', '.join(unknown)}; {self.folder} has {', '.join(self.cameras) or 'none'}"
            )

    def _offsets(self, delta_timestamps: Sequence[float]) -> list[int]:
        offsets = [round(delta * self.fps) for delta in delta_timestamps]
        for delta, offset in zip(delta_timestamps, offsets, strict=True):
            if abs(delta - offset / self.fps) > TIME_TOLERANCE_S:
                raise UserError(f"delta_timestamps has {delta} s; must be a multiple of 1/fps = {1 / self.fps:.6g} s")
        return offsets

    def _episode_rows(self) -> list[dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = {}
        total = self.info["total_episodes"]
        for path in numbered_files(self.folder / "meta/episodes", ".parquet"):
            # statistics of all episodes can be larger than everything else
            wanted = [name for name in read_schema(path).names if not name.startswith("stats/")]
            chunk, file = (int(part.rpartition("-")[2]) for part in (path.parent.name, path.stem))
            for row in read_table(path, columns=wanted).to_pylist():
                # The file where the row was found, because rows of merged datasets may still point to their old file.
                row |= {"meta/episodes/chunk_index": chunk, "meta/episodes/file_index": file}
                # A killed writer may leave a row twice, the first being newer, and a row that info does not count.
                rows.setdefault(check_row(row, path)["episode_index"], row)
        # bounded by the number of rows: `total` comes from a file and may be any number
        first = next(number for number in range(len(rows) + 1) if number not in rows)
        if first < total:
            lacking = total - sum(number < total for number in rows)
            raise UserError(
                f"{self.folder / INFO_PATH} counts {total} episodes; meta/episodes lacks {lacking} of them, the "
                f"first is {first}"
            )
        return [rows[number] for number in range(total)]

    def _statistics(self) -> dict[str, Statistics]:
        path = self.folder / STATS_PATH
        content = read_json_object(path) if path.exists() else {}
        return {key: {name: np.asarray(one) for name, one in part.items()} for key, part in content.items()}

    def _task(self, number: int) -> str:
        if not 0 <= number < len(self.tasks):
            raise UserError(f"task_index {number} is used; {self.folder / TASKS_PATH} has {len(self.tasks)} tasks")
        return self.tasks[number]

    def _frames_of(self, row: Mapping[str, Any]) -> pa.Table:
        path = self._table_path(row)
        # filtered while reading, as one file holds many episodes
        table = read_table(path, filters=[("episode_index", "=", row["episode_index"])])
        stored = [name for name, feature in self.info["features"].items() if feature["dtype"] != "video"]
        missing = [name for name in stored if name not in table.column_names]
        if missing:
            raise UserError(f"{path} lacks the columns {', '.join(missing)} that are listed in {INFO_PATH}")
        if len(table) != row["length"]:
            raise UserError(
                f"episode {row['episode_index']} has {len(table)} frames in {path}; meta/episodes has {row['length']}"
            )
        return table

    def _decoder(self, key: str, row: Mapping[str, Any], table: pa.Table) -> Callable[[], NDArray[Any]]:
        feature = self.info["features"][key]
        size = image_size(feature)
        depth = is_depth(feature)
        info = feature.get("info") or {}
        if feature["dtype"] == "image":
            unpack = decode_depth if depth else decode_png
            unit = info.get("depth_unit")
            where = f"{key} of episode {row['episode_index']} in {self._table_path(row)}"
            read = partial(self._decode_images, table[key].to_pylist(), size, unpack, where)
            return (lambda: metres_of(read(), unit)) if depth else read
        path = self._video_path(key, row)
        start, pixels = row[f"videos/{key}/from_timestamp"], "gray12le" if depth else "rgb24"
        times_s = column_array(table["timestamp"]).reshape(-1)

        def decode() -> NDArray[Any]:
            frames, decoded = read_clip(path, start, row["length"], self.fps, size, pixels, times_s)
            self._count(decoded, f"{key} of episode {row['episode_index']} in {path}")
            return DepthCodes.from_info(info).decode(frames) if depth else frames

        return decode

    def _decode_images(
        self,
        cells: Sequence[Mapping[str, Any]],
        size: Sequence[int],
        unpack: Callable[[bytes, Sequence[int]], NDArray[Any] | None],
        where: str,
    ) -> NDArray[Any]:
        frames = [unpack(content, size) for content in self._contents(cells)]
        good = [frame for frame in frames if frame is not None]
        if not good:
            raise UserError(f"none of the images {where} could be decoded as {size[1]}x{size[0]}")
        self._count(np.array([frame is not None for frame in frames]), where)
        # a bad frame repeats the one before it; bad frames at the start repeat the first good one
        latest, filled = good[0], []
        for frame in frames:
            latest = latest if frame is None else frame
            filled.append(latest)
        return np.stack(filled)

    def _contents(self, cells: Sequence[Mapping[str, Any]]) -> list[bytes]:
        def stored(path: str) -> bytes:
            # braces in a stored path are no placeholders
            file = dataset_file(self.folder, path.replace("{", "{{").replace("}", "}}"))
            try:
                return read_image_file(file)
            except ImageError as error:
                raise UserError(f"{file} cannot be read: {error}") from None

        # images are stored in the table or as files next to it
        return [cell["bytes"] or stored(cell["path"]) for cell in cells]

    def _count(self, decoded: NDArray[np.bool_], where: str) -> None:
        """Count and report the images (T,) of an episode that could not be decoded; raises UserError if many."""
        lost = np.flatnonzero(~decoded)
        if not len(lost):
            return
        text = f"{len(lost)} of the {len(decoded)} images {where} cannot be decoded, the first of them is {lost[0]}"
        if len(lost) > max(FEW_CORRUPT, MOST_CORRUPT * len(decoded)):
            raise UserError(f"{text}; at most a tenth may be lost. Copy the file again, or remove the episode")
        self.counts["corrupt_frames"] += len(lost)
        LOGGER.warning("%s; each repeats the one before it, or the first that can be", text)

    def _table_path(self, row: Mapping[str, Any]) -> Path:
        return self._path(self.info.get("data_path") or DATA_PATH, "data", row)

    def _video_path(self, key: str, row: Mapping[str, Any]) -> Path:
        return self._path(self.info.get("video_path") or VIDEO_PATH, f"videos/{key}", row, video_key=key)

    def _path(self, pattern: str, prefix: str, row: Mapping[str, Any], **names: str) -> Path:
        chunk, file = row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]
        return dataset_file(self.folder, pattern, chunk_index=chunk, file_index=file, **names)


class LazyImages(Mapping[str, "NDArray[Any]"]):
    """Images by camera, decoded on access."""

    def __init__(self, decoders: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
        self._decoders = decoders

    def __getitem__(self, camera: str) -> NDArray[Any]:
        if camera not in self._decoders:
            raise KeyError(f"unknown camera {camera!r}; available: {', '.join(self._decoders) or 'none'}")
        with named_errors(f"the images of camera {camera!r} of an episode"):
            return self._decoders[camera]()

    def __contains__(self, camera: object) -> bool:
        return camera in self._decoders

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoders)

    def __len__(self) -> int:
        return len(self._decoders)


def _matrix(values: NDArray | None, length: int) -> NDArray[np.float32]:
    return np.zeros((length, 0), np.float32) if values is None else values.astype(np.float32).reshape(length, -1)


def _success(row: Mapping[str, Any], reached: NDArray | None) -> bool | None:
    if row.get("success") is not None:
        return bool(row["success"])
    return None if reached is None else bool(np.any(reached))
