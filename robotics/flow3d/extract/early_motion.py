"""The public code's rule for the moving object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.encoding import grid_in_box
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import BoolArray, FloatArray

if TYPE_CHECKING:
    from robotics.flow3d.extract.protocols import Tracker
    from robotics.flow3d.extract.video import RgbdVideo

PUBLIC_SIDE_PX = 256


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
