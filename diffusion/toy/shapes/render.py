"""Images of scenes: coloured shapes with random size and position on a light background."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from diffusion.toy.shapes.captions import COLOURS, RELATIONS, Scene, ShapeGroup
from mmrl.errors import UserError

MIN_SIZE_PX = 32
"""Minimum image size; in smaller images, objects have too few pixels for their shapes to differ."""
SUPERSAMPLING = 4
SIDE_RANGE: dict[int, tuple[float, float]] = {1: (0.31, 0.56), 2: (0.29, 0.44), 3: (0.26, 0.35)}
"""Minimum and maximum size of an object as a fraction of the image's, by the number of objects."""
GAP = 0.06
"""Minimum distance between two objects' boxes as a fraction of the image's size: two pixels of 32."""
DOMINANCE = 1.2
"""Minimum ratio of the distance between related objects along the relation to the distance across it."""
TRIES = 2000
COLOUR_JITTER = 12.0
BACKGROUND = 236.0
BACKGROUND_JITTER = 12.0

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels."""


def render_scene(scene: Scene, *, size: int = 32, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw a scene with random sizes, positions and shades; objects never touch and relations hold.

    Args:
        scene: what to draw.
        size: side of the image in pixels, at least `MIN_SIZE_PX`.
        rng: source of all that is random.

    Returns:
        RGB image (size, size, 3) uint8.

    Raises:
        UserError: the size is too small, or the objects found no place.
    """
    if size < MIN_SIZE_PX:
        raise UserError(f"size={size} must be at least {MIN_SIZE_PX} pixels")
    objects = scene.objects
    boxes = _place(scene, len(objects), size, rng)
    canvas = Image.new("RGB", (size * SUPERSAMPLING,) * 2, _background(rng))
    draw = ImageDraw.Draw(canvas)
    for item, box in zip(objects, boxes, strict=True):
        _draw(draw, item, box, rng)
    return np.asarray(canvas.reduce(SUPERSAMPLING), dtype=np.uint8)


def render_dataset(
    scenes: Sequence[Scene], count: int, *, size: int = 32, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Draw scenes in turn until there are enough images.

    Args:
        scenes: S scenes.
        count: N images.
        size: side of an image in pixels.
        seed: seed of sizes, positions and shades; each image has a separate generator, so the first images stay the
            same if more are requested.

    Returns:
        RGB images (N, size, size, 3) uint8 and the index of the scene of each (N,) int64.

    Raises:
        UserError: there is no scene, or the size is too small.
    """
    if not scenes:
        raise UserError("there are no scenes to draw")
    index = np.arange(count, dtype=np.int64) % len(scenes)
    images = np.empty((count, size, size, 3), dtype=np.uint8)
    for number, scene in enumerate(index.tolist()):
        images[number] = render_scene(scenes[scene], size=size, rng=np.random.default_rng([seed, number]))
    return images, index


def _place(scene: Scene, count: int, size: int, rng: np.random.Generator) -> list[Box]:
    low, high = SIDE_RANGE.get(count, SIDE_RANGE[3])
    for attempt in range(TRIES):
        # crowded draws end up at the smallest size, where there is always room
        largest = high - (high - low) * attempt / TRIES
        boxes: list[Box] = []
        while len(boxes) < count:
            box = _random_box(size, low, largest, rng)
            if any(_too_close(box, other, GAP * size) for other in boxes):
                break
            boxes.append(box)
        if len(boxes) == count and _related(boxes, scene.relation):
            return boxes
    raise UserError(f"could not fit {count} objects into {size} pixels: {scene.caption!r}")


def _random_box(size: int, low: float, high: float, rng: np.random.Generator) -> Box:
    side = rng.uniform(low, high) * size
    margin = 1.0
    left, top = rng.uniform(margin, size - margin - side, 2)
    return left, top, left + side, top + side


def _too_close(one: Box, other: Box, gap: float) -> bool:
    across = max(one[0], other[0]) - min(one[2], other[2])
    down = max(one[1], other[1]) - min(one[3], other[3])
    return max(across, down) < gap


def _related(boxes: Sequence[Box], relation: str | None) -> bool:
    if relation is None:
        return True
    x, y = RELATIONS[relation]
    (ax0, ay0, ax1, ay1), (bx0, by0, bx1, by1) = boxes
    dx, dy = (ax0 + ax1 - bx0 - bx1) / 2, (ay0 + ay1 - by0 - by1) / 2
    return dx * x + dy * y > DOMINANCE * abs(dx * y + dy * x)


def _background(rng: np.random.Generator) -> tuple[int, int, int]:
    shade = BACKGROUND + rng.uniform(-BACKGROUND_JITTER, BACKGROUND_JITTER)
    red, green, blue = (round(shade + rng.uniform(-4.0, 4.0)) for _ in range(3))
    return red, green, blue


def _draw(draw: ImageDraw.ImageDraw, item: ShapeGroup, box: Box, rng: np.random.Generator) -> None:
    jittered = np.asarray(COLOURS[item.colour]) + rng.uniform(-COLOUR_JITTER, COLOUR_JITTER, 3)
    fill: tuple[int, ...] = tuple(int(value) for value in jittered.round().clip(0, 255))
    x0, y0, x1, y1 = (math.floor(edge * SUPERSAMPLING) for edge in box)
    x1, y1 = x1 - 1, y1 - 1
    if item.shape == "circle":
        draw.ellipse((x0, y0, x1, y1), fill=fill)
    elif item.shape == "square":
        draw.rectangle((x0, y0, x1, y1), fill=fill)
    else:
        draw.polygon([((x0 + x1) / 2, y0), (x0, y1), (x1, y1)], fill=fill)
