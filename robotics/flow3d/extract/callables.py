"""A user's own tracker or depth model, such as CoTracker, named as `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards.loading import load_function
from robotics.flow3d.extract.protocols import Tracks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo

__all__ = ["FunctionDepth", "FunctionTracker"]


@dataclass(frozen=True)
class FunctionTracker:
    """Calls `function(rgb, uv_px)`.

    It gets (L, H, W, 3) uint8 frames and (n, 2) points of the first, and returns (L, n, 2) places and (L, n) visibility
    of 0 to 1. The middle of the first pixel is at (0.5, 0.5).
    """

    function: str
    """Its name."""

    def track(self, video: RgbdVideo, mask: NDArray[np.bool_], uv_px: NDArray[np.float64]) -> Tracks:
        """Follow points; see `Tracker`."""
        found = load_function(self.function, what="tracker")(video.rgb, uv_px)
        uv, visible = (np.asarray(part, dtype=np.float64) for part in found)
        shape = (len(video), len(uv_px))
        if uv.shape != (*shape, 2) or visible.shape != shape:
            raise UserError(
                f"{self.function} returned the shapes {uv.shape} and {visible.shape}; must be {(*shape, 2)}, {shape}"
            )
        return Tracks(uv, np.clip(visible, 0.0, 1.0))


@dataclass(frozen=True)
class FunctionDepth:
    """Calls `function(rgb)`, which gets (L, H, W, 3) uint8 and returns (L, H, W) metres."""

    function: str
    """Its name."""

    def depth_m(self, video: RgbdVideo) -> NDArray[np.float32]:
        """Depth of each frame; see `DepthSource`."""
        depth = np.asarray(load_function(self.function, what="depth")(video.rgb), dtype=np.float32)
        if depth.shape != video.rgb.shape[:3]:
            raise UserError(f"{self.function} returned the shape {depth.shape}; must be {video.rgb.shape[:3]}")
        return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(np.nan))
