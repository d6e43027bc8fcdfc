"""Lucas-Kanade optical flow of OpenCV."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray


def klt_tracks(frames: list[ImageArray], uv_px: FloatArray, window_px: int = 11) -> tuple[FloatArray, BoolArray]:
    """Follow points (n, 2) of the first grey frame: (L, n, 2) positions and (L, n) whether the point is still followed.

    Each point drifts on its own, and those next to something that moves are dragged along; `rigid_chain` follows the
    object as a whole instead. A lost point stays at its last position.
    """
    height, width = frames[0].shape
    tracks, alive = [uv_px], [np.ones(len(uv_px), dtype=bool)]
    for before, after in itertools.pairwise(frames):
        moved, good = klt_step(before, after, tracks[-1], window_px)
        good &= (moved >= 0).all(-1) & (moved[:, 0] < width) & (moved[:, 1] < height)
        alive.append(alive[-1] & good)
        tracks.append(np.where(good[:, None], moved, tracks[-1]))
    return np.stack(tracks), np.stack(alive)


def klt_step(
    before: ImageArray,
    after: ImageArray,
    uv_px: FloatArray,
    window_px: int = 11,
    levels: int = 3,
    forward_backward_px: float = 0.7,
) -> tuple[FloatArray, BoolArray]:
    """Follow points (n, 2) by one grey frame: (n, 2) new positions and (n,) whether they can be trusted.

    A good point comes back within `forward_backward_px` when it is followed backwards. The center of the first pixel
    is at 0.5 here, at 0 in OpenCV.
    """
    import cv2

    lucas_kanade: Any = cv2.calcOpticalFlowPyrLK
    if not len(uv_px):
        return uv_px, np.zeros(0, dtype=bool)
    options: dict[str, Any] = {"winSize": (window_px, window_px), "maxLevel": levels}
    start = np.ascontiguousarray(uv_px - 0.5, dtype=np.float32)[:, None]
    there, found, _ = lucas_kanade(before, after, start, None, **options)
    back, found_back, _ = lucas_kanade(after, before, there, None, **options)
    error = np.linalg.norm((back - start)[:, 0], axis=-1)
    good = (found[:, 0] > 0) & (found_back[:, 0] > 0) & (error < forward_backward_px)
    return there[:, 0].astype(np.float64) + 0.5, good


def grey_frames(rgb: ImageArray) -> list[ImageArray]:
    """(L, H, W, 3) as a list of (H, W) grey images."""
    import cv2

    return [np.asarray(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), dtype=np.uint8) for frame in rgb]
