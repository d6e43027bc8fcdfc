"""A clip as a strip of pictures: the first frame, the object, its query points, and where they go."""

from __future__ import annotations

import colorsys
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE, U, V

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

SMOOTH = 2
"""Lines are drawn so many times larger and then made smaller."""


def flow_strip(clip: FlowClip, height_px: int = 256) -> NDArray[np.uint8]:
    """Draw a clip."""
    rgb, mask = clip.observation.rgb, clip.observation.mask
    panels = [_resized(rgb, height_px)]
    if mask is not None:
        tint = 0.45 * rgb + 0.55 * np.array([255, 60, 60])
        panels.append(_resized(np.where(mask[..., None], tint, 0.6 * rgb).astype(np.uint8), height_px))
    none = clip.flow[:0]
    panels += [draw_tracks(rgb, clip.points, flow, height_px) for flow in (none, clip.flow)]
    return np.concatenate(panels, axis=1)


def draw_tracks(
    rgb: NDArray[np.uint8], points: NDArray[np.float64], flow: NDArray[np.float64], height_px: int = 256
) -> NDArray[np.uint8]:
    """Draw points and where they go over a picture.

    Args:
        rgb: (H, W, 3).
        points: (N, N, 3) query points.
        flow: (T, N, N, 4), with T of 0 for the points alone. A hidden step is drawn darker.
        height_px: of the result.
    """
    from PIL import Image, ImageDraw

    large = _resized((0.75 * rgb).astype(np.uint8), SMOOTH * height_px)
    image = Image.fromarray(large)
    draw, scale = ImageDraw.Draw(image), large.shape[0] / rgb.shape[0]
    start = points.reshape(-1, 3)[:, : V + 1]
    steps = flow.reshape(len(flow), len(start), 4)
    path, seen = np.concatenate([start[None], steps[..., : V + 1]]) * scale, steps[..., VISIBLE] > 0.5
    width, radius = max(1, round(SMOOTH * height_px / 256)), SMOOTH * height_px / 110
    for number in range(len(start)):
        colour = _colour(number / len(start))
        for step in range(len(flow)):
            shade = colour if seen[step, number] else tuple(level // 2 for level in colour)
            draw.line([tuple(path[step, number]), tuple(path[step + 1, number])], fill=shade, width=width)
        u, v = path[-1, number, U], path[-1, number, V]
        draw.ellipse([u - radius, v - radius, u + radius, v + radius], fill=colour)
    return _resized(np.asarray(image), height_px)


def _resized(rgb: NDArray[np.uint8], height_px: int) -> NDArray[np.uint8]:
    from PIL import Image

    size = (round(rgb.shape[1] * height_px / rgb.shape[0]), height_px)
    return np.asarray(Image.fromarray(rgb).resize(size, Image.Resampling.BICUBIC), dtype=np.uint8)


def _colour(share: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(0.85 * share, 0.9, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
