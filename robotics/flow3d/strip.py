"""A clip as a strip of images: first frame, object, query points, and their flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import ImageArray
from robotics.flow3d.model.pictures import draw_flow

if TYPE_CHECKING:
    from robotics.flow3d.clip import FlowClip


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
