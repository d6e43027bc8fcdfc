"""A detector without a model: the object by the depth that it reveals.

`RevealedDepth` looks where depth grows, because something in front of the background has left. A passing hand or arm
also uncovers background, but from the start of the video, which the object does not. The camera must not move. Of an
object that only comes nearer, such as the front of a drawer, only the part is found that uncovers something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.extract.depth import depth_noise_m
from robotics.flow3d.geometry import BoolArray, DepthArray
from robotics.flow3d.video import RejectedVideo, RgbdVideo

REGROWN_PX = 3
"""Width of the border in which thin parts are added again after the morphological opening."""
EARLY_SHARE = 0.1
"""A connected part is not the object if a larger fraction of it moved early."""


@dataclass(frozen=True)
class RevealedDepth:
    """Detects the object that leaves its position."""

    threshold_m: float | None = bounded(None, above=0)
    """Minimum growth of depth; None = 4 mm, or three deviations of a difference if that is more."""
    early_frame: int = bounded(5, at_least=1)
    """Pixels whose depth has grown by this frame moved too early to be the object."""
    least_frames: int = bounded(3, at_least=1)
    """Minimum number of frames in which depth has grown; in the others a hand may be where the object was."""
    min_pixels: int = bounded(9, at_least=1)
    """Minimum number of pixels of an object."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`. Excludes `RgbdVideo.gripper_mask`, if known."""
        depth_m = video.known_depth_m
        noise = np.sqrt(2.0) * depth_noise_m(depth_m)
        threshold = max(0.004, 3 * noise) if self.threshold_m is None else self.threshold_m
        mask = revealed_mask(depth_m, threshold, self.early_frame, self.least_frames, video.gripper_mask)
        if mask.sum() < self.min_pixels:
            raise RejectedVideo("no_moving_object", f"depth grew by {threshold:.3f} m on {mask.sum()} pixels")
        return mask


def revealed_mask(
    depth_m: DepthArray,
    threshold_m: float,
    early_frame: int = 5,
    least_frames: int = 3,
    excluded: BoolArray | None = None,
) -> BoolArray:
    """(H, W) pixels whose depth (L, H, W) grew by `threshold_m`, but not early: the largest connected part."""
    import cv2

    grown = depth_m - depth_m[0] > threshold_m
    early = min(early_frame, len(depth_m) - 1)
    # Shrinking depth does not count: that may be a hand in front of the object.
    moved_early = grown[: early + 1].any(0)
    revealed = grown.sum(0) >= min(least_frames, len(depth_m) - early)
    if excluded is not None:
        revealed &= ~excluded
    found = revealed & ~moved_early & ~_early_parts(revealed, moved_early)
    # The opening removes corners and handles; found pixels that touch the rest are added again.
    mask = largest_component(_opened(found))
    for _ in range(REGROWN_PX):
        mask = (cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0) & found
    return mask


def _early_parts(revealed: BoolArray, moved_early: BoolArray) -> BoolArray:
    """Connected parts of which much moved early, such as the area that a hand uncovers."""
    import cv2

    count, labels = cv2.connectedComponents(_opened(revealed | moved_early).astype(np.uint8), connectivity=8)
    sizes = np.bincount(labels.ravel(), minlength=count)
    shares = np.bincount(labels[moved_early], minlength=count) / np.maximum(sizes, 1)
    early = shares > EARLY_SHARE
    # label 0 is the background
    early[0] = False
    return early[labels]


def _opened(mask: BoolArray) -> BoolArray:
    import cv2

    return np.asarray(cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))) > 0


def largest_component(mask: BoolArray) -> BoolArray:
    """Largest connected part of a mask, counting corners as touching; empty if the mask is."""
    import cv2

    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.zeros_like(mask, dtype=bool)
    largest: BoolArray = labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
    return largest
