"""A sheet of images: one initial state as the policy sees it, nominal and under several draws of a randomisation.

Run it as `python -m robotics.toy.draw_sheet CONFIG draws.png --task push --layout 3`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig, open_sim

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

GAP_PX = 3


def draw_sheet(config: SimConfig, task: str, layout: int, images: int = 8, columns: int = 4) -> NDArray[np.uint8]:
    """Sheet (H, W, 3) of the same initial state: the nominal scene first, then draws 0, 1, ..."""
    if not config.randomization.active() or not config.image_size:
        raise UserError("a sheet of draws needs sim.randomization with a range, and sim.image_size above 0")
    if images < 1 or columns < 1:
        raise UserError(f"images is {images} and columns {columns}; both must be at least 1")
    sim = open_sim(config)
    try:
        start = EpisodeSpec(task, "", layout)
        draws: list[int | None] = [None, *range(images - 1)]
        drawn = sim.reset([replace(start, draw=draw) for draw in draws]).observation.images
    finally:
        sim.close()
    assert drawn is not None
    height, width = drawn.shape[1] + GAP_PX, drawn.shape[2] + GAP_PX
    sheet = np.full((-(-images // columns) * height - GAP_PX, columns * width - GAP_PX, 3), 255, np.uint8)
    for index, image in enumerate(drawn):
        top, left = index // columns * height, index % columns * width
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def name_images(sheet: Image, size: int, images: int, columns: int = 4) -> None:
    """Write "nominal" or the number of the draw in the upper left corner of each image."""
    from PIL import ImageDraw

    pen = ImageDraw.Draw(sheet)
    for index in range(images):
        corner = (index % columns * (size + GAP_PX) + 4, index // columns * (size + GAP_PX) + 3)
        text = f"draw {index - 1}" if index else "nominal"
        pen.text(corner, text, fill="white", stroke_width=2, stroke_fill="black")


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    from PIL import Image

    from mmrl.config import load_run

    parser = argparse.ArgumentParser("python -m robotics.toy.draw_sheet", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="YAML file of a run with sim.randomization")
    parser.add_argument("output", type=Path, help="PNG file to write")
    parser.add_argument("overrides", nargs="*", help="overrides such as sim.camera=wrist")
    parser.add_argument("--task", default="push")
    parser.add_argument("--layout", type=int, default=0)
    parser.add_argument("--images", type=int, default=8, help="the first is nominal")
    parser.add_argument("--size", type=int, default=160, help="side length of an image in pixels")
    given = parser.parse_intermixed_args(arguments)
    try:
        _, run = load_run(given.config, [*given.overrides, f"sim.image_size={given.size}"])
        sheet = draw_sheet(run.sim, given.task, given.layout, given.images)
    except UserError as error:
        sys.stderr.write(f"mmrl: {error}\n")
        return 2
    named = Image.fromarray(sheet)
    name_images(named, given.size, given.images)
    named.save(given.output, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
