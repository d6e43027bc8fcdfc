"""An image of picked frames: the needle on a time line, and the frames below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mmrl.hub.video_reading import VideoError
from mmrl.vlm.tspo.tasks import NeedleTask

if TYPE_CHECKING:
    from PIL.Image import Image

CELL, BORDER, CAPTION, LINE = 84, 4, 14, 26
FEWEST_COLUMNS = 4
GROUND, INK, TRACK = (24, 26, 30), (235, 235, 235), (70, 74, 82)
INSIDE, OUTSIDE = (64, 190, 110), (200, 90, 80)
SHOWN = 32
"""Most frames that are shown; of more, evenly spread ones."""


def pick_strip(frames: Sequence[Image], picks: Sequence[int], needle: np.ndarray, seconds: Sequence[float]) -> Image:
    """Draw K picked frames in the order of time.

    `picks` are their rising indices among the T candidates, `needle` (T,) is True on frames of the needle, which are
    green on the line and have a green border, `seconds` (T) are the times of the candidates.
    """
    from PIL import Image as Images
    from PIL import ImageDraw

    shown = np.unique(np.linspace(0, len(picks) - 1, min(len(picks), SHOWN)).round().astype(int)).tolist()
    # about square, since reports show images side by side
    columns = max(FEWEST_COLUMNS, math.ceil(math.sqrt(len(shown) * (CELL + CAPTION) / CELL)))
    rows = -(-len(shown) // columns)
    width, height = CELL * columns, CELL + CAPTION
    strip = Images.new("RGB", (width, LINE + rows * height), GROUND)
    draw = ImageDraw.Draw(strip)
    _draw_line(draw, width, picks, needle)
    for cell, number in enumerate(shown):
        left, top = (cell % columns) * CELL, LINE + cell // columns * height
        colour = INSIDE if needle[picks[number]] else OUTSIDE if needle.any() else TRACK
        draw.rectangle((left + 1, top, left + CELL - 2, top + CELL - 1), fill=colour)
        inner = CELL - 2 * BORDER
        scale = inner / max(frames[number].size)
        frame = frames[number].resize(tuple(max(1, round(side * scale)) for side in frames[number].size))
        strip.paste(frame, (left + (CELL - frame.width) // 2, top + (CELL - frame.height) // 2))
        centre = (left + CELL // 2, top + CELL + CAPTION // 2)
        draw.text(centre, f"{seconds[picks[number]]:.1f} s", INK, anchor="mm")
    return strip


def picked_strip(task: NeedleTask, picks: Sequence[int]) -> list[Image]:
    """An image of picked frames; none where the video can no longer be read."""
    try:
        images = task.video.images(picks)
    except VideoError:
        return []
    return [pick_strip([images[pick] for pick in picks], picks, task.needle, task.video.seconds)]


def _draw_line(draw: object, width: int, picks: Sequence[int], needle: np.ndarray) -> None:
    scale = (width - 8) / len(needle)

    def span(first: float, stop: float, top: int, bottom: int, colour: tuple[int, int, int]) -> None:
        left = 4 + first * scale
        draw.rectangle((left, top, max(4 + stop * scale, left + 1), bottom), fill=colour)  # type: ignore[attr-defined]

    span(0, len(needle), 8, 16, TRACK)
    for frame in np.flatnonzero(needle).tolist():
        span(frame, frame + 1, 8, 16, INSIDE)
    for frame in picks:
        span(frame + 0.35, frame + 0.65, 3, 21, INK)
