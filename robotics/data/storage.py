"""Sizes of a dataset's files, and the `meta/info.json` of a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrl.hub.video import VideoSettings
from robotics.data.layout import DATA_PATH, VERSION, VIDEO_PATH


@dataclass(frozen=True)
class StorageSettings:
    """Sizes of a dataset's files and the encoder of its videos; the defaults are lerobot's."""

    data_mb: float = 100
    """Size that a data or metadata file does not exceed, unless a single episode does."""
    video_mb: float = 200
    """The same for videos."""
    files_per_chunk: int = 1000
    """Files in a folder chunk-XXX."""
    video: VideoSettings = field(default_factory=lambda: VideoSettings(gop=2))
    """Encoder; lerobot's two frames between key frames make single frames quick to read."""


def new_info(fps: int, features: dict[str, Any], robot: str | None, settings: StorageSettings) -> dict[str, Any]:
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
