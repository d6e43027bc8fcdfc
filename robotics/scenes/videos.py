"""Videos of tabletop episodes for human viewers: the presentation scene from its own camera, with a caption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mmrl.files import replaced
from robotics.scenes.looks import CAMERA
from robotics.scenes.presentation import COLOURS, PresentedScene
from robotics.sim.rendering import FrameRenderer, Outcome, RenderSettings

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray
    from PIL import Image

    from robotics.scenes.scene import Scene


VIDEO_SIZE = (480, 640)
"""(H, W) pixels."""
SMALLEST_BAR_PX = 10


@dataclass(frozen=True)
class Caption:
    """The line at the bottom of an image."""

    text: str  # instruction of the task
    seconds: float  # simulated time since the start
    outcome: Outcome = ""

    @property
    def ending(self) -> str:
        """Time, and how the episode ended."""
        ends = {"": "", "success": "solved in ", "failure": "not solved in "}
        return f"{ends[self.outcome]}{self.seconds:.1f} s"


class VideoRenderer:
    """Draws a scene for human viewers: lights with shadows, materials, the camera `film`, and how the episode ended."""

    def __init__(self, scene: Scene, size: tuple[int, int] = VIDEO_SIZE, backend: str | None = None) -> None:
        self._presented = PresentedScene(scene)
        settings = RenderSettings(size[1], size[0], CAMERA, shadows=True, multisampling=True, reuse_static=False)
        self._renderer = FrameRenderer(self._presented.model, settings, backend)

    def rgb(
        self, data: mujoco.MjData, out: NDArray[np.uint8] | None = None, outcome: Outcome = ""
    ) -> NDArray[np.uint8]:
        """Draw (H, W, 3) RGB of a state, the top row first and without a caption, into out or a new array."""
        self._presented.show(data, outcome)
        drawn = self._renderer.rgb(self._presented.data, out)
        return drawn if out is not None else drawn.copy()

    def close(self) -> None:
        """Free the OpenGL context; from the thread that made the renderer."""
        self._renderer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def video_size(height: int) -> tuple[int, int]:
    """(H, W) of a video of the given height: 4:3, both even, because video encoders require it."""
    even = max(2, height + height % 2)
    return even, 2 * round(even * 2 / 3)


def write_caption(frame: NDArray[np.uint8], caption: Caption) -> NDArray[np.uint8]:
    """Copy of an image (H, W, 3) with a caption over its bottom: a bar, green after a success and red after a failure.

    The text is omitted if the bar has fewer than 10 pixels.
    """
    from PIL import Image, ImageDraw, ImageFont

    height, width, _ = frame.shape
    bar = max(1, round(0.075 * height))
    image = Image.fromarray(frame)
    pen = ImageDraw.Draw(image)
    colour = tuple(round(200 * part) for part in COLOURS[caption.outcome]) if caption.outcome else (32, 35, 40)
    pen.rectangle([0, height - bar, width, height], fill=colour)
    if bar >= SMALLEST_BAR_PX:
        font = ImageFont.load_default(0.55 * bar)
        middle, margin = height - bar / 2, 0.35 * bar
        pen.text((width - margin, middle), caption.ending, "white", font, anchor="rm")
        room = width - 3 * margin - pen.textlength(caption.ending, font)
        pen.text((margin, middle), _shortened(caption.text, room, font), "white", font, anchor="lm")
    return np.asarray(image)


def _shortened(text: str, room: float, font: Any) -> str:
    if font.getlength(text) <= room:
        return text
    while text and font.getlength(text + "…") > room:
        text = text[:-1]
    return text + "…"


@dataclass
class ImageStrip:
    """The images of an episode."""

    frames: list[NDArray[np.uint8]] = field(default_factory=list)  # (H, W, 3) each
    captions: list[Caption] = field(default_factory=list)

    def add(self, frame: NDArray[np.uint8], caption: Caption) -> None:
        """Append an image."""
        self.frames.append(frame)
        self.captions.append(caption)

    def draw(self, count: int = 6, side: int = 176) -> Image.Image:
        """Draw up to count images side by side, the first and the last included, under a line with instruction and end.

        Each shows a square of the frame, side pixels wide, without its margins on the left and right.
        """
        from PIL import Image, ImageDraw, ImageFont

        indices = np.unique(np.linspace(0, len(self.frames) - 1, count).round().astype(int))
        row = Image.new("RGB", (len(indices) * (side + GAP_PX) - GAP_PX, HEAD_PX + side), "white")
        pen, font = ImageDraw.Draw(row), ImageFont.load_default(FONT_PX)
        end = self.captions[-1]
        pen.text((2, HEAD_PX / 2), end.text, INK, font, anchor="lm")
        colour = tuple(round(180 * part) for part in COLOURS[end.outcome])
        pen.text((row.width - 2, HEAD_PX / 2), end.ending, colour, font, anchor="rm")
        for column, index in enumerate(indices):
            left = column * (side + GAP_PX)
            image = Image.fromarray(self.frames[index])
            margin = round(MARGIN * (image.width - image.height))
            square = image.crop((margin, 0, margin + image.height, image.height))
            row.paste(square.resize((side, side), Image.Resampling.LANCZOS), (left, HEAD_PX))
            _write_time(pen, (left, HEAD_PX + side), self.captions[index], ImageFont.load_default(TIME_PX))
        return row


def write_strips(path: Path, strips: Sequence[ImageStrip]) -> None:
    """Write strips under each other as a PNG of 256 colours."""
    from PIL import Image

    rows = [strip.draw() for strip in strips if strip.frames]
    height = sum(row.height for row in rows) + ROW_GAP_PX * (len(rows) - 1)
    page = Image.new("RGB", (max(row.width for row in rows), height), "white")
    top = 0
    for row in rows:
        page.paste(row, (0, top))
        top += row.height + ROW_GAP_PX
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as draft:
        page.quantize(256, kmeans=1, dither=Image.Dither.NONE).save(draft, optimize=True)


def _write_time(pen: Any, corner: tuple[int, int], caption: Caption, font: Any) -> None:
    left, bottom = corner
    text = f"{caption.seconds:.1f} s"
    width = pen.textlength(text, font)
    colour = tuple(round(200 * part) for part in COLOURS[caption.outcome]) if caption.outcome else INK
    pen.rectangle([left, bottom - TIME_PX - 5, left + width + 7, bottom - 1], fill=colour)
    pen.text((left + 4, bottom - 3 - TIME_PX / 2), text, "white", font, anchor="lm")


MARGIN = 0.7
"""Fraction of the cropped width that is on the left."""
HEAD_PX, GAP_PX, ROW_GAP_PX = 22, 3, 8
FONT_PX, TIME_PX = 14, 11
INK = (32, 35, 40)
