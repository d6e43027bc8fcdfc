"""Rewards that compare an edited image with the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIXEL_LEVELS = 255.0


def kept(
    prompts: Sequence[str],
    completions: Sequence[NDArray[np.uint8]],
    *,
    reference: Sequence[NDArray[np.uint8]],
    box: Sequence[Sequence[float] | None] | None = None,
    **_: Any,
) -> list[float]:
    """Reward leaving the image unchanged: 1 - mean distance of the pixels (h, w, 3) uint8 to the reference's, 0..1.

    The column `box` can give the region to be edited, (left, top, right, bottom) as fractions of width and height; its
    pixels are ignored.
    """
    boxes = box or [None] * len(completions)
    return [_likeness(*row) for row in zip(completions, reference, boxes, strict=True)]


def _likeness(image: NDArray[np.uint8], reference: NDArray[np.uint8], box: Sequence[float] | None) -> float:
    distance = np.abs(image.astype(np.float64) - reference).mean(2) / PIXEL_LEVELS
    counted = np.ones(distance.shape, bool)
    if box is not None:
        left, top, right, bottom = _checked(box)
        height, width = distance.shape
        counted[round(top * height) : round(bottom * height), round(left * width) : round(right * width)] = False
    if not counted.any():
        raise ValueError(f"the box {list(box or ())} covers the whole image; nothing is left to compare")
    return float(1 - distance[counted].mean())


def _checked(box: Any) -> Sequence[float]:
    fits = len(box) == 4 and 0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1
    if not fits:
        raise ValueError(
            f"the box {list(box)} must be left, top, right and bottom as fractions of the width and height"
        )
    return box
