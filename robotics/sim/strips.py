"""An episode as a strip of images with the time of each, for documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.files import replaced
from robotics.sim.films import Caption
from robotics.sim.presentation import COLOURS

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL import Image


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
        """At most count images side by side, under a line with instruction and end; first and last are among them.

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
"""Part of the width outside the square that is left of it."""
HEAD_PX, GAP_PX, ROW_GAP_PX = 22, 3, 8
FONT_PX, TIME_PX = 14, 11
INK = (32, 35, 40)
