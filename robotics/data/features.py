"""Features of a LeRobotDataset: the contents of a frame, as in `meta/info.json`.

A feature has a dtype, a shape and names. A camera has dtype video or image and shape (H, W, 3), or (3, H, W) in
external datasets; with `is_depth_map` in its info it is a depth camera, (H, W, 1). All other features are columns of
numbers, booleans or texts.

Source: huggingface/lerobot 0.6.1, src/lerobot/datasets/feature_utils.py, src/lerobot/utils/feature_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from robotics.data.images import depth_unit_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


STATE, ACTION, SUCCESS, REWARD = "observation.state", "action", "next.success", "next.reward"
FULL_STATE = "observation.environment_state"
"""State of the simulator, of which the policy's state may be a part; lerobot has the same name for it."""
EXECUTED = "complementary_info.executed_action"
"""Executed actions of demonstrations whose `action` is the expert's, without noise. LeRobot takes every name that
begins with `action` for a policy's output, and leaves this one alone."""
IMAGE_PREFIX = "observation.images."
MOST_AXES = 5
"""Maximum number of axes of a numeric feature, which lerobot stores as Array2D to Array5D."""
IMAGES = ("video", "image")
FLOATS, INTEGERS = ("float16", "float32", "float64"), ("int8", "int16", "int32", "int64")
DTYPES = (*FLOATS, *INTEGERS, "uint8", "uint16", "uint32", "uint64", "bool")
INTEGER = {"dtype": "int64", "shape": [1], "names": None}
COLUMNS: dict[str, dict[str, Any]] = {
    SUCCESS: {"dtype": "bool", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), INTEGER),
}
BOOKKEPT = tuple(key for key in COLUMNS if key != SUCCESS)
"""Columns that every dataset has."""


