"""The three parts of an extraction: what moves, where its points go, and how far away all that is.

Each comes from the simulator, from classical vision or from a model; any combination works.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class Tracks:
    """Where n points are in each of L frames."""

    uv_px: NDArray[np.float64]
    """(L, n, 2)."""
    visible: NDArray[np.float64]
    """(L, n) 0 to 1."""
    z_m: NDArray[np.float64] | None = None
    """(L, n) depth, also of hidden points; None where the tracker knows pixels only."""
    quality: dict[str, float] = field(default_factory=dict)
    """Numbers that say how well it went."""


class Detector(Protocol):
    """Finds the object that moves."""

    def detect(self, video: RgbdVideo) -> NDArray[np.bool_]:
        """Mask the object in the first frame.

        Args:
            video: with depth, if the detector needs it.

        Returns:
            (H, W), True on at least one pixel.

        Raises:
            RejectedVideo: nothing was found.
        """


class Tracker(Protocol):
    """Follows points of the first frame through a video."""

    def track(self, video: RgbdVideo, mask: NDArray[np.bool_], uv_px: NDArray[np.float64]) -> Tracks:
        """Follow points.

        Args:
            video: with depth, if the tracker needs it.
            mask: (H, W) the object in the first frame.
            uv_px: (n, 2) points in the first frame.

        Returns:
            The tracks; frame 0 is `uv_px`.

        Raises:
            RejectedVideo: the object was lost.
        """


class DepthSource(Protocol):
    """Tells how far away each pixel is."""

    def depth_m(self, video: RgbdVideo) -> NDArray[np.float32]:
        """Measure a video.

        Args:
            video: with or without depth.

        Returns:
            (L, H, W) metres along the camera's axis, NaN in holes.

        Raises:
            RejectedVideo: there is none.
        """
