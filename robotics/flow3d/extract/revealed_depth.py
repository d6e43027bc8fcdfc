"""The object is where the depth grows: what stood in front of the background has gone.

A hand or an arm that passes also uncovers background, but it moves from the start, which the object does not. The
camera must stand still. An object that only comes nearer, such as the front of a drawer, uncovers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.extract.video import RejectedVideo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo

__all__ = ["RevealedDepth", "depth_noise_m", "largest_component", "revealed_mask"]

REGROWN_PX = 3
"""How far thin parts may stick out of what is left by an opening."""


@dataclass(frozen=True)
class RevealedDepth:
    """Finds what left its place."""

    threshold_m: float | None = bounded(None, above=0)
    """Growth of depth that counts; None takes 4 mm, or three deviations of the depth's noise where that is more."""
    early_frame: int = bounded(5, at_least=1)
    """What differs from the first frame by then moved too early to be the object."""
    last_frames: int = bounded(3, at_least=1)
    """Frames at the end whose median is compared with the first one."""
    min_pixels: int = bounded(9, at_least=1)
    """Smallest object."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask the object; see `Detector`."""
        depth_m = video.known_depth_m
        threshold = max(0.004, 3 * depth_noise_m(depth_m)) if self.threshold_m is None else self.threshold_m
        mask = revealed_mask(depth_m, threshold, self.early_frame, self.last_frames)
        if mask.sum() < self.min_pixels:
            raise RejectedVideo("no_moving_object", f"depth grew by {threshold:.3f} m on {mask.sum()} pixels")
        return mask


def revealed_mask(
    depth_m: NDArray[np.float32], threshold_m: float, early_frame: int = 5, last_frames: int = 3
) -> NDArray[np.bool_]:
    """Pixels whose depth grew for good and had not changed early on.

    Args:
        depth_m: (L, H, W), NaN in holes.
        threshold_m: least change.
        early_frame: number of the frame that must still look like the first.
        last_frames: how many at the end are compared with the first, by their median.

    Returns:
        (H, W) largest connected part after an opening of 3 x 3 pixels, and found pixels within 3 of it.
    """
    import cv2

    first, early = depth_m[0], depth_m[min(early_frame, len(depth_m) - 1)]
    last = np.median(depth_m[-last_frames:], axis=0)
    found = (last - first > threshold_m) & (np.abs(early - first) < threshold_m)
    square = np.ones((3, 3), np.uint8)
    opened = cv2.morphologyEx(found.astype(np.uint8), cv2.MORPH_OPEN, square)
    # The opening rounds corners off and takes handles away; what touches the rest belongs to it.
    mask = largest_component(opened > 0)
    for _ in range(REGROWN_PX):
        mask = (cv2.dilate(mask.astype(np.uint8), square) > 0) & found
    return mask


def largest_component(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Largest part of a mask whose pixels touch, corners included; empty where the mask is."""
    import cv2

    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.zeros_like(mask, dtype=bool)
    largest: NDArray[np.bool_] = labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
    return largest


def depth_noise_m(depth_m: NDArray[np.float32]) -> float:
    """Standard deviation of a pixel's depth from one frame to the next, as most pixels show the background.

    Args:
        depth_m: (L, H, W) of at least two frames.

    Returns:
        Metres; from the median of absolute differences of the first two frames.
    """
    change = np.abs(depth_m[1] - depth_m[0])
    return 0.0 if np.isnan(change).all() else float(np.nanmedian(change) / (0.6745 * np.sqrt(2.0)))
