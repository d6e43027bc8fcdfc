"""Images and videos with random patches in black, as PAPO compares looking with."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from mmrl.hub.video_sampling import Frames


def blacken_patches(image: Image.Image, patch_size: int, ratio: float, rng: np.random.Generator) -> Image.Image:
    """Set each patch of a grid to black with a probability.

    Args:
        image: RGB image; the grid starts at its top left, patches at the right and bottom edge may be smaller.
        patch_size: side in pixels of the image as given, before any resize.
        ratio: probability of each patch, so the masked share varies around it.
        rng: source of randomness.

    Source: PAPO, section 3; MikeWangWZHL/PAPO verl/trainer/papo_utils.py.
    """
    pixels = np.array(image.convert("RGB"))
    pixels[_draw_mask(pixels.shape[:2], patch_size, ratio, rng)] = 0
    return Image.fromarray(pixels)


def blacken_frames(frames: Frames, patch_size: int, ratio: float, rng: np.random.Generator) -> Frames:
    """Set patches of a video to black, the same ones in all frames.

    Args:
        frames: of `mmrl.hub.video_sampling`.
        patch_size: side in pixels of the frames as the model sees them.
        ratio: probability of each patch.
        rng: source of randomness.
    """
    pixels, metadata = frames
    mask = torch.from_numpy(_draw_mask(tuple(pixels.shape[2:]), patch_size, ratio, rng))
    return pixels.masked_fill(mask, 0.0), metadata


def _draw_mask(size: tuple[int, ...], patch_size: int, ratio: float, rng: np.random.Generator) -> np.ndarray:
    """(height, width) bool, True on black patches."""
    rows, columns = (-(-side // patch_size) for side in size)
    black = rng.random((rows, columns)) < ratio
    return np.kron(black, np.ones((patch_size, patch_size), dtype=bool))[: size[0], : size[1]]
