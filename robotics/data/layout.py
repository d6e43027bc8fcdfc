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
import re
import string
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import is_file, write_atomically

VERSION = "v3.0"
INFO_PATH = "meta/info.json"
STATS_PATH = "meta/stats.json"
TASKS_PATH = "meta/tasks.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def numbered_files(folder: Path, suffix: str) -> list[Path]:
    """Files `chunk-XXX/file-YYY` of a folder."""
    found = []
    for path in folder.glob(f"chunk-*/file-*{suffix}"):
        numbers = re.fullmatch(r"chunk-(\d+)/file-(\d+)", path.relative_to(folder).with_suffix("").as_posix())
        if numbers:
            found.append((int(numbers[1]), int(numbers[2]), path))
    return [path for _, _, path in sorted(found)]


def dataset_file(folder: Path, pattern: str, **values: int | str) -> Path:
    """A file named by a dataset's metadata, which must be inside the dataset."""
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
    """Read a JSON file."""
    if not is_file(path):
        raise UserError(f"the dataset lacks {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, nested too deep
        raise UserError(f"{path} is not JSON: {error}") from error


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, json.dumps(content, indent=4, ensure_ascii=False))
