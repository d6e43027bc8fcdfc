"""Checks of a LeRobotDataset's metadata before it is used: a folder may contain anything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.hub.images import MAX_IMAGE_PIXELS, check_pixels

LONGEST_VECTOR = 1_000_000
"""Entries of a feature in a frame."""


@contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn what Python, NumPy and Arrow raise for wrong contents into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except KeyError as error:
        raise UserError(f"{what} cannot be read: it lacks {error}") from error
    except (OSError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{what} cannot be read: {type(error).__name__}: {reason[:300]}") from error


def check_info(info: Any, path: Path) -> dict[str, Any]:
    """Check the types and sizes in `meta/info.json`."""
    if not isinstance(info, dict):
        raise UserError(f"{path} holds a {type(info).__name__}; expected an object with features and total_episodes")
    fps, total, features = info.get("fps"), info.get("total_episodes"), info.get("features")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 0 < fps < 1e4:
        raise UserError(f"{path}: fps is {fps!r}; expected a number of frames a second")
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
            check_pixels(sorted(shape)[-1], sorted(shape)[-2], MAX_IMAGE_PIXELS)
        except ValueError as error:
            raise UserError(f"{where} has shape {shape}: {error}") from error
    elif math.prod(shape) > LONGEST_VECTOR:
        raise UserError(f"{where} has shape {shape}, more than {LONGEST_VECTOR} entries a frame")


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
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
