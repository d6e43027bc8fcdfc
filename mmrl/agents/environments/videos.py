"""Episodes as short videos: the agent's observations, its actions, and their points on the image.

An environment may set `info["marks"]` to where an action acted: pairs (x, y) in pixels of the image that the agent saw
before; the video draws a ring at each and a line between two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.agents.environments.environment import Observation
from mmrl.files import shortened_name

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageDraw import ImageDraw

MARKS = "marks"
SMALLEST_SIDE, LARGEST_SIDE = 240, 1280
"""Pixels of the images in a video; smaller images are enlarged by integer factors, larger images are shrunk."""
FONT_PX, LINES = 14, 3
CAPTION_PX = LINES * (FONT_PX + 4) + 8
MOST_MARKS = 16
RED, INK, PAPER = (225, 30, 60), (20, 20, 20), (255, 255, 255)
FRAMES_PER_SECOND = 1.0


@dataclass(frozen=True)
class VideoFrame:
    """One turn."""

    image: NDArray[np.uint8] | None
    """(H, W, 3) image that the agent saw; None if it saw only text."""
    caption: str
    """Action and error."""
    marks: tuple[tuple[float, float], ...] = ()
    """(x, y) in image pixels, the points that the action acted on."""


@dataclass
class Video:
    """One episode.

    video = Video("maze/7")
    video.add(observation, "up()", turn.info)
    video.end(turn.observation, reward=1.0, success=True)
    write_videos(run / "videos", "step-000010-held_out", [video], count=2)
    """

    task: str
    """Id of the task."""
    frames: list[VideoFrame] = field(default_factory=list)
    success: bool | None = None
    """None until the episode has ended."""

    def add(self, observation: Observation, caption: str, info: Mapping[str, Any] | None = None) -> None:
        """Append a turn."""
        info = info or {}
        error = info.get("action_error")
        # the last image is what the action refers to
        image = observation.images[-1] if observation.images else None
        self.frames.append(VideoFrame(image, f"{caption}   [{error}]" if error else caption, _marks(info.get(MARKS))))

    def end(self, observation: Observation, reward: float, success: bool) -> None:
        """Append the last observation."""
        self.success = success
        self.add(observation, f"{'success' if success else 'failure'}, reward {reward:g}")


def draw_frames(video: Video) -> Iterator[NDArray[np.uint8]]:
    """Draw the frames (H, W, 3) of a video, one per turn, all of one size: image, marks, and the caption below."""
    from PIL import Image, ImageDraw

    sizes = [_scaled(frame.image.shape) for frame in video.frames if frame.image is not None]
    # all frames of a file must have one size
    width = max([SMALLEST_SIDE, *(size[0] for size in sizes)])
    height = max([0, *(size[1] for size in sizes)])
    for number, frame in enumerate(video.frames, 1):
        canvas = Image.new("RGB", (width, height + CAPTION_PX), PAPER)
        draw = ImageDraw.Draw(canvas)
        if frame.image is not None:
            size, source_width = _scaled(frame.image.shape), frame.image.shape[1]
            # whole factors keep pixels sharp; BOX averages when shrinking
            kind = Image.Resampling.NEAREST if size[0] >= source_width else Image.Resampling.BOX
            canvas.paste(Image.fromarray(frame.image).resize(size, kind), (0, 0))
            _draw_marks(draw, frame.marks, size[0] / source_width)
        _write_caption(draw, f"{number}/{len(video.frames)}  {frame.caption}", height, width)
        yield np.asarray(canvas)


def write_videos(folder: Path, label: str, videos: Sequence[Video], count: int) -> list[Path]:
    """Write the first `count` successes and the first `count` failures; the report shows the ones in `videos/`."""
    from mmrl.hub.video_writing import write_mp4

    paths = []
    for success in (True, False):
        for video in [video for video in videos if video.success is success and video.frames][:count]:
            # task ids may contain slashes and spaces
            name = shortened_name(re.sub(r"[^\w.-]+", ".", video.task), 80)
            path = folder / f"{label}-{'success' if success else 'failure'}-{name}.mp4"
            paths.append(write_mp4(path, draw_frames(video), FRAMES_PER_SECOND))
    return paths


def _marks(value: Any) -> tuple[tuple[float, float], ...]:
    """The finite number pairs in `info["marks"]`, which may have any type."""
    try:
        pairs = np.asarray(value, np.float64).reshape(-1, 2) if value is not None else np.zeros((0, 2))
    except (TypeError, ValueError):
        return ()
    # the environment's info is not trusted: any type, any number of points
    return tuple((float(x), float(y)) for x, y in pairs[:MOST_MARKS] if math.isfinite(x) and math.isfinite(y))


def _scaled(shape: tuple[int, ...]) -> tuple[int, int]:
    """Width and height in the video."""
    height, width = shape[:2]
    if max(height, width) > LARGEST_SIDE:
        scale = LARGEST_SIDE / max(height, width)
        return max(1, round(width * scale)), max(1, round(height * scale))
    # rounded up, so that the short side reaches SMALLEST_SIDE
    factor = max(1, min(-(-SMALLEST_SIDE // min(height, width)), LARGEST_SIDE // max(height, width)))
    return width * factor, height * factor


def _draw_marks(draw: ImageDraw, marks: Sequence[tuple[float, float]], scale: float) -> None:
    # marks are pixel indices; the middle of a pixel
    points = [((x + 0.5) * scale, (y + 0.5) * scale) for x, y in marks]
    if len(points) > 1:
        draw.line(points, fill=RED, width=2)
    for x, y in points:
        for radius, colour in ((9, PAPER), (8, RED), (7, RED), (6, PAPER)):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour)
        draw.ellipse((x - 1, y - 1, x + 1, y + 1), fill=RED)


def _write_caption(draw: ImageDraw, text: str, top: int, width: int) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(FONT_PX)
    lines: list[str] = [""]
    for letter in text[:1000]:
        letter = letter if letter.isprintable() else " "
        if draw.textlength(lines[-1] + letter, font=font) > width - 12:
            if len(lines) == LINES:
                lines[-1] = lines[-1][:-1] + "…"
                break
            lines.append("")
        lines[-1] += letter
    for number, line in enumerate(lines):
        draw.text((6, top + 4 + number * (FONT_PX + 4)), line, fill=INK, font=font)
