"""Backends that read the simulator's state: exact, for training in simulation and as the reference for all others."""

from __future__ import annotations

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.extract.backends import Tracks
from robotics.flow3d.extract.depth import depth_noise_m
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, apply_pose, depth_at, lift, project
from robotics.flow3d.video import RejectedVideo, RgbdVideo, VideoTruth

AGREE_M = 0.01
"""Maximum depth difference of a visible point."""


class SimSegmentation:
    """Uses the simulator's segmentation of the object."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`."""
        mask = _truth(video).masks[0]
        if not mask.any():
            raise RejectedVideo("no_moving_object", "the object is not visible in the simulator's first frame")
        return mask


class SimState:
    """Moves the object's points with its pose, X_t = T_t T_0^-1 X_0; other points do not move."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points; see `Tracker`."""
        truth, (width, height) = _truth(video), video.size_px
        columns = np.clip(np.floor(uv_px[:, 0]).astype(int), 0, width - 1)
        rows = np.clip(np.floor(uv_px[:, 1]).astype(int), 0, height - 1)
        own = truth.masks[0][rows, columns]
        # points next to the object belong to the background, which is at rest
        T = np.where(own[None, :, None, None], truth.T_t_0[:, None], np.eye(4))
        agree = max(AGREE_M, 3 * depth_noise_m(video.known_depth_m))
        return rigid_tracks(video, uv_px, T, agree, truth.depth_m)


def rigid_tracks(
    video: RgbdVideo, uv_px: FloatArray, T_t_0: FloatArray, agree_m: float, first_depth_m: DepthArray | None = None
) -> Tracks:
    """Tracks of points (n, 2) of the first frame that move rigidly by T_t_0 (L, n or 1, 4, 4) in the camera frame.

    A point is visible if it is in the image and its depth differs from the image's by less than `agree_m`.
    `first_depth_m` (H, W) replaces the depth of the first frame if it is known more exactly.
    """
    K, depth_m, (width, height) = video.intrinsics_px, video.known_depth_m, video.size_px
    start_z = depth_at(depth_m[0] if first_depth_m is None else first_depth_m, uv_px)
    start = lift(np.concatenate([uv_px, np.nan_to_num(start_z, nan=1.0)[:, None]], -1), K)
    moved = apply_pose(np.broadcast_to(T_t_0, (len(video), len(uv_px), 4, 4)), start[None, :, None])[:, :, 0]
    uvz = project(moved, K)
    seen = np.stack([depth_at(frame_m, places) for frame_m, places in zip(depth_m, uvz[..., :2], strict=True)])
    inside = (uvz[..., 0] >= 0) & (uvz[..., 0] < width) & (uvz[..., 1] >= 0) & (uvz[..., 1] < height)
    visible = inside & (np.abs(seen - uvz[..., 2]) < agree_m) & np.isfinite(start_z)
    behind = ~np.isfinite(uvz[..., 0]) | ~np.isfinite(start_z)
    # such a point has no position; its first one is kept, and it counts as hidden
    uv = np.where(behind[..., None], uv_px, uvz[..., :2])
    return Tracks(uv, visible.astype(np.float64), np.where(np.isfinite(start_z), uvz[..., 2], np.nan))


def _truth(video: RgbdVideo) -> VideoTruth:
    if video.truth is None:
        raise UserError(
            f"the video {video.source or '(no source)'} has no ground truth from a simulator; use the detector "
            "RevealedDepth and the tracker RigidChain"
        )
    return video.truth
