"""RGB-D video of a moving object, and the reasons for rejecting one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    check_intrinsics,
    check_kinds,
    check_poses,
    has_focal,
)

REASONS = {
    "unreadable": "a file of the video is missing or damaged",
    "moving_camera": "the camera moves and its poses are unknown",
    "no_intrinsics": "the camera matrix is unknown, so points cannot be lifted to 3D",
    "missing_depth": "there is no depth",
    "holed_depth": "too much of the object has no depth in the first frame",
    "no_moving_object": "no moving object was found",
    "too_few_visible_points": "most points of the object are hidden most of the time",
    "degenerate_geometry": "the points of the object lie on a line or at a single position",
    "lost_track": "the tracker lost the object",
}
"""Why a video gives no clip."""


class RejectedVideo(UserError):  # noqa: N818 - no fault: many videos give no clip
    """A video that gives no clip; `reason` is a key of `REASONS`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {REASONS[reason]}{f' ({detail})' if detail else ''}")
        self.reason = reason


@dataclass(frozen=True)
class VideoTruth:
    """The simulator's ground truth of the moving object."""

    masks: BoolArray
    """(L, H, W) its visible pixels."""
    T_t_0: FloatArray
    """(L, 4, 4) its motion since the first frame, in the camera frame."""
    depth_m: DepthArray | None = None
    """(H, W) of the first frame, without noise and holes; None if the video's depth is exact."""


@dataclass(frozen=True)
class RgbdVideo:
    """L frames from a static camera, or from a moving one with known poses."""

    rgb: ImageArray
    """(L, H, W, 3)."""
    depth_m: DepthArray | None
    """(L, H, W) along the camera's axis; 0, NaN and infinite values are holes. None if it has to be estimated."""
    K: FloatArray | None
    """(3, 3) intrinsics in pixels; None if unknown."""
    T_world_cam: FloatArray = field(default_factory=lambda: np.eye(4))
    """(4, 4) pose of the camera; its pose in the first frame if it moves."""
    T_world_cams: FloatArray | None = None
    """(L, 4, 4) poses of a moving camera."""
    instruction: str = ""
    """The task."""
    source: str = ""
    """Name of its origin."""
    gripper_mask: BoolArray | None = None
    """(H, W) pixels of gripper or hand in the first frame; None if unknown."""
    truth: VideoTruth | None = None
    """Ground truth of a simulator."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Further JSON data."""

    def __post_init__(self) -> None:
        shape = self.rgb.shape[:3]
        if self.rgb.ndim != 4 or self.rgb.shape[3] != 3 or self.rgb.dtype != np.uint8 or len(self.rgb) < 2:
            raise UserError(
                f"rgb is {self.rgb.dtype} {self.rgb.shape}; must be uint8 (L, H, W, 3) with 2 frames or more"
            )
        for name, value, expected in (
            ("depth_m", self.depth_m, shape),
            ("K", self.K, (3, 3)),
            ("T_world_cam", self.T_world_cam, (4, 4)),
            ("T_world_cams", self.T_world_cams, (shape[0], 4, 4)),
            ("gripper_mask", self.gripper_mask, shape[1:]),
        ):
            if value is not None and value.shape != expected:
                raise UserError(f"{name} has the shape {value.shape}; with rgb {self.rgb.shape} it must be {expected}")
        check_kinds(depth_m=self.depth_m, gripper_mask=self.gripper_mask)
        if self.K is not None and has_focal(self.K):
            check_intrinsics(self.K)
        for name, poses in (("T_world_cam", self.T_world_cam), ("T_world_cams", self.T_world_cams)):
            if poses is not None:
                check_poses(poses, name)

    def __len__(self) -> int:
        return len(self.rgb)

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.rgb.shape[2], self.rgb.shape[1]

    @property
    def intrinsics_px(self) -> FloatArray:
        """(3, 3) intrinsics; raises RejectedVideo without them."""
        if self.K is None or not has_focal(self.K):
            raise RejectedVideo("no_intrinsics", f"K is {None if self.K is None else self.K.tolist()}")
        return self.K

    @property
    def known_depth_m(self) -> DepthArray:
        """(L, H, W) depth with NaN in holes; raises RejectedVideo if the video has no depth."""
        if self.depth_m is None:
            raise RejectedVideo("missing_depth", "use a depth source that estimates it")
        known = np.where(np.isfinite(self.depth_m) & (self.depth_m > 0), self.depth_m, np.float32(np.nan))
        if np.isnan(known[0]).all():
            raise RejectedVideo("missing_depth", "the first frame has holes only")
        return known
