"""Depth with noise: how much there is, and pictures with less of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.protocols import DepthSource
    from robotics.flow3d.extract.video import RgbdVideo

APART_PX = 8
"""Beyond what a smoothed pixel was averaged over."""
RANGE_DEVIATIONS = 2.5
"""Depths that differ by so many deviations of the noise count exp(-1/2) in an average."""


class SensorDepth:
    """Takes the depth that the video has."""

    def depth_m(self, video: RgbdVideo) -> NDArray[np.float32]:
        """Depth with NaN in holes; see `DepthSource`."""
        return video.known_depth_m


@dataclass(frozen=True)
class DenoisedDepth:
    """Averages the noise of depth away within surfaces, where there is noise; edges and holes stay."""

    source: DepthSource = field(default_factory=SensorDepth)
    """Where the depth comes from."""
    window_px: int = bounded(7, at_least=1)
    """Diameter of the neighbourhood that a pixel is averaged over."""
    least_noise_m: float = bounded(0.001, at_least=0)
    """With less noise the depth stays as it is."""

    def depth_m(self, video: RgbdVideo) -> NDArray[np.float32]:
        """Depth of each frame; see `DepthSource`."""
        depth_m = self.source.depth_m(video)
        noise = depth_noise_m(depth_m)
        if noise <= self.least_noise_m:
            return depth_m
        return np.stack([smoothed(picture, noise, self.window_px) for picture in depth_m])


def depth_noise_m(depth_m: NDArray[np.float32]) -> float:
    """Standard deviation of a pixel's depth from one frame to the next.

    Changes are compared between pixels a little apart, so that those of a camera or a surface that moves do not count.

    Args:
        depth_m: (L, H, W) of at least two frames.

    Returns:
        Metres; from the median of absolute differences of the first two frames, as most pixels show the background.
    """
    change = depth_m[1] - depth_m[0]
    apart = np.abs(change[:, APART_PX:] - change[:, :-APART_PX])
    return 0.0 if np.isnan(apart).all() else float(np.nanmedian(apart) / (0.6745 * 2.0))


def smoothed(depth_m: NDArray[np.float32], noise_m: float, window_px: int) -> NDArray[np.float32]:
    """Average each pixel with neighbours of a similar depth.

    Args:
        depth_m: (H, W), NaN in holes.
        noise_m: standard deviation of the noise.
        window_px: diameter of the neighbourhood.

    Returns:
        (H, W), NaN where the depth was.

    Source: bilateral filter, Tomasi & Manduchi 1998.
    """
    import cv2

    known = np.isfinite(depth_m)
    if not known.any():
        return depth_m
    # Holes are filled with what is too far to count.
    far = float(depth_m[known].max()) + 20 * noise_m
    filled = np.where(known, depth_m, np.float32(far)).astype(np.float32)
    average = np.asarray(cv2.bilateralFilter(filled, window_px, RANGE_DEVIATIONS * noise_m, window_px / 2))
    return np.where(known, average, np.float32(np.nan)).astype(np.float32)


def resting_depth(depth_m: NDArray[np.float32], change_m: float) -> NDArray[np.float32]:
    """Depth of the first frame, averaged over the frames after it until a pixel changes.

    Args:
        depth_m: (L, H, W), NaN in holes.
        change_m: a pixel has changed where it differs from its average by more.

    Returns:
        (H, W), NaN where the first frame has a hole.
    """
    total, count = depth_m[0].astype(np.float64), np.ones(depth_m[0].shape)
    rests = np.isfinite(depth_m[0])
    for picture in depth_m[1:]:
        rests = rests & (np.abs(picture - total / count) < change_m)
        if not rests.any():
            break
        total, count = total + np.where(rests, picture, 0.0), count + rests
    return (total / count).astype(np.float32)
