"""The public code's rule for what moves: a box around points that go far and did not move early.

Source: Hoyyyaard/3DFlowAction preprocess/BridgeV2/moving_obj_det_pipeline.py, for pictures of 256 x 256; lengths in
pixels grow with the side of the picture here. The paper masks the gripper by segmentation instead of by early motion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.encoding import grid_in_box
from robotics.flow3d.extract.video import RejectedVideo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.protocols import Tracker
    from robotics.flow3d.extract.video import RgbdVideo

PUBLIC_SIDE_PX = 256


@dataclass(frozen=True)
class EarlyMotion:
    """Finds the box of what moves late and far."""

    tracker: Tracker
    """Follows the grid; CoTracker in the public code."""
    grid: int = bounded(32, at_least=2)
    """Points a side over the whole picture."""
    early_frame: int = bounded(5, at_least=1)
    """Frame by which a point of the gripper has moved."""
    early_px: float = bounded(1.0, above=0)
    """Way of such a point, in a picture of 256 pixels."""
    least_px: float = bounded(10.0, above=0)
    """Way of the object, in a picture of 256 pixels."""
    largest_share: float = bounded(0.25, above=0, at_most=1)
    """Share of the picture that the box may take."""
    gripper: bool = False
    """Also leave out the points in `RgbdVideo.gripper_mask`, as in the paper, where the video has one."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
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
            raise RejectedVideo("no_moving_object", f"the box takes {area / (width * height):.2f} of the picture")
        return box_mask((box[0], box[1], box[2], box[3]), video.size_px)


def moving_points(uv_px: NDArray[np.float64], early_frame: int, early_px: float, least_px: float) -> NDArray[np.bool_]:
    """Points that go far and did not move early.

    Args:
        uv_px: (L, n, 2) tracks.
        early_frame: number of the frame until which the object rests.
        early_px: a point that has gone as far by then is the gripper's.
        least_px: way that at least one point must have gone at the end.
    """
    rested = np.linalg.norm(uv_px[early_frame] - uv_px[0], axis=-1) < early_px
    way = np.linalg.norm(uv_px[-1] - uv_px[0], axis=-1)
    farthest = way[rested].max() if rested.any() else 0.0
    if farthest < least_px:
        raise RejectedVideo("no_moving_object", f"points go {farthest:.1f} px at most, must be {least_px:.1f}")
    moving: NDArray[np.bool_] = rested & (way > (farthest - way[rested].min()) / 4)
    return moving


def box_mask(box_px: tuple[float, float, float, float], size_px: tuple[int, int]) -> NDArray[np.bool_]:
    """Pixels of a box.

    Returns:
        (H, W), at least one pixel.
    """
    width, height = size_px
    left, top = int(np.clip(np.floor(box_px[0]), 0, width - 1)), int(np.clip(np.floor(box_px[1]), 0, height - 1))
    mask = np.zeros((height, width), dtype=bool)
    mask[top : max(top + 1, int(np.ceil(box_px[3]))), left : max(left + 1, int(np.ceil(box_px[2])))] = True
    return mask
