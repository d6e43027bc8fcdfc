"""Flow drawn over the picture it starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import U, V

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

WIDTH_PX = 384
FIRST, LAST = np.array([60, 110, 255]), np.array([255, 70, 40])
"""Colours of the first and the last step."""
TRUTH = (255, 255, 255)


def draw_flow(
    rgb: NDArray[np.uint8],
    points: NDArray[np.float64],
    flow: NDArray[np.float64],
    truth: NDArray[np.float64] | None = None,
    width_px: int = WIDTH_PX,
) -> Image:
    """Draw the way of every point, from blue to red over time.

    Args:
        rgb: (H, W, 3) first picture.
        points: (N, N, 3) query points.
        flow: (T, N, N, 4) where they go; points that are not visible are drawn thinner.
        truth: (T, N, N, 4) drawn below it as thin white lines; None draws none.
        width_px: of the drawing.

    Returns:
        The picture.
    """
    from PIL import Image, ImageDraw

    height, width = rgb.shape[:2]
    scale = width_px / width
    image = Image.fromarray(rgb).resize((width_px, round(height * scale)), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    if truth is not None:
        for way in _ways(points, truth, scale):
            pen.line([tuple(place) for place in way], fill=TRUTH, width=1)
    frames = len(flow)
    seen = flow[..., 3].reshape(frames, -1) > 0.5
    for number, way in enumerate(_ways(points, flow, scale)):
        for frame in range(frames):
            share = frame / max(frames - 1, 1)
            colour = tuple(int(part) for part in (1 - share) * FIRST + share * LAST)
            pen.line([tuple(way[frame]), tuple(way[frame + 1])], fill=colour, width=2 if seen[frame, number] else 1)
        end = way[-1]
        pen.ellipse([*(end - 2.5), *(end + 2.5)], fill=tuple(LAST.tolist()))
    return image


def _ways(points: NDArray[np.float64], flow: NDArray[np.float64], scale: float) -> NDArray[np.float64]:
    """(N * N, T + 1, 2) places in the drawing."""
    places = np.concatenate([points[None, ..., [U, V]], flow[..., [U, V]]])
    ways: NDArray[np.float64] = places.reshape(len(places), -1, 2).swapaxes(0, 1) * scale
    return ways
