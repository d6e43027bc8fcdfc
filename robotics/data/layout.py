"""File names of LeRobotDataset v3.0, and its small JSON files.

A dataset is a folder. `meta/info.json` names the features and the file patterns, `meta/tasks.parquet` the instructions,
`meta/episodes/` has a row for each episode that points to its frames, `data/` the frames without images and
`videos/<feature>/` the images; a file holds many episodes, in their order.

This follows lerobot 0.4.4 to 0.6.1 (codebase version v3.0), whose default limits are 100 MB for data and 200 MB for
videos. Every dataset made here also has the feature `next.success` and the episode column `success`.

Source: huggingface/lerobot, src/lerobot/datasets/utils.py, lerobot_dataset.py; docs/source/lerobot-dataset-v3.mdx.
"""

from __future__ import annotations

import json
import math
import os
import re
import string
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import write_atomically
from mmrl.hub.images import MAX_IMAGE_PIXELS, check_pixels
from mmrl.hub.video_writing import VideoSettings
from mmrl.runs.folder import take_lock

VERSION = "v3.0"
INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"
TASKS_PATH = "meta/tasks.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

LONGEST_VECTOR = 1_000_000
"""Maximum number of entries of a feature in a frame."""


def numbered_files(folder: Path, suffix: str) -> list[Path]:
    """Files `chunk-XXX/file-YYY` of a folder."""
    found = []
    for path in folder.glob(f"chunk-*/file-*{suffix}"):
        # sorted by number: from 1000 on, names have more digits and text would sort wrongly
        numbers = re.fullmatch(r"chunk-(\d+)/file-(\d+)", path.relative_to(folder).with_suffix("").as_posix())
        if numbers:
            found.append((int(numbers[1]), int(numbers[2]), path))
    return [path for _, _, path in sorted(found)]


def dataset_file(folder: Path, pattern: str, **values: int | str) -> Path:
    """A file named by a dataset's metadata, which must be inside the dataset."""
    try:
        fields = [(name, format_) for _, name, format_, _ in string.Formatter().parse(pattern) if name is not None]
        for name, format_ in fields:
            # metadata may be foreign: a format such as {0.__class__} or a huge width is refused
            if name not in values or not re.fullmatch(r"0?\d?d?", format_ or ""):
                raise UserError(
                    f"{folder}: the path {pattern!r} has {{{name}:{format_}}}; allowed: {', '.join(values)}"
                )
        relative = pattern.format(**values)
        real, home = (folder / relative).resolve(), folder.resolve()
    except (TypeError, ValueError, AttributeError, OSError, RuntimeError) as error:
        raise UserError(f"{folder}: the path {pattern!r} in its metadata cannot be used: {error}") from None
    # the hub's cache keeps files in blobs/ and links to them from snapshots/
    stored = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if ".." in Path(relative).parts or not (real.is_relative_to(home) or real.is_relative_to(stored)):
        raise UserError(f"{folder}: its metadata refers to {relative!r}, which is outside the folder and is not read")
    return folder / relative


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=4, ensure_ascii=False))


def hold_folder(writer: object, folder: Path) -> Callable[[], object]:
    """Take the lock of a dataset's folder, made when missing; calling the result, or the writer's end, frees it."""
    folder.mkdir(parents=True, exist_ok=True)
    # the folder itself is locked, so that no lock file lands in the dataset
    handle = os.open(folder, os.O_RDONLY)
    if not take_lock(handle):
        os.close(handle)
        raise UserError(f"another writer is using {folder}; finish it first, or write to a different folder")
    # freed when the writer is collected too, not only when it is closed
    return weakref.finalize(writer, os.close, handle)


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn what Python, NumPy and Arrow raise for wrong contents into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{what} cannot be read: {error} is missing") from error
    except (OSError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError, MemoryError) as error:
        # Arrow's messages have several lines
        reason = " ".join(str(error).split())
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {reason[:300]}") from error


