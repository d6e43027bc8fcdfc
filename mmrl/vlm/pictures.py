"""What a question showed, for the report: its images, and the frames used of its videos with their times."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from mmrl.hub.video_sampling import Frames, frame_times
from mmrl.vlm.task import VlmTask
from mmrl.vlm.video_input import load_videos

COLUMNS, ROWS = 4, 4
"""Frames side by side, and strips of a video; of more frames some are shown, spread evenly."""
CELL, MARGIN, CAPTION = 112, 2, 16
"""Pixels: width of a frame with its margins, each margin, and height of its time."""
GROUND, INK = (24, 26, 30), (235, 235, 235)


def pictures_of(task: VlmTask, patch_size: int) -> list[Image.Image]:
    """Images of a task, then strips of its videos.

    Args:
        task: a task that could be encoded.
        patch_size: pixels on a side of one patch of the vision tower.
    """
    strips = [strip for frames in load_videos(task, patch_size) for strip in frame_strips(frames)]
    return [*task.load_images(), *strips]


def frame_strips(frames: Frames) -> list[Image.Image]:
    """Lay out the frames of a video in strips of four, each frame with its time in seconds below."""
    pixels, times = frames[0], frame_times(frames)
    shown = np.unique(np.linspace(0, len(times) - 1, min(len(times), COLUMNS * ROWS)).round().astype(int)).tolist()
    cells = [_cell(Image.fromarray(_rgb(pixels[place])), times[place]) for place in shown]
    return [_beside(cells[first : first + COLUMNS]) for first in range(0, len(cells), COLUMNS)]


def _rgb(frame: object) -> np.ndarray:
    return np.asarray(frame).transpose(1, 2, 0).clip(0, 255).astype(np.uint8)


def _cell(frame: Image.Image, time_s: float) -> Image.Image:
    scale = (CELL - 2 * MARGIN) / max(frame.size)
    width, height = (max(1, round(side * scale)) for side in frame.size)
    cell = Image.new("RGB", (CELL, height + 2 * MARGIN + CAPTION), GROUND)
    cell.paste(frame.resize((width, height)), ((CELL - width) // 2, MARGIN))
    ImageDraw.Draw(cell).text((CELL // 2, cell.height - CAPTION // 2), f"{time_s:.2f} s", INK, anchor="mm")
    return cell


def _beside(cells: list[Image.Image]) -> Image.Image:
    strip = Image.new("RGB", (CELL * len(cells), cells[0].height), GROUND)
    for place, cell in enumerate(cells):
        strip.paste(cell, (place * CELL, 0))
    return strip
