"""Turns a video into a clip of 3D flow: detect the object, track its points, lift them, check the result.

A detector without a model: the object by the depth that it reveals.

`RevealedDepth` looks where depth grows, because something in front of the background has left. A passing hand or arm
also uncovers background, but from the start of the video, which the object does not. The camera must not move. Of an
object that only comes nearer, such as the front of a drawer, only the part is found that uncovers something.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from robotics.flow3d.clip import VISIBLE, FlowClip, FlowEncoding, Observation, frame_indices, grid_in_mask
from robotics.flow3d.extract.backends import DepthSource, Detector, PointTracker, Tracks
from robotics.flow3d.extract.camera import camera_motion_px, seen_from_first
from robotics.flow3d.extract.depth import DenoisedDepth, depth_noise_m
from robotics.flow3d.extract.rigid_chain import RigidChain
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, IndexArray, check_kinds, depth_at, lift
from robotics.flow3d.rigid_motion import fit_motions
from robotics.flow3d.video import RejectedVideo, RgbdVideo

REGROWN_PX = 3
"""Width of the border in which thin parts are added again after the morphological opening."""
EARLY_SHARE = 0.1
"""A connected part is not the object if a larger fraction of it moved early."""


@dataclass(frozen=True)
class RevealedDepth:
    """Detects the object that leaves its position."""

    threshold_m: float | None = bounded(None, above=0)
    """Minimum growth of depth; None = 4 mm, or three standard deviations of a difference if that is more."""
    early_frame: int = bounded(5, at_least=1)
    """Pixels whose depth has grown by this frame moved too early to be the object."""
    least_frames: int = bounded(3, at_least=1)
    """Minimum number of frames in which depth has grown; in the other frames a hand may be where the object was."""
    min_pixels: int = bounded(9, at_least=1)
    """Minimum number of pixels of an object."""

    def detect(self, video: RgbdVideo) -> BoolArray:
        """Mask the object; see `Detector`. Excludes `RgbdVideo.gripper_mask`, if known."""
        depth_m = video.known_depth_m
        noise = np.sqrt(2.0) * depth_noise_m(depth_m)
        threshold = max(0.004, 3 * noise) if self.threshold_m is None else self.threshold_m
        mask = revealed_mask(depth_m, threshold, self.early_frame, self.least_frames, video.gripper_mask)
        if mask.sum() < self.min_pixels:
            raise RejectedVideo("no_moving_object", f"depth grew by {threshold:.3f} m on {mask.sum()} pixels")
        return mask


def revealed_mask(
    depth_m: DepthArray,
    threshold_m: float,
    early_frame: int = 5,
    least_frames: int = 3,
    excluded: BoolArray | None = None,
) -> BoolArray:
    """(H, W) pixels whose depth (L, H, W) grew by `threshold_m`, but not early: the largest connected part."""
    import cv2

    grown = depth_m - depth_m[0] > threshold_m
    early = min(early_frame, len(depth_m) - 1)
    # Shrinking depth does not count: that may be a hand in front of the object.
    moved_early = grown[: early + 1].any(0)
    revealed = grown.sum(0) >= min(least_frames, len(depth_m) - early)
    if excluded is not None:
        revealed &= ~excluded
    found = revealed & ~moved_early & ~_early_parts(revealed, moved_early)
    # The opening removes corners and handles; found pixels that touch the rest are added again.
    mask = largest_component(_opened(found))
    for _ in range(REGROWN_PX):
        mask = (cv2.dilate(mask.astype(np.uint8), np.ones((3, 3), np.uint8)) > 0) & found
    return mask


def _early_parts(revealed: BoolArray, moved_early: BoolArray) -> BoolArray:
    """Connected parts of which much moved early, such as the area that a hand uncovers."""
    import cv2

    count, labels = cv2.connectedComponents(_opened(revealed | moved_early).astype(np.uint8), connectivity=8)
    sizes = np.bincount(labels.ravel(), minlength=count)
    shares = np.bincount(labels[moved_early], minlength=count) / np.maximum(sizes, 1)
    early = shares > EARLY_SHARE
    # label 0 is the background
    early[0] = False
    return early[labels]


def _opened(mask: BoolArray) -> BoolArray:
    import cv2

    return np.asarray(cv2.morphologyEx(mask.astype(np.uint8), cv2.MORPH_OPEN, np.ones((3, 3), np.uint8))) > 0


def largest_component(mask: BoolArray) -> BoolArray:
    """Largest connected part of a mask, counting corners as touching; empty if the mask is."""
    import cv2

    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count < 2:
        return np.zeros_like(mask, dtype=bool)
    largest: BoolArray = labels == 1 + int(np.argmax(stats[1:, cv2.CC_STAT_AREA]))
    return largest


BEGINNINGS = ("video", "motion")
PUBLIC_SIDE_PX = 256
"""Image size of the public code; its distances in pixels are scaled from this size."""
STARTED_M, STARTED = 0.005, 0.03
"""The object has started once its median point has moved this far, and by this fraction of its largest distance."""


@dataclass(frozen=True)
class QualityLimits:
    """Limits beyond which a video is rejected."""

    most_holes: float = bounded(0.3, at_least=0, at_most=1)
    """Maximum fraction of the object without depth in the first frame."""
    least_visible: float = bounded(0.25, at_least=0, at_most=1)
    """Minimum mean visibility of the points after the first frame."""
    least_moved_m: float = bounded(0.02, at_least=0)
    """Minimum displacement of the median point between first and last frame."""
    most_camera_px: float | None = bounded(1.5, above=0)
    """Maximum displacement of the background, in pixels of an image of 256 pixels; None skips this check."""
    least_extent_m: float = bounded(0.004, at_least=0)
    """Minimum spread of the points across their longest direction; with less they form a line or a single point."""


@dataclass(frozen=True)
class FlowExtractor:
    """Turns videos into clips."""

    encoding: FlowEncoding = field(default_factory=FlowEncoding)
    """T and N of the clips; `outside` counts points beyond its range of depths."""
    detector: Detector = field(default_factory=RevealedDepth)
    """Finds the object."""
    tracker: PointTracker = field(default_factory=RigidChain)
    """Follows its points."""
    depth: DepthSource = field(default_factory=DenoisedDepth)
    """Gives the depth of each pixel."""
    limits: QualityLimits = field(default_factory=QualityLimits)
    """Limits beyond which a video is rejected."""
    begin: str = choice("video", BEGINNINGS)
    """Start of the T frames: with the video, as in the paper, or with the object's motion, which skips the approach of
    a hand. The observation is the first frame of the video either way."""

    def __post_init__(self) -> None:
        if self.begin not in BEGINNINGS:
            raise UserError(f"begin is {self.begin!r}; must be {' or '.join(BEGINNINGS)}")

    def extract(self, video: RgbdVideo) -> FlowClip:
        """Turn one video into a clip.

        Args:
            video: from a static camera, or with the camera's poses.

        Returns:
            The clip. Its quality: `visible` (mean visibility), `moved_m` (displacement of the median point),
            `rigid_rmse_m` (distance of the flow from a rigid motion in the worst frame), `depth_holes` (fraction of the
            object without depth), `mask_px` (its pixels), `outside` (fraction of the flow beyond the image or the
            encoding's depths), and the tracker's own measures.

        Raises:
            RejectedVideo: the video gives no clip; `reason` is a key of `REASONS`.
        """
        K = video.intrinsics_px
        # depth first: the camera check and the detector need it cleaned
        video = self._still(replace(video, depth_m=self.depth.depth_m(video)))
        mask, depth_m = self.detector.detect(video), video.known_depth_m
        check_kinds(mask=mask)
        points = self._points(mask, depth_m[0], K)
        tracks = self.tracker.track(video, mask, points[:, :2])
        places = lifted(tracks, depth_m)
        # a point that is hidden from the start keeps the depth of its pixel until it is seen
        places[..., 2] = np.where(np.isfinite(places[..., 2]), places[..., 2], points[:, 2])
        if not np.isfinite(places).all():
            raise RejectedVideo("lost_track", "its positions are not finite")
        # The tracker's depth of the first frame may be more accurate than the pixels'.
        points = places[0]
        chosen = self._frames(lift(places, K))
        flow = np.concatenate([places[chosen], tracks.visible[chosen, :, None]], -1)
        # after the choice of frames: what the clip does not show must not reject it
        quality = self._judge(points, flow, K)
        outside = np.abs(self.encoding.normalise(flow[..., :VISIBLE], video.size_px)) >= 1
        quality["depth_holes"] = float(np.isnan(depth_m[0][mask]).mean())
        quality["mask_px"] = float(mask.sum())
        quality["outside"] = float(outside.any(-1).mean())
        quality |= tracks.quality
        side = self.encoding.grid
        observation = Observation(video.rgb[0], depth_m[0], K, video.T_world_cam, video.instruction, mask)
        grid, flow = points.reshape(side, side, 3), flow.reshape(len(flow), side, side, 4)
        return FlowClip(observation, grid, flow, video.source, quality, video.meta)

    def _still(self, video: RgbdVideo) -> RgbdVideo:
        """The video as seen by a static camera; raises RejectedVideo if the camera moves without known poses."""
        if video.T_world_cams is not None:
            return seen_from_first(video)
        most = self.limits.most_camera_px
        moved = None if most is None else camera_motion_px(video)
        # the limit is for an image of 256 pixels, as in the public code
        if most is not None and moved is not None and moved > most * video.size_px[0] / PUBLIC_SIDE_PX:
            raise RejectedVideo(
                "moving_camera", f"the background moves by {moved:.1f} px; pass T_world_cams, one pose per frame"
            )
        return video

    def _frames(self, places_m: FloatArray) -> IndexArray:
        """(T,) indices of the flow's frames, given positions (L, n, 3)."""
        first = 0
        if self.begin == "motion":
            moved = np.median(np.linalg.norm(places_m - places_m[0], axis=-1), axis=1)
            rests = moved < max(STARTED_M, STARTED * float(moved.max()))
            # one frame before the motion, so that the flow begins at rest
            first = max(0, (len(rests) if rests.all() else int(np.argmin(rests))) - 1)
        return first + frame_indices(len(places_m) - first, self.encoding.num_frames)[1:]

    def _points(self, mask: BoolArray, depth_m: DepthArray, K: FloatArray) -> FloatArray:
        """(N * N, 3) query points on pixels of the object that have a depth."""
        known = mask & np.isfinite(depth_m)
        holes = 1 - known.sum() / max(mask.sum(), 1)
        if holes > self.limits.most_holes or not known.any():
            raise RejectedVideo("holed_depth", f"{100 * holes:.0f}% of {mask.sum()} pixels")
        # only pixels with a depth: a query point without one could not be lifted
        uv = grid_in_mask(known, self.encoding.grid).reshape(-1, 2)
        points = np.concatenate([uv, depth_at(depth_m, uv)[:, None]], -1)
        centred = lift(points, K) - lift(points, K).mean(0)
        sizes = np.linalg.svd(centred, compute_uv=False) / np.sqrt(len(points))
        if self.encoding.grid > 1 and sizes[1] < self.limits.least_extent_m:
            raise RejectedVideo("degenerate_geometry", f"{1000 * sizes[1]:.1f} mm across, {1000 * sizes[0]:.1f} along")
        return points

    def _judge(self, points: FloatArray, flow: FloatArray, K: FloatArray) -> dict[str, float]:
        visible = float(flow[..., VISIBLE].mean())
        if visible < self.limits.least_visible:
            raise RejectedVideo("too_few_visible_points", f"{100 * visible:.0f}% on average")
        start, flow_m = lift(points, K), lift(flow[..., :VISIBLE], K)
        moved = float(np.median(np.linalg.norm(flow_m[-1] - start, axis=-1)))
        if moved < self.limits.least_moved_m:
            raise RejectedVideo("no_moving_object", f"it moved by {100 * moved:.1f} cm")
        fit = fit_motions(start, flow_m, flow[..., VISIBLE])
        return {"visible": visible, "moved_m": moved, "rigid_rmse_m": float(fit.rmse_m.max())}


def lifted(tracks: Tracks, depth_m: DepthArray) -> FloatArray:
    """(L, n, 3) u, v, z of tracks, given depth (L, H, W).

    If the tracker has no depth, the frame's is used; hidden points and holes keep their last known depth.
    """
    z = tracks.z_m
    if z is None:
        seen = np.stack([depth_at(frame_m, uv) for frame_m, uv in zip(depth_m, tracks.uv_px, strict=True)])
        z = np.where(tracks.visible > 0.5, seen, np.nan)
    # index of the latest frame in which each point had a depth
    last = np.maximum.accumulate(np.where(np.isfinite(z), np.arange(len(z))[:, None], 0), axis=0)
    return np.concatenate([tracks.uv_px, np.take_along_axis(z, last, 0)[..., None]], -1)
