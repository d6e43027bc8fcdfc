"""Episodes as short videos: what the agent saw, what it did, and where on the picture.

An environment may say in `info["marks"]` where an action acted: pairs (x, y) in pixels of the picture that the agent
saw before; the film draws a ring at each and a line between two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.agents.environment import Observation

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.ImageDraw import ImageDraw

MARKS = "marks"
SMALLEST_SIDE, LARGEST_SIDE = 240, 1280
"""Pixels of the pictures in a film; smaller ones are enlarged by whole factors, larger ones shrunk."""
FONT_PX, LINES = 14, 3
CAPTION_PX = LINES * (FONT_PX + 4) + 8
MOST_MARKS = 16
RED, INK, PAPER = (225, 30, 60), (20, 20, 20), (255, 255, 255)
FRAMES_PER_SECOND = 1.0


@dataclass(frozen=True)
class FilmFrame:
    """One turn."""

    image: NDArray[np.uint8] | None
    """(H, W, 3) that the agent saw; None where it saw only text."""
    caption: str
    """What it did, and what came of it."""
    marks: tuple[tuple[float, float], ...] = ()
    """(x, y) in pixels of the image where the action acted."""


@dataclass
class Film:
    """One episode.

    film = Film("maze/7")
    film.add(observation, "up", turn.info)
    film.end(turn.observation, reward=1.0, success=True)
    write_films(run / "videos", "step-000010-held_out", [film], count=2)
    """

    task: str
    """Id of the task."""
    frames: list[FilmFrame] = field(default_factory=list)
    success: bool | None = None
    """None until the episode has ended."""

    def add(self, observation: Observation, caption: str, info: Mapping[str, Any] | None = None) -> None:
        """Append a turn."""
        info = info or {}
        error = info.get("action_error")
        marks = _marks(info.get(MARKS))
        self.frames.append(FilmFrame(_picture(observation), f"{caption}   [{error}]" if error else caption, marks))

    def end(self, observation: Observation, reward: float, success: bool) -> None:
        """Append what the agent saw last."""
        self.success = success
        self.frames.append(
            FilmFrame(_picture(observation), f"{'success' if success else 'failure'}, reward {reward:g}")
        )


def draw_frames(film: Film) -> Iterator[NDArray[np.uint8]]:
    """Draw the frames of a film, all of one size: picture, marks, and the caption below.

    Yields:
        (H, W, 3), a frame a turn.
    """
    from PIL import Image, ImageDraw

    sizes = [_scaled(frame.image.shape) for frame in film.frames if frame.image is not None]
    width = max([SMALLEST_SIDE, *(size[0] for size in sizes)])
    height = max([0, *(size[1] for size in sizes)])
    for number, frame in enumerate(film.frames, 1):
        canvas = Image.new("RGB", (width, height + CAPTION_PX), PAPER)
        draw = ImageDraw.Draw(canvas)
        if frame.image is not None:
            size = _scaled(frame.image.shape)
            larger = size[0] >= frame.image.shape[1]
            picture = Image.fromarray(frame.image)
            kind = Image.Resampling.NEAREST if larger else Image.Resampling.BOX
            canvas.paste(picture.resize(size, kind), (0, 0))
            _draw_marks(draw, frame.marks, size[0] / frame.image.shape[1])
        _write_caption(draw, f"{number}/{len(film.frames)}  {frame.caption}", height, width)
        yield np.asarray(canvas)


def write_films(folder: Path, label: str, films: Sequence[Film], count: int) -> list[Path]:
    """Write the first films that ended well, and as many that did not; the report shows those of `videos/`."""
    from mmrl.hub.video import write_mp4

    paths = []
    for success in (True, False):
        for film in [film for film in films if film.success is success and film.frames][:count]:
            name = re.sub(r"[^\w.-]+", ".", film.task)[:80]
            path = folder / f"{label}-{'success' if success else 'failure'}-{name}.mp4"
            paths.append(write_mp4(path, draw_frames(film), FRAMES_PER_SECOND))
    return paths


def _picture(observation: Observation) -> NDArray[np.uint8] | None:
    return observation.images[-1] if observation.images else None


def _marks(value: Any) -> tuple[tuple[float, float], ...]:
    """Those that are finite pairs of numbers; an environment may say anything."""
    try:
        pairs = np.asarray(value, np.float64).reshape(-1, 2) if value is not None else np.zeros((0, 2))
    except (TypeError, ValueError):
        return ()
    return tuple((float(x), float(y)) for x, y in pairs[:MOST_MARKS] if math.isfinite(x) and math.isfinite(y))


def _scaled(shape: tuple[int, ...]) -> tuple[int, int]:
    """Width and height in the film."""
    height, width = shape[:2]
    if max(height, width) > LARGEST_SIDE:
        scale = LARGEST_SIDE / max(height, width)
        return max(1, round(width * scale)), max(1, round(height * scale))
    factor = max(1, min(-(-SMALLEST_SIDE // min(height, width)), LARGEST_SIDE // max(height, width)))
    return width * factor, height * factor


def _draw_marks(draw: ImageDraw, marks: Sequence[tuple[float, float]], scale: float) -> None:
    places = [((x + 0.5) * scale, (y + 0.5) * scale) for x, y in marks]
    if len(places) > 1:
        draw.line(places, fill=RED, width=2)
    for x, y in places:
        for radius, colour in ((9, PAPER), (8, RED), (7, RED), (6, PAPER)):
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), outline=colour)
        draw.ellipse((x - 1, y - 1, x + 1, y + 1), fill=RED)


def _write_caption(draw: ImageDraw, text: str, top: int, width: int) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(FONT_PX)
    words = "".join(letter if letter.isprintable() else " " for letter in text[:1000])
    lines: list[str] = [""]
    for letter in words:
        if draw.textlength(lines[-1] + letter, font=font) > width - 12:
            if len(lines) == LINES:
                lines[-1] = lines[-1][:-1] + "…"
                break
            lines.append("")
        lines[-1] += letter
    for place, line in enumerate(lines):
        draw.text((6, top + 4 + place * (FONT_PX + 4)), line, fill=INK, font=font)
