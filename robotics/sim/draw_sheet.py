"""A sheet of pictures: one initial state as the policy sees it, nominal and under several draws of a randomisation.

Run it as `python -m robotics.sim.draw_sheet CONFIG draws.png --task push --layout 3`.
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

GAP_PX = 3
WHITE = 255


def draw_sheet(config: SimConfig, task: str, layout: int, pictures: int = 8, columns: int = 4) -> NDArray[np.uint8]:
    """Draw the beginning of an episode several times.

    Returns:
        (H, W, 3) uint8.
    """
    if not config.randomization.active() or not config.image_size:
        raise UserError("a sheet of draws needs sim.randomization with a range, and sim.image_size above 0")
    if pictures < 1 or columns < 1:
        raise UserError(f"pictures is {pictures} and columns {columns}; both must be at least 1")
    sim = open_sim(config)
    try:
        start = EpisodeSpec(task, "", layout)
        draws: list[int | None] = [None, *range(pictures - 1)]
        images = sim.reset([replace(start, draw=draw) for draw in draws]).observation.images
    finally:
        sim.close()
    assert images is not None
    return _tiled(list(images), columns)


def _tiled(images: list[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    height, width = images[0].shape[0] + GAP_PX, images[0].shape[1] + GAP_PX
    rows = -(-len(images) // columns)
    sheet = np.full((rows * height - GAP_PX, columns * width - GAP_PX, 3), WHITE, np.uint8)
    for place, image in enumerate(images):
        top, left = place // columns * height, place % columns * width
        sheet[top : top + image.shape[0], left : left + image.shape[1]] = image
    return sheet


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    from PIL import Image

    from mmrl.config import load_run

    parser = argparse.ArgumentParser("python -m robotics.sim.draw_sheet", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="YAML file of a run with sim.randomization")
    parser.add_argument("output", type=Path, help="PNG to write")
    parser.add_argument("overrides", nargs="*", help="dotted assignments such as sim.camera=wrist")
    parser.add_argument("--task", default="push")
    parser.add_argument("--layout", type=int, default=0)
    parser.add_argument("--pictures", type=int, default=8, help="the first is nominal")
    parser.add_argument("--size", type=int, default=160, help="side of a picture in pixels")
    given = parser.parse_intermixed_args(arguments)
    try:
        _, run = load_run(given.config, [*given.overrides, f"sim.image_size={given.size}"])
        sheet = draw_sheet(run.sim, given.task, given.layout, given.pictures)
    except UserError as error:
        sys.stderr.write(f"mmrl: {error}\n")
        return 2
    Image.fromarray(sheet).save(given.output, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
