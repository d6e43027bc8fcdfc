"""Drawings of flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE, FlowClip, U, V
from robotics.flow3d.geometry import FloatArray, ImageArray

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw


WIDTH_PX = 384
FIRST, LAST = np.array([60, 110, 255]), np.array([255, 70, 40])
"""Colours of the first and the last step."""


def draw_flow(
    rgb: ImageArray, points: FloatArray, flow: FloatArray, truth: FloatArray | None = None, width_px: int = WIDTH_PX
) -> Image:
    """Draw the paths of query points (N, N, 3) along a flow (T, N, N, 4) over an image, from blue to red over time.

    Lines are thinner while a point is not visible; the true flow is drawn below as thin white lines.
    """
    from PIL import Image, ImageDraw

    height, width = rgb.shape[:2]
    scale = width_px / width
    image = Image.fromarray(rgb).resize((width_px, round(height * scale)), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    if truth is not None:
        for path in _paths(points, truth, scale):
            pen.line([tuple(pixel) for pixel in path], fill=(255, 255, 255), width=1)
    draw_paths(pen, points, flow, scale)
    return image


def draw_paths(pen: ImageDraw, points: FloatArray, flow: FloatArray, scale: float) -> None:
    """Draw the paths of points (N, N, 3) along a flow (T, N, N, 4) at a scale of the original image."""
    paths, frames = _paths(points, flow, scale), len(flow)
    seen = flow[..., VISIBLE].reshape(frames, len(paths)) > 0.5
    for index, path in enumerate(paths):
        for frame in range(frames):
            share = frame / max(frames - 1, 1)
            colour = tuple(int(part) for part in (1 - share) * FIRST + share * LAST)
            pen.line([tuple(path[frame]), tuple(path[frame + 1])], fill=colour, width=2 if seen[frame, index] else 1)
        pen.ellipse([*(path[-1] - 2.5), *(path[-1] + 2.5)], fill=tuple(LAST.tolist()))


def _paths(points: FloatArray, flow: FloatArray, scale: float) -> FloatArray:
    """(N * N, T + 1, 2) pixels in the drawing."""
    pixels = np.concatenate([points[None, ..., [U, V]], flow[..., [U, V]]])
    paths: FloatArray = pixels.reshape(len(pixels), -1, 2).swapaxes(0, 1) * scale
    return paths


def flow_strip(clip: FlowClip, height_px: int = 256) -> ImageArray:
    """Draw a clip."""
    from PIL import Image

    rgb, mask = clip.observation.rgb, clip.observation.mask
    size = (round(rgb.shape[1] * height_px / rgb.shape[0]), height_px)
    frames = [rgb]
    if mask is not None:
        tint = 0.45 * rgb + 0.55 * np.array([255, 60, 60])
        frames.append(np.where(mask[..., None], tint, 0.6 * rgb).astype(np.uint8))
    panels = [Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC) for frame in frames]
    dark = (0.75 * rgb).astype(np.uint8)
    panels += [draw_flow(dark, clip.points, flow, width_px=size[0]).resize(size) for flow in (clip.flow[:0], clip.flow)]
    return np.concatenate([np.asarray(panel) for panel in panels], axis=1)