def check_info(info: dict[str, Any], path: Path) -> dict[str, Any]:
    """Check the types and sizes in `meta/info.json`."""
    fps = info.get("fps")
    total = info.get("total_episodes")
    features = info.get("features")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e4:
        raise UserError(f"{path}: fps is {fps!r}; expected a number of frames per second")
    if not _is_count(total):
        raise UserError(f"{path}: total_episodes is {total!r}; expected a whole number")
    if not isinstance(features, dict):
        raise UserError(f"{path}: features is {features!r:.80}; expected an object with a feature for each name")
    for key in ("data_path", "video_path"):
        if not isinstance(info.get(key), str | None):
            raise UserError(f"{path}: {key} is {info[key]!r}; expected a pattern of file names")
    for name, feature in features.items():
        _check_feature(name, feature, path)
    return info


def _check_feature(name: str, feature: Any, path: Path) -> None:
    where = f"{path}: feature {name!r}"
    if not isinstance(feature, dict) or not isinstance(feature.get("dtype"), str):
        raise UserError(f"{where} is {feature!r:.80}; expected dtype, shape and names")
    shape = feature.get("shape")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise UserError(f"{where} has shape {shape!r:.80}; expected a list of whole numbers")
    for key, kinds, expected in (("names", list | dict | None, "a list"), ("info", dict | None, "an object")):
        if not isinstance(feature.get(key), kinds):
            raise UserError(f"{where} has {key} {feature[key]!r:.80}; expected {expected}")
    if feature["dtype"] in ("video", "image"):
        if len(shape) != 3:
            raise UserError(f"{where} has shape {shape}; an image has three sizes")
        try:
            # the two largest sizes are height and width, wherever the channels are
            check_pixels(sorted(shape)[-1], sorted(shape)[-2], MAX_IMAGE_PIXELS)
        except ValueError as error:
            raise UserError(f"{where} has shape {shape}: {error}") from error
    elif math.prod(shape) > LONGEST_VECTOR:
        raise UserError(f"{where} has shape {shape}, more than {LONGEST_VECTOR} entries per frame")


def check_row(row: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Check that indices, lengths and times of a row of `meta/episodes` are numbers."""
    for name in ("episode_index", "length", "data/chunk_index", "data/file_index"):
        if not _is_count(row.get(name)):
            raise UserError(f"{path}: {name} is {row.get(name)!r}; expected a whole number")
    for name, value in row.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if name.startswith("videos/") and not (number and value >= 0):
            raise UserError(f"{path}: {name} of episode {row['episode_index']} is {value!r}; expected a number")
    return row


def _is_count(value: Any) -> bool:
    # Arrow stores counts as int64
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


@dataclass(frozen=True)
class StorageSettings:
    """Sizes of a dataset's files and the encoder of its videos; the defaults are lerobot's."""

    data_mb: float = 100
    """Maximum size of a data or metadata file in megabytes, unless a single episode is larger."""
    video_mb: float = 200
    """Maximum size of a video file in megabytes, unless a single episode is larger."""
    files_per_chunk: int = 1000
    """Maximum number of files in a folder chunk-XXX."""
    video: VideoSettings = field(default_factory=lambda: VideoSettings(gop=2))
    """Video encoder settings; lerobot's key frame interval of two makes single frames quick to read."""


def new_info(fps: float, features: dict[str, Any], robot: str | None, settings: StorageSettings) -> dict[str, Any]:
    """Content of `meta/info.json` of a dataset without episodes."""
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
        "video_path": VIDEO_PATH if any(one["dtype"] == "video" for one in features.values()) else None,
        "features": features,
    }


def kept_settings(info: Mapping[str, Any], settings: StorageSettings) -> StorageSettings:
    """Settings for appending: the limits that a dataset was made with, and the given encoder."""
    return StorageSettings(
        data_mb=info.get("data_files_size_in_mb", settings.data_mb),
        video_mb=info.get("video_files_size_in_mb", settings.video_mb),
        files_per_chunk=info.get("chunks_size", settings.files_per_chunk),
        video=settings.video,
    )
