"""Features of a LeRobotDataset: the contents of a frame, as in `meta/info.json`.

A feature has a dtype, a shape and names. A camera has the dtype video or image and the shape (H, W, 3), or (3, H, W) in
datasets from elsewhere; with `is_depth_map` in its info it is depth, (H, W, 1). The others are columns of numbers,
booleans or texts.

Source: huggingface/lerobot 0.6.1, src/lerobot/datasets/feature_utils.py, src/lerobot/utils/feature_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.errors import UserError

STATE, ACTION, SUCCESS = "observation.state", "action", "next.success"
IMAGE_PREFIX = "observation.images."
MOST_AXES = 5
"""Of a numeric feature, which lerobot stores as Array2D to Array5D."""


def robot_features(
    state: int | Sequence[str] | None,
    action: int | Sequence[str],
    cameras: Mapping[str, tuple[int, int]] | None = None,
    video: bool = True,
    depth: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Describe the features of a robot that has an action and, if wanted, a state, cameras and depth cameras.

    Args:
        state: entries of the state, or their names; None without one.
        action: entries of the action, or their names.
        cameras: (H, W) pixels of each camera; none when None.
        video: whether images become mp4, with some loss; else PNG, and TIFF for depth, inside the data files, without.
        depth: (H, W) pixels of each depth camera, whose names differ from those of the cameras; none when None.

    Returns:
        Features as `EpisodeWriter` takes and `meta/info.json` shows them.

    Raises:
        UserError: a camera and a depth camera have one name.
    """
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
    """Check features (name -> dtype, shape, names, info) and add those of every dataset made here."""
    complete = {}
    for key, feature in features.items():
        dtype, shape = feature.get("dtype"), [int(size) for size in feature.get("shape", ())]
        if "/" in key:
            raise UserError(f"feature {key!r} has a '/' in its name; the format keeps it for columns, use a '.'")
        if dtype not in (*IMAGES, *DTYPES, "string"):
            raise UserError(f"feature {key!r} has dtype {dtype!r}; known are {', '.join((*IMAGES, *DTYPES, 'string'))}")
        named = {"dtype": dtype, "shape": shape, "names": feature.get("names")}
        wanted = _wanted_shape(named, is_depth(feature))
        if wanted:
            raise UserError(f"feature {key!r} has shape {shape}; expected {wanted}")
        complete[key] = named | ({"info": dict(feature["info"])} if feature.get("info") else {})
    return complete | {key: dict(feature) for key, feature in COLUMNS.items()}


def camera_features(features: Mapping[str, Any], dtypes: Sequence[str] = ("video", "image")) -> list[str]:
    """Cameras' features stored as one of `dtypes`, in their order, without depth."""
    return [key for key, feature in features.items() if feature["dtype"] in dtypes and not is_depth(feature)]


def depth_features(features: Mapping[str, Any], dtypes: Sequence[str] = ("video", "image")) -> list[str]:
    """Depth cameras' features stored as one of `dtypes`, in their order."""
    return [key for key, feature in features.items() if feature["dtype"] in dtypes and is_depth(feature)]


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Whether a feature is depth: `is_depth_map`, which versions before 0.6 called `video.is_depth_map`."""
    about = [part for part in (feature.get("info"), feature.get("video_info")) if isinstance(part, Mapping)]
    return any(part.get("is_depth_map") or part.get("video.is_depth_map") for part in about)


def camera_name(key: str) -> str:
    """Name of a camera: that of its feature without `observation.images.`."""
    return key.removeprefix(IMAGE_PREFIX)


def image_size(feature: Mapping[str, Any]) -> tuple[int, int]:
    """(H, W) of a camera's feature; datasets from elsewhere may give (channel, height, width)."""
    shape, names = feature["shape"], feature.get("names") or ()
    first = str(names[0]) if names and not isinstance(names, Mapping) else ""
    channel_first = first.startswith("c") or (not first and shape[0] in (1, 3) and shape[2] not in (1, 3))
    return (shape[1], shape[2]) if channel_first else (shape[0], shape[1])


def _vector(entries: int | Sequence[str]) -> dict[str, Any]:
    names = None if isinstance(entries, int) else list(entries)
    return {"dtype": "float32", "shape": [entries if isinstance(entries, int) else len(entries)], "names": names}


def _camera(shape: list[int], video: bool) -> dict[str, Any]:
    described = {"dtype": "video" if video else "image", "shape": shape, "names": ["height", "width", "channels"]}
    return described | ({"info": {"is_depth_map": True}} if shape[2] == 1 else {})


def _wanted_shape(feature: Mapping[str, Any], depth: bool) -> str:
    """Expected shape where a feature cannot be stored; empty where it can."""
    shape = feature["shape"]
    positive = min(shape, default=0) >= 1
    if feature["dtype"] in IMAGES:
        channels = 1 if depth else 3
        fits = positive and len(shape) == 3 and channels in (shape[0], shape[2])
        return "" if fits else f"[H, W, {channels}]" + ("" if depth else ", or [H, W, 1] with is_depth_map in its info")
    if feature["dtype"] == "string":
        return "" if shape == [1] else "[1]"
    return "" if positive and len(shape) <= MOST_AXES else f"1 to {MOST_AXES} sizes of at least 1"


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
"""Columns that every dataset has, whoever wrote it."""
