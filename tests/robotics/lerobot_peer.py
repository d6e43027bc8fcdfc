"""Datasets that the package lerobot writes, appends to and reads; for tests, which run this with its interpreter.

    python -m tests.robotics.lerobot_peer write FOLDER , append FOLDER NUMBER , read FOLDER OUT.npz

`write` makes three episodes with every kind of feature, `append` adds the one of a number, and `read` saves what
LeRobotDataset gives for each frame, and its metadata. The values follow from the number of the episode and the features
alone, so that both sides know them.

`lerobot-0.6.1.tar.xz` beside this file is what `write` made with lerobot 0.6.1, PyAV 15.1.0, datasets 4.8.5 and pyarrow
26.0.1 under Python 3.12:

    python -m tests.robotics.lerobot_peer write lerobot-0.6.1
    tar cJf lerobot-0.6.1.tar.xz lerobot-0.6.1/{meta,data,videos}
"""

import json
import sys
from pathlib import Path

import numpy as np

FPS = 10
SMALL = (16, 24)
FILMED, FILMED_DEPTH = (64, 64), (32, 48)
"""Pixels of the videos; the encoder SVT-AV1 takes none below 64, x265 none below 32."""
NAMES = ["height", "width", "channels"]
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
    "action": {"dtype": "float32", "shape": [2], "names": ["left", "right"]},
    "observation.images.film": {"dtype": "video", "shape": [*FILMED, 3], "names": NAMES},
    "observation.images.still": {"dtype": "image", "shape": [*SMALL, 3], "names": NAMES},
    "observation.images.depth": {
        "dtype": "image",
        "shape": [*SMALL, 1],
        "names": NAMES,
        "info": {"is_depth_map": True},
    },
    "observation.images.depth_film": {
        "dtype": "video",
        "shape": [*FILMED_DEPTH, 1],
        "names": NAMES,
        "info": {"is_depth_map": True},
    },
    "force": {"dtype": "float32", "shape": [4], "names": None},
    "gain": {"dtype": "float64", "shape": [1], "names": None},
    "count": {"dtype": "int64", "shape": [1], "names": None},
    "code": {"dtype": "uint16", "shape": [3], "names": None},
    "contact": {"dtype": "bool", "shape": [2], "names": None},
    "button": {"dtype": "bool", "shape": [1], "names": None},
    "mode": {"dtype": "string", "shape": [1], "names": None},
    "grid": {"dtype": "float32", "shape": [2, 3], "names": None},
    "cube": {"dtype": "int32", "shape": [2, 2, 2], "names": None},
}
TASKS = ("open the drawer", "put the cube in", "close the drawer")


def episode_length(number: int) -> int:
    """Frames of an episode."""
    return 4 + number % 3


def episode_tasks(number: int) -> list[str]:
    """Instruction of each frame; it changes within the episodes of odd numbers."""
    half = episode_length(number) // 2
    first = TASKS[number % 3]
    return [first] * half + [TASKS[(number + number % 2) % 3]] * (episode_length(number) - half)


def episode_values(features: dict, number: int) -> dict[str, np.ndarray]:
    """(T, ...) values of each feature in an episode, without those of bookkeeping; depth in millimetres or metres."""
    kept = {"timestamp", "frame_index", "episode_index", "index", "task_index"}
    length = episode_length(number)
    return {
        key: _values(key, feature["dtype"], tuple(feature["shape"]), number, length)
        for key, feature in features.items()
        if key not in kept
    }


def _values(key: str, dtype: str, shape: tuple[int, ...], number: int, length: int) -> np.ndarray:
    count = np.arange(length * int(np.prod(shape))).reshape(length, *shape)
    if dtype in ("image", "video"):
        return _depth(dtype, shape, number, length) if shape[-1] == 1 else _colours(shape, number, length)
    if dtype == "string":
        return np.array([f"{key} {number}.{frame % 2}" for frame in range(length)], object)
    if dtype == "bool":
        return (count + number) % 3 == 0
    if dtype.startswith("float"):
        return np.sin(count * 0.7 + 2 * number + len(key)).astype(dtype)
    return ((count * 37 + 11 * number) % 101).astype(dtype)