def robot_features(
    state: int | Sequence[str] | None,
    action: int | Sequence[str],
    cameras: Mapping[str, tuple[int, int]] | None = None,
    video: bool = True,
    depth: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Describe the features of a robot with an action and, optionally, a state, cameras and depth cameras.

    Args:
        state: number of state entries, or their names; None without a state.
        action: number of action entries, or their names.
        cameras: (H, W) pixels of each camera; None without cameras.
        video: whether images are stored as mp4, which is lossy; otherwise as lossless PNG, or TIFF for depth, inside
            the data files.
        depth: (H, W) pixels of each depth camera, with names different from the cameras'; None without depth cameras.

    Returns:
        Features for `EpisodeWriter`, in the format of `meta/info.json`.

    Raises:
        UserError: a camera and a depth camera have the same name.
    """
    # a state is optional in the format; an action is not
    features = {} if state is None else {STATE: _vector(state)}
    features[ACTION] = _vector(action)
    shared = [name for name in cameras or {} if name in (depth or {})]
    if shared:
        raise UserError(f"{shared[0]!r} is a camera and a depth camera; call the second {shared[0] + '_depth'!r}")
    for names, channels in ((cameras, 3), (depth, 1)):
        for name, (height, width) in (names or {}).items():
            features[IMAGE_PREFIX + name] = _camera([height, width, channels], video)
    return features


def complete_features(features: Mapping[str, Any]) -> dict[str, Any]:
    """Check features (name -> dtype, shape, names, info) and add the columns of every dataset written here."""
    complete = {}
    for key, feature in features.items():
        dtype, shape = feature.get("dtype"), [int(size) for size in feature.get("shape", ())]
        # columns of meta/episodes are named stats/<feature>/mean and videos/<feature>/...
        if "/" in key:
            raise UserError(f"feature {key!r} has a '/' in its name, which the format reserves for columns; use a '.'")
        if dtype not in (*IMAGES, *DTYPES, "string"):
            raise UserError(
                f"feature {key!r} has dtype {dtype!r}; must be one of {', '.join((*IMAGES, *DTYPES, 'string'))}"
            )
        # entries that lerobot does not know are dropped
        named = {"dtype": dtype, "shape": shape, "names": feature.get("names")}
        wanted = _wanted_shape(named, is_depth(feature))
        if wanted:
            raise UserError(f"feature {key!r} has shape {shape}; expected {wanted}")
        complete[key] = named | ({"info": dict(feature["info"])} if feature.get("info") else {})
    return complete | {key: dict(feature) for key, feature in COLUMNS.items()}


def camera_features(features: Mapping[str, Any], depth: bool = False) -> list[str]:
    """Features of the cameras, or of the depth cameras, in their order."""
    return [key for key, feature in features.items() if feature["dtype"] in IMAGES and is_depth(feature) == depth]


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether a feature is depth: `is_depth_map`, or `video.is_depth_map` in versions before 0.6."""
    about = [part for part in (feature.get("info"), feature.get("video_info")) if isinstance(part, Mapping)]
    return any(part.get("is_depth_map") or part.get("video.is_depth_map") for part in about)


def camera_name(key: str) -> str:
    """Name of a camera: that of its feature without `observation.images.`."""
    return key.removeprefix(IMAGE_PREFIX)


def image_size(feature: Mapping[str, Any]) -> tuple[int, int]:
    """(H, W) of a camera's feature; external datasets may use (channel, height, width)."""
    shape, names = feature["shape"], feature.get("names") or ()
    first = str(names[0]) if names and not isinstance(names, Mapping) else ""
    # by the names where there are any; else 1 or 3 channels in front, unless the last size could be them too
    channel_first = first.startswith("c") or (not first and shape[0] in (1, 3) and shape[2] not in (1, 3))
    return (shape[1], shape[2]) if channel_first else (shape[0], shape[1])


def names_of_feature(feature: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Names of the entries of a feature; None unless each entry has a different name.

    External datasets use a list, groups of lists such as {"motors": [...]}, or a dictionary from names to positions.
    """
    names: Any = feature.get("names")
    size = math.prod(feature.get("shape", ()))
    if isinstance(names, Mapping):
        # {"x": 0, "y": 1}: the values are positions, not names
        places = dict(names)
        if places and all(isinstance(place, int) for place in places.values()):
            names = sorted(places, key=lambda name: places[name])
        else:
            names = [name for part in places.values() if isinstance(part, list) for name in part]
    if not isinstance(names, Sequence) or isinstance(names, str) or len(names) != size:
        return None
    found = tuple(str(name) for name in names)
    return found if len(set(found)) == size else None


def by_feature(features: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    """Images by feature instead of by camera; raises ValueError for an unknown camera."""
    cameras = {camera_name(key): key for key, feature in features.items() if feature["dtype"] in IMAGES}
    unknown = [name for name in images if name not in cameras]
    if unknown:
        raise ValueError(f"unknown camera {', '.join(unknown)}; the dataset has {', '.join(cameras) or 'none'}")
    return {cameras[name]: frames for name, frames in images.items()}


def checked_columns(columns: Mapping[str, NDArray], features: Mapping[str, Any]) -> dict[str, NDArray]:
    """Columns (T, ...) by feature, without success and bookkeeping; depth as (T, H, W).

    Raises ValueError if a feature is missing, unknown or not finite, or has a wrong shape, type or number of frames.
    """
    wanted = {key: feature for key, feature in features.items() if key not in (*BOOKKEPT, SUCCESS)}
    # the same columns in every episode, as a Parquet file has one schema
    if set(columns) != set(wanted):
        raise ValueError(f"the episode has {sorted(columns)}; the dataset has {sorted(wanted)}")
    first = columns[next(iter(wanted))]
    length = len(first) if first.ndim else 0
    return {key: _checked(key, columns[key], feature, length) for key, feature in wanted.items()}


def frame_tasks(task: str | Sequence[str], length: int) -> list[str]:
    """Instruction of each frame; raises ValueError if the number of texts is not `length`."""
    tasks = [task] * length if isinstance(task, str) else [str(one) for one in task]
    if len(tasks) != length:
        raise ValueError(
            f"task has {len(tasks)} texts; the episode has {length} frames, give one text, or one per frame"
        )
    return tasks


def bookkeeping(
    features: Mapping[str, Any], number: int, first: int, fps: float, success: bool | None, task_index: Sequence[int]
) -> dict[str, NDArray]:
    """Bookkeeping columns (T,) of episode `number`, whose first frame has the index `first` in the dataset."""
    length = len(task_index)
    frames, reached = np.arange(length), np.zeros(length, np.bool_)
    # success ends an episode, so it is marked at the last frame
    reached[-1] = bool(success)
    return ({SUCCESS: reached} if SUCCESS in features else {}) | {
        # the dtype of the column in `COLUMNS`
        "timestamp": (frames / fps).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full(length, number),
        "index": frames + first,
        "task_index": np.asarray(task_index),
    }


def _vector(entries: int | Sequence[str]) -> dict[str, Any]:
    names = None if isinstance(entries, int) else list(entries)
    return {"dtype": "float32", "shape": [entries if isinstance(entries, int) else len(entries)], "names": names}


def _camera(shape: list[int], video: bool) -> dict[str, Any]:
    described = {"dtype": "video" if video else "image", "shape": shape, "names": ["height", "width", "channels"]}
    return described | ({"info": {"is_depth_map": True}} if shape[2] == 1 else {})


def _wanted_shape(feature: Mapping[str, Any], depth: bool) -> str:
    """Expected shape if a feature cannot be stored, otherwise empty."""
    shape = feature["shape"]
    positive = min(shape, default=0) >= 1
    if feature["dtype"] in IMAGES:
        channels = 1 if depth else 3
        fits = positive and len(shape) == 3 and channels in (shape[0], shape[2])
        # yuv420p halves both sides
        if fits and feature["dtype"] == "video" and not depth and any(size % 2 for size in image_size(feature)):
            return "an even height and width, which H.264 needs; resize the images, or use dtype image (video=False)"
        return "" if fits else f"[H, W, {channels}]" + ("" if depth else ", or [H, W, 1] with is_depth_map in its info")
    if feature["dtype"] == "string":
        return "" if shape == [1] else "[1]"
    return "" if positive and len(shape) <= MOST_AXES else f"1 to {MOST_AXES} sizes of at least 1"


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
            raise ValueError(f"{key} has type {values.dtype}, which is {unit!r}; the dataset stores depth in {known!r}")
    if not np.isfinite(values.astype(np.float64)).all():
        raise ValueError(f"{key} has values that are not finite")
    if not depth:
        _check_storable(key, values, np.dtype(dtype))
    return values


def _check_storable(key: str, values: NDArray, dtype: np.dtype) -> None:
    """Reject finite values that would change when stored: become infinite, or wrap around as integers."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = values.astype(dtype)
    lost = ~np.isfinite(stored) if dtype.kind == "f" else stored != values
    if lost.any():
        raise ValueError(f"{key} has the value {values[lost].flat[0]:g}, which the dataset's {dtype} cannot represent")
