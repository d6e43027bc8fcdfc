"""Detectors without a model: the object by the depth that it reveals, or by points that move early.

`RevealedDepth` looks where depth grows, because something in front of the background has left. A passing hand or arm
also uncovers background, but from the start of the video, which the object does not. The camera must not move. Of an
object that only comes nearer, such as the front of a drawer, only the part is found that uncovers something.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.clip import grid_in_box
from robotics.flow3d.extract.backends import Tracker
from robotics.flow3d.extract.depth import depth_noise_m
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray
from robotics.flow3d.video import RejectedVideo, RgbdVideo

REGROWN_PX = 3
"""Pixels that thin parts may stick out of the mask after its morphological opening."""
EARLY_SHARE = 0.1
"""A connected part of which a larger share moved early is not the object."""
PUBLIC_SIDE_PX = 256


@dataclass(frozen=True)
class RevealedDepth:
    """Detects the object that leaves its position."""

    threshold_m: float | None = bounded(None, above=0)
    """Least growth of depth; None = 4 mm, or three deviations of a difference if that is more."""
    early_frame: int = bounded(5, at_least=1)
    """Pixels whose depth has grown by this frame moved too early to be the object."""
    least_frames: int = bounded(3, at_least=1)
    """Frames in which depth must have grown; in others a hand may be where the object was."""
    min_pixels: int = bounded(9, at_least=1)
    """Smallest object."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`. Excludes `RgbdVideo.gripper_mask`, where it is known."""
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
    early[0] = False
    return early[labels]


def _opened(mask: BoolArray) -> BoolArray:
    import cv2

    return np.asarray(cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))) > 0


def largest_component(mask: BoolArray) -> BoolArray:
    """Largest part of a mask whose pixels touch, corners included; empty where the mask is."""
    import cv2

    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.zeros_like(mask, dtype=bool)
    largest: BoolArray = labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
    return largest


@dataclass(frozen=True)
class EarlyMotion:
    """The public code's rule: the box of points that move far, but not early.

    Source: Hoyyyaard/3DFlowAction preprocess/BridgeV2/moving_obj_det_pipeline.py, for images of 256 x 256; here lengths
        in pixels scale with the image. The paper masks the gripper by segmentation instead of by early motion.
    """

    tracker: Tracker
    """Follows the grid; CoTracker in the public code."""
    grid: int = bounded(32, at_least=2)
    """Points a side over the whole image."""
    early_frame: int = bounded(5, at_least=1)
    """Frame by which a point of the gripper has moved."""
    early_px: float = bounded(1.0, above=0)
    """Displacement of a gripper point by then, in an image of 256 pixels."""
    least_px: float = bounded(10.0, above=0)
    """Displacement of the object, in an image of 256 pixels."""
    largest_share: float = bounded(0.25, above=0, at_most=1)
    """Largest share of the image that the box may cover."""
    gripper: bool = False
    """Also exclude `RgbdVideo.gripper_mask`, as in the paper, where the video has one."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the box; see `Detector`."""
        width, height = video.size_px
        scale = width / PUBLIC_SIDE_PX
        points = grid_in_box((0, 0, width - 1e-3, height - 1e-3), self.grid).reshape(-1, 2)
        tracks = self.tracker.track(video, np.ones((height, width), dtype=bool), points).uv_px
        kept = np.ones(len(points), dtype=bool)
        if self.gripper and video.gripper_mask is not None:
            kept = ~video.gripper_mask[points[:, 1].astype(int), points[:, 0].astype(int)]
        early = min(self.early_frame, len(video) - 1)
        moving = moving_points(tracks[:, kept], early, self.early_px * scale, self.least_px * scale)
        box = np.concatenate([points[kept][moving].min(0), points[kept][moving].max(0)])
        area = (box[2] - box[0]) * (box[3] - box[1])
        if area > self.largest_share * width * height:
            raise RejectedVideo("no_moving_object", f"the box covers {area / (width * height):.2f} of the image")
        left, top = (int(np.clip(np.floor(box[axis]), 0, side - 1)) for axis, side in ((0, width), (1, height)))
        mask = np.zeros((height, width), dtype=bool)
        mask[top : max(top + 1, int(np.ceil(box[3]))), left : max(left + 1, int(np.ceil(box[2])))] = True
        return mask


def moving_points(uv_px: FloatArray, early_frame: int, early_px: float, least_px: float) -> BoolArray:
    """Which of the tracks (L, n, 2) move far, but less than `early_px` until `early_frame`: (n,)."""
    rested = np.linalg.norm(uv_px[early_frame] - uv_px[0], axis=-1) < early_px
    moved = np.linalg.norm(uv_px[-1] - uv_px[0], axis=-1)
    farthest = moved[rested].max() if rested.any() else 0.0
    if farthest < least_px:
        raise RejectedVideo("no_moving_object", f"points move by {farthest:.1f} px at most, must be {least_px:.1f}")
    moving: BoolArray = rested & (moved > (farthest - moved[rested].min()) / 4)
    return moving
