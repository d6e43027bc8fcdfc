"""The three parts of an extractor: a detector, a tracker and a source of depth, in any combination."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray
from robotics.flow3d.video import RgbdVideo


@dataclass(frozen=True)
class Tracks:
    """n points in each of L frames."""

    uv_px: FloatArray
    """(L, n, 2)."""
    visible: FloatArray
    """(L, n) 0 to 1."""
    z_m: FloatArray | None = None
    """(L, n) depth, also of hidden points; None if the tracker only knows pixels."""
    quality: dict[str, float] = field(default_factory=dict)
    """The tracker's own measures of quality."""


class Detector(Protocol):
    """Finds the moving object."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """(H, W) mask of the object in the first frame, not empty; raises RejectedVideo if nothing is found."""


class PointTracker(Protocol):
    """Follows points of the first frame through a video."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points (n, 2) of the first frame on an object with mask (H, W); raises RejectedVideo if it is lost."""


class DepthSource(Protocol):
    """Gives the depth of each pixel."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """(L, H, W) metres along the camera's axis, NaN in holes; raises RejectedVideo if there is none."""
