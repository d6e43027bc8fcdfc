"""Screens with the target and the predicted points drawn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmrl.gui.grounding.coords import Box, Point
from mmrl.gui.grounding.samples import AnyOf, Polygon, Target

if TYPE_CHECKING:
    from PIL import Image
    from PIL.ImageDraw import ImageDraw as Drawing

TARGET_COLOUR = (0, 150, 60)
HIT_COLOUR = (0, 110, 255)
MISS_COLOUR = (230, 30, 30)
WHITE = (255, 255, 255)
LONGEST_SIDE = 1280
SHORTEST_SIDE = 384
"""Screens with a shorter long side are enlarged by an integer factor, so that marks do not cover them."""
MARK = 0.02
"""Radius of a point's mark as a fraction of the image's longer side."""


def draw_answer(image: Image.Image, target: Target, points: Sequence[Point], hit: bool) -> Image.Image:
    """Draw the target in green and the predicted points in blue for a hit, else in red, on a copy of the screen.

    Target and points are in pixels of the original screen; a refusal has no outline. The first point is a cross in a
    circle, others are rings with their rank, and those outside are triangles at the nearest edge. The copy has at most
    1280 pixels on a side; a small screen is enlarged.
    """
    from PIL import ImageDraw

    longest = max(image.size)
    scale = min(1.0, LONGEST_SIDE / longest) if longest >= SHORTEST_SIDE else -(-SHORTEST_SIDE // longest)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    drawing = image.convert("RGB").resize(size) if scale != 1 else image.convert("RGB").copy()
    draw = ImageDraw.Draw(drawing)
    line = max(2, round(MARK * max(size) / 8))
    for outline in _outlines(target):
        scaled = [(x * scale, y * scale) for x, y in outline]
        draw.line([*scaled, scaled[0]], fill=WHITE, width=line + 2)
        draw.line([*scaled, scaled[0]], fill=TARGET_COLOUR, width=line)
    colour = HIT_COLOUR if hit else MISS_COLOUR
    for rank, (x, y) in reversed(list(enumerate(points, start=1))):
        if math.isfinite(x) and math.isfinite(y):
            _draw_point(draw, (x * scale, y * scale), size, colour, rank)
    return drawing


def _outlines(target: Target) -> list[list[Point]]:
    if isinstance(target, Box):
        return [[(target.x1, target.y1), (target.x2, target.y1), (target.x2, target.y2), (target.x1, target.y2)]]
    if isinstance(target, Polygon):
        return [list(target.points)]
    if isinstance(target, AnyOf):
        return [outline for part in target.targets for outline in _outlines(part)]
    return []


def _draw_point(draw: Drawing, point: Point, size: tuple[int, int], colour: tuple[int, int, int], rank: int) -> None:
    x, y = (min(max(number, 0.0), side - 1.0) for number, side in zip(point, size, strict=True))
    radius = max(8.0, MARK * max(size))
    if (x, y) != tuple(point):
        draw.regular_polygon((x, y, radius), 3, fill=colour, outline=WHITE)
        return
    circle = (x - radius, y - radius, x + radius, y + radius)
    draw.ellipse(circle, outline=WHITE, width=5)
    draw.ellipse((x - radius + 1, y - radius + 1, x + radius - 1, y + radius - 1), outline=colour, width=3)
    if rank > 1:
        draw.text((x + radius + 2, y - radius), str(rank), fill=colour, stroke_width=2, stroke_fill=WHITE)
        return
    for width, fill in ((4, WHITE), (2, colour)):
        draw.line((x - radius, y, x + radius, y), fill=fill, width=width)
        draw.line((x, y - radius, x, y + radius), fill=fill, width=width)
