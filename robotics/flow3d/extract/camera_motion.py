"""Whether the camera moves, and videos of a moving camera as a still one would see them.

Everything after this needs a still camera: the motion of the background would count as motion of the object.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.flow3d.extract.classical_flow import ClassicalFlow, grey_frames
from robotics.flow3d.extract.depth_noise import depth_noise_m
from robotics.flow3d.geometry import apply_pose, inverse_pose, lift, project

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.video import RgbdVideo

CORNERS, FEWEST = 200, 8
"""Corners that are looked for in the first frame, and with fewer of which nothing is said."""
FAR_M = np.float32(1e6)
"""Depth of what is not seen, while pixels are drawn."""
SAME_M, SAME_SHARE = 0.01, 0.4
"""Change of depth of a pixel that shows something else, and the share of pixels that show the same all along."""
LOOKS = 10
"""Later frames through which the corners are followed."""


def camera_motion_px(video: RgbdVideo) -> float | None:
    """How far the background moves in the picture.

    Corners count where the depth of their first place stays as it is: what moves before a still camera leaves it.

    Returns:
        Greatest median way of corners of the first frame, in pixels; infinite where most of the picture changes its
        depth. None where there are too few corners to tell.
    """
    import cv2

    chosen = np.unique(np.linspace(0, len(video) - 1, LOOKS + 1).astype(int))
    some = replace(video, rgb=video.rgb[chosen], depth_m=None, T_world_cams=None)
    found: Any = cv2.goodFeaturesToTrack(grey_frames(some.rgb[:1])[0], CORNERS, 0.01, 5)
    start = np.zeros((0, 2)) if found is None else found[:, 0].astype(np.float64) + 0.5
    same = np.ones((len(chosen), *video.rgb.shape[1:3]), dtype=bool)
    if video.depth_m is not None:
        same = _same_depth(video.known_depth_m, chosen)
        if same.reshape(len(same), -1).mean(1).min() < SAME_SHARE:
            return float("inf")
    tracks = ClassicalFlow(window_px=15).track(some, same[0], start)
    rests = (tracks.visible > 0) & same[:, start[:, 1].astype(int), start[:, 0].astype(int)]
    ways = np.linalg.norm(tracks.uv_px - start, axis=-1)
    medians = [float(np.median(way[seen])) for way, seen in zip(ways, rests, strict=True) if seen.sum() >= FEWEST]
    return max(medians) if len(medians) > 1 else None


def _same_depth(depth_m: NDArray[np.float32], chosen: NDArray[np.intp]) -> NDArray[np.bool_]:
    """(n, H, W) pixels of the chosen frames whose depth is that of the first frame; those with a hole count as such."""
    limit = max(SAME_M, 4 * depth_noise_m(depth_m))
    same: NDArray[np.bool_] = ~(np.abs(depth_m[chosen] - depth_m[0]) > limit)
    return same


def seen_from_first(video: RgbdVideo) -> RgbdVideo:
    """A video of a moving camera, drawn as its first pose would see it."""
    assert video.T_world_cams is not None
    K, depth_m = video.intrinsics_px, video.known_depth_m
    to_first = inverse_pose(video.T_world_cams[0]) @ video.T_world_cams
    rgb, depth = video.rgb.copy(), depth_m.copy()
    for frame in range(1, len(video)):
        rgb[frame], depth[frame] = _splat(video.rgb[frame], depth_m[frame], to_first[frame], K)
        unseen = np.isnan(depth[frame])
        rgb[frame][unseen] = video.rgb[0][unseen]
    return replace(video, rgb=rgb, depth_m=depth, T_world_cam=video.T_world_cams[0], T_world_cams=None)


def _splat(
    rgb: NDArray[np.uint8], depth_m: NDArray[np.float32], T: NDArray[np.float64], K: NDArray[np.float64]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Draw the pixels of a frame in another camera, those in front last; single gaps take their nearest neighbour."""
    import cv2

    height, width = depth_m.shape
    v, u = np.mgrid[:height, :width] + 0.5
    known = np.isfinite(depth_m)
    places = project(apply_pose(T, lift(np.stack([u, v, depth_m], -1)[known].astype(np.float64), K)), K)
    colours = rgb[known]
    inside = np.isfinite(places[:, 0]) & (places[:, :2] >= 0).all(-1)
    inside &= (places[:, 0] < width) & (places[:, 1] < height)
    order = np.flatnonzero(inside)[np.argsort(-places[inside, 2], kind="stable")]
    columns, rows = places[order, 0].astype(int), places[order, 1].astype(int)
    drawn, z = np.zeros_like(rgb), np.full((height, width), FAR_M, np.float32)
    drawn[rows, columns], z[rows, columns] = colours[order], places[order, 2]
    # Where pixels spread, gaps of one pixel open: they take what lies nearest to the camera around them.
    near = np.asarray(cv2.erode(z, np.ones((3, 3), np.uint8), borderType=cv2.BORDER_REPLICATE))
    around = np.asarray(cv2.dilate(drawn, np.ones((3, 3), np.uint8)))
    gap = (z == FAR_M) & (near < FAR_M)
    drawn[gap], z[gap] = around[gap], near[gap]
    return drawn, np.where(z < FAR_M, z, np.float32(np.nan))
