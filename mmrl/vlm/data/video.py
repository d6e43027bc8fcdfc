"""Videos of a question: reading a data set's cell, and the frames that the model is shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from PIL import Image

from mmrl.fields import bounded, rare
from mmrl.files import expanded
from mmrl.hub.video_reading import VideoError
from mmrl.hub.video_sampling import FILE_OPTIONS, FRAME_LIST_OPTIONS, Frames, sample_file, sample_frames
from mmrl.vlm.data.task import TaskError, VideoClip, VlmTask, open_image, shortened

SOURCE_KEYS = ("video", "path", "url", "frames")
FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
MAY_BE_ZERO = ("video_start", "video_end")


@dataclass
class VideoOptions:
    """Frames of a video file that the model is shown; a row's own options override these."""

    fps: float | None = bounded(None, above=0, finite=True)
    """Frames a second; empty: 2, as qwen-vl-utils."""
    nframes: int | None = rare(bounded(None, at_least=2))
    """Number of frames, rounded to an even one, in place of `fps`."""
    min_frames: int | None = rare(bounded(None, at_least=2))
    """Fewest frames that `fps` gives, if the video has as many; empty: 4."""
    max_frames: int | None = bounded(None, at_least=2)
    """Most frames that `fps` gives, and the longest list of frames; empty: 768."""
    min_pixels: int | None = rare(bounded(None, at_least=1))
    """Smallest frame in pixels, smaller ones are enlarged; empty: 128 tokens."""
    max_pixels: int | None = bounded(None, at_least=1)
    """Largest frame in pixels, larger ones are reduced; empty: 768 tokens, less where a video has many frames."""
    total_pixels: int | None = rare(bounded(None, at_least=1))
    """Pixels of all pairs of frames of a video; empty: 115,200 tokens."""

    def validate(self) -> None:
        """Check that the options fit together; raises ValueError."""
        if self.fps is not None and self.nframes is not None:
            raise ValueError(f"data.video.fps is {self.fps} and data.video.nframes {self.nframes}; set one of them")

    def complete(self, clip: VideoClip) -> VideoClip:
        """A clip with these options where it has none of its own."""
        fits = FILE_OPTIONS if isinstance(clip.source, str) else FRAME_LIST_OPTIONS
        set_here = () if not {"fps", "nframes"} & set(clip.options) else ("fps", "nframes")
        usual = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name in fits and name not in set_here
        }
        return replace(clip, options={**usual, **clip.options})


def read_video_cell(cell: Any, folder: Path, place: str) -> list[VideoClip]:
    """List the videos of a row."""
    if cell is None or cell == "":
        return []
    several = isinstance(cell, list | tuple) and not _are_frames(cell)
    return [_clip(item, folder, place) for item in (cell if several else [cell])]


def load_videos(task: VlmTask, patch_size: int) -> list[Frames]:
    """Decode the frames of a task's videos that the model is shown.

    Args:
        task: question with videos.
        patch_size: pixels on a side of one patch of the vision tower.

    Returns:
        Frames and their metadata, one pair a video.

    Raises:
        TaskError: a video cannot be used; the kind is one of `VIDEO_ERRORS` or of an image.
        UserError: qwen-vl-utils is not installed.
    """
    return [task.shown_frames(_load(task, number, patch_size), number) for number in range(len(task.videos))]


def _load(task: VlmTask, number: int, patch_size: int) -> Frames:
    video = task.videos[number]
    clip = video if isinstance(video, VideoClip) else VideoClip(video)
    try:
        if isinstance(clip.source, str):
            path = clip.source.removeprefix("file://")
            return sample_file(path, clip.options, patch_size, task.max_image_pixels)
        frames = clip.source
        images = (
            open_image(frame, task.id, f"frame {place} of video {number + 1}", task.max_image_pixels)
            for place, frame in enumerate(frames, start=1)
        )
        return sample_frames(images, len(frames), clip.options, patch_size)
    except VideoError as error:
        name = f" ({shortened(clip.source)})" if isinstance(clip.source, str) else ""
        raise TaskError(error.kind, task.id, f"video {number + 1} of {len(task.videos)}{name}: {error}") from None


def _clip(value: Any, folder: Path, place: str) -> VideoClip:
    options: dict[str, Any] = {}
    if hasattr(value, "read") and not isinstance(value, Image.Image):
        value = value.read()
    if isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}
        key = next((key for key in SOURCE_KEYS if key in given), None)
        if key is None:
            raise _bad(place, f"a mapping with {', '.join(map(str, given)) or 'nothing'}")
        value = given.pop(key)
        options = {name: item for name, item in given.items() if name not in SOURCE_KEYS and name != "bytes"}
    if isinstance(value, str | PurePath) and str(value):
        return VideoClip(_located(str(value), folder), _checked(options, FILE_OPTIONS, place))
    if isinstance(value, list | tuple) and _are_frames(value):
        if "fps" in options:  # frames that are there already can only have a rate of their own
            options["sample_fps"] = options.pop("fps")
        frames = [_located(item, folder) if isinstance(item, str) else item for item in value]
        return VideoClip(frames, _checked(options, FRAME_LIST_OPTIONS, place))
    raise _bad(place, f"a {type(value).__name__}")


def _bad(place: str, found: str) -> TaskError:
    keys = ", ".join(SOURCE_KEYS)
    message = f"a video is {found}; expected a path, a list of images or a mapping with one of these under {keys}"
    return TaskError("bad_video", place, message)


def _are_frames(items: Sequence[Any]) -> bool:
    """Whether a list is one of images; only the first one is read from a table."""
    if items and hasattr(items[0], "read"):
        items = [items[0].read()]
    return bool(items) and all(_is_frame(item) for item in items)


def _is_frame(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:image") or value.lower().endswith(FRAME_SUFFIXES)
    if isinstance(value, Mapping):
        path = value.get("path")
        return _is_frame(path) if isinstance(path, str) else value.get("bytes") is not None
    return isinstance(value, Image.Image | bytes)


def _located(path: str, folder: Path) -> str:
    if path.startswith(("data:", "http://", "https://")):
        return path
    return str(folder / expanded(path.removeprefix("file://")))


def _checked(options: dict[str, Any], known: tuple[str, ...], place: str) -> dict[str, Any]:
    for name, value in options.items():
        if name not in known:
            raise TaskError("bad_video", place, f"a video has the option {name!r}; there are: {', '.join(known)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            raise TaskError("bad_video", place, f"a video has {name}={value!r}; it must be a positive number")
    if {"fps", "nframes"} <= set(options):
        raise TaskError("bad_video", place, "a video has both fps and nframes; give one of them")
    return options


VIDEO_ERRORS = {
    "empty_video": "A video has zero bytes, no video track or no frame.",
    "unreadable_video": "A video cannot be decoded, or its frames differ in size.",
    "truncated_video": "A video is shorter than its index or header states.",
    "unusable_video": "The frames that are asked for cannot be chosen from a video, or a list of frames is too long.",
}
"""Errors found where a video is decoded, further to `TASK_ERRORS`."""
