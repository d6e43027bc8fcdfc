"""From a video to a clip of 3D flow: detect, track, lift, judge."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from robotics.flow3d.clip import VISIBLE, FlowClip, Observation
from robotics.flow3d.encoding import FlowEncoding, frame_indices, grid_in_mask
from robotics.flow3d.extract.camera_motion import camera_motion_px, seen_from_first
from robotics.flow3d.extract.depth_noise import DenoisedDepth
from robotics.flow3d.extract.early_motion import PUBLIC_SIDE_PX
from robotics.flow3d.extract.revealed_depth import RevealedDepth
from robotics.flow3d.extract.rigid_chain import RigidChain
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import depth_at, lift
from robotics.flow3d.rigid_fit import fit_motions

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from robotics.flow3d.extract.protocols import DepthSource, Detector, Tracker, Tracks
    from robotics.flow3d.extract.video import RgbdVideo

BEGINNINGS = ("video", "motion")
STARTED_M, STARTED = 0.005, 0.03
"""The object has started where its median point has gone that far, and that share of its greatest distance."""


@dataclass(frozen=True)
class QualityLimits:
    """What a clip must have."""

    most_holes: float = bounded(0.3, at_least=0, at_most=1)
    """Share of the object without depth in the first frame."""
    least_visible: float = bounded(0.25, at_least=0, at_most=1)
    """Mean visibility of the points after the first frame."""
    least_moved_m: float = bounded(0.02, at_least=0)
    """Way of the median point between first and last frame."""
    most_camera_px: float | None = bounded(1.5, above=0)
    """Way of the picture as a whole, in one of 256 pixels, above which the camera moves; None does not look."""
    least_extent_m: float = bounded(0.004, at_least=0)
    """Spread of the points across their longest direction; less is a line or a place."""


@dataclass(frozen=True)
class FlowExtractor:
    """Turns videos into clips."""

    encoding: FlowEncoding = field(default_factory=FlowEncoding)
    """T and N of the clips; the range of depths is what `outside` counts against."""
    detector: Detector = field(default_factory=RevealedDepth)
    """Finds the object."""
    tracker: Tracker = field(default_factory=RigidChain)
    """Follows its points."""
    depth: DepthSource = field(default_factory=DenoisedDepth)
    """Says how far everything is."""
    limits: QualityLimits = field(default_factory=QualityLimits)
    """What a clip must have."""
    begin: str = choice("video", BEGINNINGS)
    """Where the T frames begin: with the video, as in the paper, or with the motion of the object, so that none of them
    shows how a hand approaches. The first picture is that of the video all the same."""

    def __post_init__(self) -> None:
        if self.begin not in BEGINNINGS:
            raise UserError(f"begin is {self.begin!r}; must be {' or '.join(BEGINNINGS)}")

    def extract(self, video: RgbdVideo) -> FlowClip:
        """Turn one video into a clip.

        Args:
            video: of a camera that does not move, or with its poses.

        Returns:
            The clip. Its quality: `visible` (mean visibility), `moved_m` (way of the median point), `rigid_rmse_m` (how
            far the flow is from a rigid motion, the worst frame), `depth_holes` (share of the object without depth),
            `mask_px` (its pixels), `outside` (share of the flow beyond the picture or the encoding's depths), and the
            tracker's own numbers.

        Raises:
            RejectedVideo: it gives no clip; `reason` says why.
        """
        K = video.intrinsics_px
        video = self._still(replace(video, depth_m=self.depth.depth_m(video)))
        mask, depth_m = self.detector.detect(video), video.known_depth_m
        points = self._points(mask, depth_m[0], K)
        tracks = self.tracker.track(video, mask, points[:, :2])
        places = lifted(tracks, depth_m)
        # A tracker may know the depth of the first frame better than its pixels do.
        points = np.where(np.isfinite(places[0]), places[0], points)
        chosen = self._frames(lift(places, K))
        flow = np.concatenate([places[chosen], tracks.visible[chosen, :, None]], -1)
        quality = self._judge(points, flow, K)
        outside = np.abs(self.encoding.normalise(flow[..., :VISIBLE], video.size_px)) >= 1
        quality |= {
            "depth_holes": float(np.isnan(depth_m[0][mask]).mean()),
            "mask_px": float(mask.sum()),
            "outside": float(outside.any(-1).mean()),
        } | tracks.quality
        side = self.encoding.grid
        observation = Observation(video.rgb[0], depth_m[0], K, video.T_world_cam, video.instruction, mask)
        return FlowClip(
            observation,
            points.reshape(side, side, 3),
            flow.reshape(len(flow), side, side, 4),
            video.source,
            quality,
            video.meta,
        )

    def _still(self, video: RgbdVideo) -> RgbdVideo:
        """The video as a still camera sees it; refuses one whose camera moves in an unknown way."""
        if video.T_world_cams is not None:
            return seen_from_first(video)
        most = self.limits.most_camera_px
        way = None if most is None else camera_motion_px(video)
        if most is not None and way is not None and way > most * video.size_px[0] / PUBLIC_SIDE_PX:
            raise RejectedVideo("moving_camera", f"the background goes {way:.1f} px; give T_world_cams, a pose a frame")
        return video

    def _frames(self, places_m: NDArray[np.float64]) -> NDArray[np.intp]:
        """(T,) frames of the flow, of places (L, n, 3)."""
        first = 0
        if self.begin == "motion":
            ways = np.median(np.linalg.norm(places_m - places_m[0], axis=-1), axis=1)
            rests = ways < max(STARTED_M, STARTED * float(ways.max()))
            first = max(0, (len(rests) if rests.all() else int(np.argmin(rests))) - 1)
        return first + frame_indices(len(places_m) - first, self.encoding.num_frames)[1:]

    def _points(
        self, mask: NDArray[np.bool_], depth_m: NDArray[np.float32], K: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """(N * N, 3) query points on pixels of the object that have a depth."""
        known = mask & np.isfinite(depth_m)
        holes = 1 - known.sum() / max(mask.sum(), 1)
        if holes > self.limits.most_holes or not known.any():
            raise RejectedVideo("holed_depth", f"{100 * holes:.0f} % of {mask.sum()} pixels")
        uv = grid_in_mask(known, self.encoding.grid).reshape(-1, 2)
        points = np.concatenate([uv, depth_at(depth_m, uv)[:, None]], -1)
        centred = lift(points, K) - lift(points, K).mean(0)
        sizes = np.linalg.svd(centred, compute_uv=False) / np.sqrt(len(points))
        if self.encoding.grid > 1 and sizes[1] < self.limits.least_extent_m:
            raise RejectedVideo("degenerate_geometry", f"{1000 * sizes[1]:.1f} mm across, {1000 * sizes[0]:.1f} along")
        return points

    def _judge(
        self, points: NDArray[np.float64], flow: NDArray[np.float64], K: NDArray[np.float64]
    ) -> dict[str, float]:
        visible = float(flow[..., VISIBLE].mean())
        if visible < self.limits.least_visible:
            raise RejectedVideo("too_few_visible_points", f"{100 * visible:.0f} % on average")
        start, ways = lift(points, K), lift(flow[..., :VISIBLE], K)
        moved = float(np.median(np.linalg.norm(ways[-1] - start, axis=-1)))
        if moved < self.limits.least_moved_m:
            raise RejectedVideo("no_moving_object", f"it went {100 * moved:.1f} cm")
        fit = fit_motions(start, ways, flow[..., VISIBLE])
        return {"visible": visible, "moved_m": moved, "rigid_rmse_m": float(fit.rmse_m.max())}


def extract_clips(
    videos: Iterable[RgbdVideo], extractor: FlowExtractor, refused: Counter[str] | None = None
) -> Iterator[FlowClip]:
    """Turn videos into clips and leave out those that give none.

    Args:
        videos: any number.
        extractor: turns one into a clip.
        refused: counts the reasons of those that give none.

    Returns:
        Iterator over the clips.
    """
    for video in videos:
        try:
            yield extractor.extract(video)
        except RejectedVideo as rejection:
            if refused is not None:
                refused[rejection.reason] += 1


def lifted(tracks: Tracks, depth_m: NDArray[np.float32]) -> NDArray[np.float64]:
    """Tracks with depth.

    Args:
        tracks: of n points.
        depth_m: (L, H, W), NaN in holes.

    Returns:
        (L, n, 3) u, v, z. Where the tracker has no depth, that of the picture; for hidden points and holes the last one
        before.
    """
    z = tracks.z_m
    if z is None:
        seen = np.stack([depth_at(picture, uv) for picture, uv in zip(depth_m, tracks.uv_px, strict=True)])
        z = np.where(tracks.visible > 0.5, seen, np.nan)
    last = np.maximum.accumulate(np.where(np.isfinite(z), np.arange(len(z))[:, None], 0), axis=0)
    return np.concatenate([tracks.uv_px, np.take_along_axis(z, last, 0)[..., None]], -1)
