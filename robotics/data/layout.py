"""LeRobotDataset v3.0 as files: names, columns, features and the small JSON files.

A dataset is a folder. `meta/info.json` names the features and the file patterns, `meta/tasks.parquet` the instructions,
`meta/episodes/` holds a row for each episode that says where its frames lie, `data/` the frames without images and
`videos/<feature>/` the images; a file holds many episodes, in their order.

This follows lerobot 0.4.4 (codebase version v3.0), whose default limits are 100 MB for data and 200 MB for videos.
Beyond it every dataset has the feature `next.success` and the episode column `success`.

Source: huggingface/lerobot, src/lerobot/datasets/utils.py, lerobot_dataset.py; docs/source/lerobot-dataset-v3.mdx.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import is_file, write_atomically

__all__ = [
    "ACTION",
    "DATA_PATH",
    "EPISODES_PATH",
    "INFO_PATH",
    "STATE",
    "STATS_PATH",
    "SUCCESS",
    "TASKS_PATH",
    "VERSION",
    "VIDEO_PATH",
    "camera_features",
    "camera_name",
    "complete_features",
    "dataset_file",
    "numbered_files",
    "read_json",
    "robot_features",
    "write_json",
]

VERSION = "v3.0"
INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"
TASKS_PATH = "meta/tasks.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

STATE, ACTION, SUCCESS = "observation.state", "action", "next.success"
IMAGE_PREFIX = "observation.images."


def robot_features(
    state: int | Sequence[str], action: int | Sequence[str], cameras: Mapping[str, tuple[int, int]], video: bool = True
) -> dict[str, Any]:
    """Describe the features of a robot that has a state, an action and cameras.

    Args:
        state: entries of the state, or their names.
        action: entries of the action, or their names.
        cameras: (H, W) pixels of each camera.
        video: whether images become mp4, with some loss; else PNG inside the data files, without.

    Returns:
        Features as `EpisodeWriter` takes and `meta/info.json` shows them.
    """
    features = {STATE: _vector(state), ACTION: _vector(action)}
    for camera, (height, width) in cameras.items():
        features[IMAGE_PREFIX + camera] = {
            "dtype": "video" if video else "image",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
    return features


def complete_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """Check features and add those that every dataset here has.

    Args:
        features: name -> dtype, shape and names, as in `meta/info.json`.

    Returns:
        The same with shapes as lists, then `next.success` and the five columns of bookkeeping.

    Raises:
        UserError: a name, type or shape that this writer does not store.
    """
    complete = {}
    for key, feature in features.items():
        dtype, shape = feature.get("dtype"), [int(size) for size in feature.get("shape", ())]
        is_image = dtype in IMAGES
        if "/" in key:
            raise UserError(f"feature {key!r} has a '/' in its name; the format keeps it for columns, use a '.'")
        if not is_image and dtype not in DTYPES:
            raise UserError(f"feature {key!r} has dtype {dtype!r}; known are {', '.join((*IMAGES, *DTYPES))}")
        if (
            min(shape, default=0) < 1
            or (is_image and (len(shape), shape[-1]) != (3, 3))
            or (not is_image and shape[1:])
        ):
            raise UserError(f"feature {key!r} has shape {shape}; expected {'[H, W, 3]' if is_image else '[n], n >= 1'}")
        complete[key] = {"dtype": dtype, "shape": shape, "names": feature.get("names")}
    return complete | {key: dict(feature) for key, feature in COLUMNS.items()}


def camera_features(features: Mapping[str, Any], dtypes: Sequence[str] = ("video", "image")) -> list[str]:
    """Names of the features that are stored as one of `dtypes`, in their order."""
    return [key for key, feature in features.items() if feature["dtype"] in dtypes]


def camera_name(key: str) -> str:
    """What a camera is called here: the name of its feature without `observation.images.`."""
    return key.removeprefix(IMAGE_PREFIX)


def numbered_files(folder: Path, suffix: str) -> list[Path]:
    """Files `chunk-XXX/file-YYY` of a folder.

    Args:
        folder: that holds the chunks.
        suffix: .parquet or .mp4.

    Returns:
        Paths in the order of their numbers.
    """
    found = []
    for path in folder.glob(f"chunk-*/file-*{suffix}"):
        numbers = re.fullmatch(r"chunk-(\d+)/file-(\d+)", path.relative_to(folder).with_suffix("").as_posix())
        if numbers:
            found.append((int(numbers[1]), int(numbers[2]), path))
    return [path for _, _, path in sorted(found)]


def dataset_file(folder: Path, pattern: str, **values: int | str) -> Path:
    """A file that a dataset's metadata names, which lies inside the dataset.

    Args:
        folder: of the dataset.
        pattern: path with fields such as {chunk_index:03d}, or a plain one.
        values: of the fields.

    Returns:
        The path. A link may lead into the store of the Hugging Face cache that the dataset lies in.

    Raises:
        UserError: the pattern has other fields or formats, or leads out of the folder.
    """
    try:
        fields = [(name, format_) for _, name, format_, _ in string.Formatter().parse(pattern) if name is not None]
        for name, format_ in fields:
            if name not in values or not re.fullmatch(r"0?\d?d?", format_ or ""):
                raise UserError(
                    f"{folder}: the path {pattern!r} has {{{name}:{format_}}}; known are {', '.join(values)}"
                )
        relative = pattern.format(**values)
        real, home = (folder / relative).resolve(), folder.resolve()
    except (TypeError, ValueError, AttributeError, OSError, RuntimeError) as error:
        raise UserError(f"{folder}: the path {pattern!r} in its metadata cannot be used: {error}") from None
    stored = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if ".." in Path(relative).parts or not (real.is_relative_to(home) or real.is_relative_to(stored)):
        raise UserError(f"{folder}: its metadata names {relative!r}, which lies outside of it; it is not read")
    return folder / relative


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Args:
        path: of the file.

    Returns:
        Its content.

    Raises:
        UserError: the file is not there or is no JSON.
    """
    if not is_file(path):
        raise UserError(f"the dataset lacks {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, nested too deep
        raise UserError(f"{path} is not JSON: {error}") from error


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file, replacing what is there in one step."""
    write_atomically(path, json.dumps(content, indent=4, ensure_ascii=False))


def _vector(entries: int | Sequence[str]) -> dict[str, Any]:
    names = None if isinstance(entries, int) else list(entries)
    return {"dtype": "float32", "shape": [entries if isinstance(entries, int) else len(entries)], "names": names}


IMAGES = ("video", "image")
DTYPES = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
COLUMNS: dict[str, dict[str, Any]] = {
    SUCCESS: {"dtype": "bool", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