def _colours(shape: tuple[int, ...], number: int, length: int) -> np.ndarray:
    # Smooth, so that a lossy video brings them back; the frame shifts the brightness by 8, the episode by 30.
    height, width, _ = shape
    ramp = np.linspace(0, 40, height)[:, None] + np.linspace(0, 60, width)
    frames = ramp + 8.0 * np.arange(length)[:, None, None] + 30 * (number % 4)
    return np.stack([frames, frames * 0.8, frames * 0.6], -1).astype(np.uint8)


def _depth(dtype: str, shape: tuple[int, ...], number: int, length: int) -> np.ndarray:
    height, width, _ = shape
    metres = 0.3 + np.linspace(0, 1, height)[:, None] + np.linspace(0, 2, width)
    metres = metres + 0.05 * np.arange(length)[:, None, None] + 0.1 * (number % 4)
    values = metres * 1000 if dtype == "image" else metres
    return values[..., None].astype(np.uint16 if dtype == "image" else np.float32)


def write(folder: Path) -> None:
    """Let lerobot write a dataset of three episodes with every kind of feature."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {key: dict(feature, shape=tuple(feature["shape"])) for key, feature in FEATURES.items()}
    dataset = LeRobotDataset.create("local/peer", FPS, features, root=folder, robot_type="arm", video_backend="pyav")
    for number in range(3):
        _add(dataset, number)
    dataset.finalize()


def append(folder: Path, number: int) -> None:
    """Let lerobot append an episode to a dataset."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.resume("local/peer", root=folder, video_backend="pyav")
    _add(dataset, number)
    dataset.finalize()


def _add(dataset, number: int) -> None:
    values = episode_values(dataset.meta.features, number)
    for frame, task in enumerate(episode_tasks(number)):
        given = {key: _frame(dataset.meta.features[key], one[frame]) for key, one in values.items()}
        dataset.add_frame(given | {"task": task})
    dataset.save_episode(parallel_encoding=False)


def _frame(feature: dict, value):
    if feature["dtype"] == "string":
        return str(value)
    shape = tuple(feature["shape"])
    return np.asarray(value, value.dtype).reshape(shape)


def read(folder: Path, out: Path) -> None:
    """Save the data that lerobot reads: `frame/<key>` stacked over frames, and `meta`, JSON of its metadata."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset("local/peer", root=folder, video_backend="pyav")
    items = [dataset[index] for index in range(len(dataset))]
    arrays = {f"frame/{key}": _stacked([item[key] for item in items]) for key in items[0]}
    deltas = {"action": [-1 / dataset.fps, 0.0, 1 / dataset.fps, 2 / dataset.fps]}
    chunked = LeRobotDataset("local/peer", root=folder, video_backend="pyav", delta_timestamps=deltas)
    rows = [chunked[index] for index in range(len(chunked))]
    arrays |= {f"chunk/{key}": _stacked([row[key] for row in rows]) for key in ("action", "action_is_pad")}
    meta = {
        "episodes": [dict(row) for row in dataset.meta.episodes],
        "stats": {key: {name: one.tolist() for name, one in part.items()} for key, part in dataset.meta.stats.items()},
        "tasks": dataset.meta.tasks.index[np.argsort(dataset.meta.tasks["task_index"])].tolist(),
        "info": dataset.meta.info.to_dict(),
        "depth_keys": dataset.meta.depth_keys,
    }
    np.savez(out, meta=np.array(json.dumps(meta)), **arrays)


def _stacked(values: list) -> np.ndarray:
    return np.array(values) if isinstance(values[0], str) else np.stack([value.numpy() for value in values])


if __name__ == "__main__":
    for step in " ".join(sys.argv[1:]).split(" , "):
        command, folder, *rest = step.split()
        if command == "append":
            append(Path(folder), int(rest[0]))
        else:
            {"write": write, "read": read}[command](Path(folder), *map(Path, rest))
