"""The object is where the depth grows: what stood in front of the background has gone.

A hand or an arm that passes also uncovers background, but it does so from the start, which the object does not. The
camera must stand still. Where an object only comes nearer, as the front of a drawer does, the part of it is found that
uncovers something, such as the inside of the drawer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.extract.depth_noise import depth_noise_m
from robotics.flow3d.extract.video import RejectedVideo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo

REGROWN_PX = 3
"""How far thin parts may stick out of what is left by an opening."""
EARLY_SHARE = 0.1
"""A connected part of which more moved early is not the object."""


@dataclass(frozen=True)
class RevealedDepth:
    """Finds what left its place."""

    threshold_m: float | None = bounded(None, above=0)
    """Growth of depth that counts; None takes 4 mm, or three deviations of a difference where that is more."""
    early_frame: int = bounded(5, at_least=1)
    """Where the depth has grown by then, something moved too early to be the object."""
    least_frames: int = bounded(3, at_least=1)
    """Frames in which the depth must have grown; in others the hand may stand where the object was."""
    min_pixels: int = bounded(9, at_least=1)
    """Smallest object."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask the object; see `Detector`. Pixels of `RgbdVideo.gripper_mask` are left out, where that is known."""
        depth_m = video.known_depth_m
        noise = np.sqrt(2.0) * depth_noise_m(depth_m)
        threshold = max(0.004, 3 * noise) if self.threshold_m is None else self.threshold_m
        mask = revealed_mask(depth_m, threshold, self.early_frame, self.least_frames, video.gripper_mask)
        if mask.sum() < self.min_pixels:
            raise RejectedVideo("no_moving_object", f"depth grew by {threshold:.3f} m on {mask.sum()} pixels")
        return mask


def revealed_mask(
    depth_m: NDArray[np.float32],
    threshold_m: float,
    early_frame: int = 5,
    least_frames: int = 3,
    excluded: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """Pixels whose depth grew, but not early on.

    Args:
        depth_m: (L, H, W), NaN in holes.
        threshold_m: least growth.
        early_frame: number of the frame by which the depth has not grown yet.
        least_frames: how many frames, fewer in a short video, must show the growth.
        excluded: (H, W) pixels that cannot be the object's, such as the gripper's.

    Returns:
        (H, W) largest connected part after an opening of 3 x 3 pixels, and found pixels within 3 of it.
    """
    grown = depth_m - depth_m[0] > threshold_m
    early = min(early_frame, len(depth_m) - 1)
    # Less depth says nothing: that is a hand in front of what may be the object.
    moved_early = grown[: early + 1].any(0)
    revealed = grown.sum(0) >= min(least_frames, len(depth_m) - early)
    if excluded is not None:
        revealed &= ~excluded
    found = revealed & ~moved_early & ~_early_parts(revealed, moved_early)
    # The opening rounds corners off and takes handles away; what touches the rest belongs to it.
    mask = largest_component(_opened(found))
    for _ in range(REGROWN_PX):
        mask = _grown_px(mask) & found
    return mask


def _early_parts(revealed: NDArray[np.bool_], moved_early: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Connected parts of which much moved early: a hand also hides, for a while, where it was itself."""
    import cv2

    count, labels = cv2.connectedComponents(_opened(revealed | moved_early).astype(np.uint8), connectivity=8)
    sizes = np.bincount(labels.ravel(), minlength=count)
    shares = np.bincount(labels[moved_early], minlength=count) / np.maximum(sizes, 1)
    early = shares > EARLY_SHARE
    early[0] = False
    return early[labels]


def _opened(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    import cv2

    return np.asarray(cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))) > 0


def _grown_px(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    import cv2

    return np.asarray(cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8))) > 0


def largest_component(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Largest part of a mask whose pixels touch, corners included; empty where the mask is."""
    import cv2

    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.zeros_like(mask, dtype=bool)
    largest: NDArray[np.bool_] = labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
    return largest
