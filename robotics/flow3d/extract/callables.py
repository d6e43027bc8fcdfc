"""A user's own detector, tracker or depth model, named as `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.rewards.loading import load_function
from robotics.flow3d.extract.protocols import Tracks
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray

if TYPE_CHECKING:
    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class FunctionDetector:
    """Calls `function(rgb, depth_m)`.

    It gets (L, H, W, 3) uint8 frames and their (L, H, W) metres, None where they are not known, and returns an (H, W)
    mask of the object in the first frame, empty where it finds none.
    """

    function: str
    """module:function."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`."""
        mask = np.asarray(load_function(self.function, what="detector")(video.rgb, video.depth_m))
        if mask.shape != video.rgb.shape[1:3]:
            raise UserError(f"{self.function} returned the shape {mask.shape}; must be {video.rgb.shape[1:3]}")
        if not mask.any():
            raise RejectedVideo("no_moving_object", f"{self.function} found nothing")
        return mask.astype(bool)


@dataclass(frozen=True)
class FunctionTracker:
    """Calls `function(rgb, uv_px)`.

    It gets (L, H, W, 3) uint8 frames and (n, 2) points of the first, and returns (L, n, 2) positions and (L, n)
    visibility of 0 to 1. The center of the first pixel is at (0.5, 0.5).

    CoTracker3, which has the center of the first pixel at (0, 0), for `FunctionTracker("trackers.py:cotracker")`:

        model = torch.hub.load("facebookresearch/co-tracker", "cotracker3_offline")

        def cotracker(rgb, uv_px):
            video = torch.from_numpy(rgb).permute(0, 3, 1, 2)[None].float()  # (1, L, 3, H, W), 0 to 255
            points = torch.from_numpy(uv_px - 0.5).float()
            queries = torch.cat([torch.zeros(len(points), 1), points], 1)[None]  # (1, n, 3): frame, x, y
            with torch.no_grad():
                tracks, visible = model(video, queries=queries)  # (1, L, n, 2), (1, L, n)
            return tracks[0].double().numpy() + 0.5, visible[0].double().numpy()

    Source: facebookresearch/co-tracker README.md, cotracker/predictor.py.
    """

    function: str
    """module:function."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
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
    """module:function."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """Depth of each frame; see `DepthSource`."""
        depth = np.asarray(load_function(self.function, what="depth")(video.rgb), dtype=np.float32)
        if depth.shape != video.rgb.shape[:3]:
            raise UserError(f"{self.function} returned the shape {depth.shape}; must be {video.rgb.shape[:3]}")
        return np.where(np.isfinite(depth) & (depth > 0), depth, np.float32(np.nan))
