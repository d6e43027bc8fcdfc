"""The card of a LeRobotDataset written by this package, in the format of LeRobot's own cards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.hub.cards import fenced, plain, table, write_dataset_card
from robotics.data.features import ACTION, IMAGES, STATE

MOST_TASKS = 50
"""Maximum number of instructions listed in a card."""


def write_recording_card(folder: Path, info: Mapping[str, Any], tasks: Sequence[str]) -> None:
    """Write the card of a dataset from its `meta/info.json` and its instructions."""
    features, robot = info["features"], info.get("robot_type")
    seconds = info["total_frames"] / info["fps"]
    cameras = [name for name, feature in features.items() if feature["dtype"] in IMAGES]
    sizes = [
        [plain(name), " x ".join(map(str, features[name]["shape"]))]
        for name in (STATE, ACTION, *cameras)
        if name in features
    ]
    head = {
        "tags": list(dict.fromkeys(["LeRobot", "mmrl", *([str(robot)] if robot else [])])),
        "task_categories": ["robotics"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    shown = [[plain(task)] for task in tasks[:MOST_TASKS]]
    robot_text = f", of the robot {plain(robot)}" if robot else ""
    read = ["from robotics import LeRobotReader", "", 'reader = LeRobotReader(".")  # this folder']
    read += ["episode = reader.episode(0)", "print(episode.task, episode.action.shape)"]
    lines = [
        f"{info['total_episodes']:,} episodes with {info['total_frames']:,} frames ({seconds:,.0f} s at "
        f"{info['fps']} frames per second){robot_text}, in the format {plain(info['codebase_version'])} of "
        "[LeRobot](https://github.com/huggingface/lerobot).",
        "",
        *table([f"instructions, {len(shown)} of {len(tasks)}"], shown),
        *table(["feature", "shape"], sizes),
        "## Reading",
        "",
        *fenced("\n".join(read), "python"),
        "`lerobot.datasets.lerobot_dataset.LeRobotDataset` reads it too. [meta/info.json](meta/info.json):",
        "",
        *fenced(json.dumps(info, indent=1), "json"),
    ]
    write_dataset_card(folder, folder.resolve().name, lines, **head)
