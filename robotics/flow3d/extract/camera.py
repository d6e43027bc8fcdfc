"""Optical flow of points, the camera motion that it shows, and videos redrawn as seen from their first pose.

The detectors need a static camera: motion of the background would count as motion of the object.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from robotics.flow3d.clouds import depth_points, draw_points
from robotics.flow3d.extract.depth import depth_noise_m
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    IndexArray,
    apply_pose,
    inverse_pose,
)
from robotics.flow3d.video import RgbdVideo

CORNERS, MIN_CORNERS = 200, 8
"""Corners searched in the first frame, and the number below which there is no estimate."""
FAR_M = np.float32(1e6)
"""Depth of unseen pixels while the frame is drawn."""
SAME_M, SAME_SHARE = 0.01, 0.4
"""A pixel whose depth changes by more than SAME_M shows something else. If fewer than SAME_SHARE of the pixels are
unchanged, the camera moved."""
LOOKS = 10
"""Later frames through which the corners are followed."""


def klt_tracks(frames: list[ImageArray], uv_px: FloatArray, window_px: int = 11) -> tuple[FloatArray, BoolArray]:
    """Follow points (n, 2) of the first grey frame: (L, n, 2) positions and (L, n) whether the point is still followed.

    Each point drifts on its own, and those next to something that moves are dragged along; `rigid_chain` follows the
    object as a whole instead. A lost point stays at its last position.
    """
    height, width = frames[0].shape
    tracks, alive = [uv_px], [np.ones(len(uv_px), dtype=bool)]
    for before, after in itertools.pairwise(frames):
        moved, good = klt_step(before, after, tracks[-1], window_px)
        good &= (moved >= 0).all(-1) & (moved[:, 0] < width) & (moved[:, 1] < height)
        alive.append(alive[-1] & good)
        tracks.append(np.where(good[:, None], moved, tracks[-1]))
    return np.stack(tracks), np.stack(alive)


def klt_step(
    before: ImageArray,
    after: ImageArray,
    uv_px: FloatArray,
    window_px: int = 11,
    levels: int = 3,
    forward_backward_px: float = 0.7,
) -> tuple[FloatArray, BoolArray]:
    """Follow points (n, 2) by one grey frame: (n, 2) new positions and (n,) whether they can be trusted.

    A good point comes back within `forward_backward_px` when it is followed backwards. The center of the first pixel
    is at 0.5 here, at 0 in OpenCV.
    """
    import cv2

    lucas_kanade: Any = cv2.calcOpticalFlowPyrLK
    if not len(uv_px):
        return uv_px, np.zeros(0, dtype=bool)
    options: dict[str, Any] = {"winSize": (window_px, window_px), "maxLevel": levels}
    # OpenCV wants float32, and the center of its first pixel at 0
    start = np.ascontiguousarray(uv_px - 0.5, dtype=np.float32)[:, None]
    there, found, _ = lucas_kanade(before, after, start, None, **options)
    # a track that does not lead back to its start slid along an edge or onto another surface
    back, found_back, _ = lucas_kanade(after, before, there, None, **options)
    error = np.linalg.norm((back - start)[:, 0], axis=-1)
    good = (found[:, 0] > 0) & (found_back[:, 0] > 0) & (error < forward_backward_px)
    return there[:, 0].astype(np.float64) + 0.5, good


def grey_frames(rgb: ImageArray) -> list[ImageArray]:
    """(L, H, W, 3) as a list of (H, W) grey images."""
    import cv2

    return [np.asarray(cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY), dtype=np.uint8) for frame in rgb]


def camera_motion_px(video: RgbdVideo) -> float | None:
    """Largest median displacement of background corners in pixels.

    A corner counts while the depth at its first position is unchanged, which a moving object would alter. Infinite if
    the depth of most of the image changes, None if there are too few corners.
    """
    import cv2

    chosen = np.unique(np.linspace(0, len(video) - 1, LOOKS + 1).astype(int))
    frames = grey_frames(video.rgb[chosen])
    found: Any = cv2.goodFeaturesToTrack(frames[0], CORNERS, 0.01, 5)
    start = np.zeros((0, 2)) if found is None else found[:, 0].astype(np.float64) + 0.5
    same = np.ones((len(chosen), *video.rgb.shape[1:3]), dtype=bool)
    if video.depth_m is not None:
        same = _same_depth(video.known_depth_m, chosen)
        if same.reshape(len(same), -1).mean(1).min() < SAME_SHARE:
            return float("inf")
    uv_px, followed = klt_tracks(frames, start, window_px=15)
    valid = followed & same[:, start[:, 1].astype(int), start[:, 0].astype(int)]
    moved = np.linalg.norm(uv_px - start, axis=-1)
    medians = [float(np.median(row[seen])) for row, seen in zip(moved, valid, strict=True) if seen.sum() >= MIN_CORNERS]
    # the first frame is always one of them, with displacement 0, and says nothing
    return max(medians) if len(medians) > 1 else None


def _same_depth(depth_m: DepthArray, chosen: IndexArray) -> BoolArray:
    """(n, H, W) pixels of the chosen frames with the depth of the first frame; holes count as unchanged."""
    limit = max(SAME_M, 4 * depth_noise_m(depth_m))
    # negated, so that a hole (NaN) counts as unchanged
    same: BoolArray = ~(np.abs(depth_m[chosen] - depth_m[0]) > limit)
    return same


def seen_from_first(video: RgbdVideo) -> RgbdVideo:
    """The video of a moving camera, redrawn from its first pose."""
    assert video.T_world_cams is not None
    K, depth_m = video.intrinsics_px, video.known_depth_m
    to_first = inverse_pose(video.T_world_cams[0]) @ video.T_world_cams
    rgb, depth = video.rgb.copy(), depth_m.copy()
    for frame in range(1, len(video)):
        rgb[frame], depth[frame] = _splat(video.rgb[frame], depth_m[frame], to_first[frame], K)
        unseen = np.isnan(depth[frame])
        # the first frame fills in colours but no depth: black pixels would look like motion
        rgb[frame][unseen] = video.rgb[0][unseen]
    return replace(video, rgb=rgb, depth_m=depth, T_world_cam=video.T_world_cams[0], T_world_cams=None)


def _splat(rgb: ImageArray, depth_m: DepthArray, T: FloatArray, K: FloatArray) -> tuple[ImageArray, DepthArray]:
    """Project the pixels of a frame into another camera; gaps of one pixel take their nearest neighbour."""
    import cv2

    points, known = depth_points(depth_m, K)
    drawn, far = draw_points(apply_pose(T, points[known]), rgb[known], K, depth_m.shape[::-1])
    z = np.minimum(far, FAR_M).astype(np.float32)
    # Where pixels spread apart, gaps of one pixel open; they take the neighbour nearest to the camera.
    near = np.asarray(cv2.erode(z, np.ones((3, 3), np.uint8), borderType=cv2.BORDER_REPLICATE))
    around = np.asarray(cv2.dilate(drawn, np.ones((3, 3), np.uint8)))
    gap = (z == FAR_M) & (near < FAR_M)
    drawn[gap], z[gap] = around[gap], near[gap]
    return drawn, np.where(z < FAR_M, z, np.float32(np.nan))
