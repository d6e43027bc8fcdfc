"""An episode given to `EpisodeWriter`: checks, and the dataset's bookkeeping columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.data.depth import depth_unit_of
from robotics.data.features import BOOKKEPT, IMAGES, SUCCESS, camera_name, image_size, is_depth

if TYPE_CHECKING:
    from numpy.typing import NDArray


def by_feature(features: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    """Images by feature instead of by camera; raises ValueError for an unknown camera."""
    cameras = {camera_name(key): key for key, feature in features.items() if feature["dtype"] in IMAGES}
    unknown = [name for name in images if name not in cameras]
    if unknown:
        raise ValueError(f"no camera {', '.join(unknown)}; the dataset has {', '.join(cameras) or 'none'}")
    return {cameras[name]: frames for name, frames in images.items()}


def checked_columns(columns: Mapping[str, NDArray], features: Mapping[str, Any]) -> dict[str, NDArray]:
    """Columns (T, ...) by feature, without success and bookkeeping; depth as (T, H, W).

    Raises ValueError where a feature is missing, unknown, not finite, or of another shape, type or number of frames.
    """
    wanted = {key: feature for key, feature in features.items() if key not in (*BOOKKEPT, SUCCESS)}
    if set(columns) != set(wanted):
        raise ValueError(f"the episode has {sorted(columns)}; the dataset has {sorted(wanted)}")
    first = columns[next(iter(wanted))]
    length = len(first) if first.ndim else 0
    return {key: _checked(key, columns[key], feature, length) for key, feature in wanted.items()}


def frame_tasks(task: str | Sequence[str], length: int) -> list[str]:
    """Instruction of each frame; raises ValueError where there is another number of texts than `length`."""
    tasks = [task] * length if isinstance(task, str) else [str(one) for one in task]
    if len(tasks) != length:
        raise ValueError(f"task has {len(tasks)} texts; the episode has {length} frames, give one text or one for each")
    return tasks


def bookkeeping(
    features: Mapping[str, Any], number: int, first: int, fps: int, success: bool | None, task_index: Sequence[int]
) -> dict[str, NDArray]:
    """Bookkeeping columns (T,) of episode `number`, whose first frame has the index `first` in the dataset."""
    length = len(task_index)
    frames, reached = np.arange(length), np.zeros(length, np.bool_)
    reached[-1] = bool(success)
    return ({SUCCESS: reached} if SUCCESS in features else {}) | {
        "timestamp": (frames / fps).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full(length, number),
        "index": frames + first,
        "task_index": np.asarray(task_index),
    }


def _checked(key: str, values: NDArray, feature: Mapping[str, Any], length: int) -> NDArray:
    dtype, depth = feature["dtype"], is_depth(feature)
    is_image = dtype in IMAGES
    shape = (length, *((*image_size(feature), 1 if depth else 3) if is_image else feature["shape"]))
    if not length or (values.shape != shape and (*values.shape, 1) != shape):
        raise ValueError(f"{key} has shape {values.shape}; expected {shape} with at least one frame")
    if dtype == "string":
        if not all(isinstance(text, str) for text in values.ravel()):
            raise ValueError(f"{key} has values that are not texts")
        return values
    if is_image and not depth:
        if values.dtype != np.uint8:
            raise ValueError(f"{key} has type {values.dtype}; images are uint8")
        return values
    if depth:
        values = values.reshape(shape[:-1])
        unit, known = depth_unit_of(values), (feature.get("info") or {}).get("depth_unit")
        if unit is None:
            raise ValueError(f"{key} has type {values.dtype}; depth is uint16 in millimetres or float32 in metres")
        if known and known != unit:
            raise ValueError(f"{key} has type {values.dtype}, which is {unit!r}; the dataset holds depth in {known!r}")
    if not np.isfinite(values.astype(np.float64)).all():
        raise ValueError(f"{key} has values that are not finite")
    return values
