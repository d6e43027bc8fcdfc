"""Tracks an object as one rigid body, by optical flow and depth of its visible points.

Points hidden by a hand move along with the rest. Frame-to-frame motion drifts, so each pose is corrected twice: against
the first frame, warped to where the object is now (`correct_texture`), and against the measured surface
(`correct_surface`, point-to-plane).

Source: Kabsch in RANSAC, then Gauss-Newton on pixels and depth with Cauchy weights; point-to-plane with projective
association, Chen & Medioni 1992, Newcombe et al. 2011 (KinectFusion).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.extract.classical_flow import grey_frames, klt_step
from robotics.flow3d.extract.depth_noise import depth_noise_m, resting_depth
from robotics.flow3d.extract.reprojection import fit_reprojection
from robotics.flow3d.extract.simulated import rigid_tracks
from robotics.flow3d.extract.surface import align_to_surface, surface_normals, warped_image
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    IndexArray,
    apply_pose,
    depth_at,
    lift,
    project,
)
from robotics.flow3d.rigid_fit import ransac_kabsch

if TYPE_CHECKING:
    from robotics.flow3d.extract.protocols import Tracks
    from robotics.flow3d.extract.video import RgbdVideo

SIGMA_PX = 0.5
"""Standard deviation of optical flow."""
SMOOTH_M = 0.002
"""With more noise of depth, normals from neighbouring pixels mean nothing."""
LEAST_SUPPORT = 0.7
"""Share of the previous pose's support that a new pose must have."""
MIN_POINTS = 6
"""Least points that a motion is fitted to."""


@dataclass(frozen=True)
class RigidChain:
    """Tracks a rigid object in RGB-D video."""

    agree_m: float | None = bounded(None, above=0)
    """Largest depth difference of a visible point; None = 8 mm, or three deviations of the noise if that is more."""
    inlier_m: float | None = bounded(None, above=0)
    """Largest distance of a point that fits a motion; None = 6 mm, or three deviations of the noise."""
    iterations: int = bounded(60, at_least=1)
    """Triples of points that RANSAC tries."""
    most_points: int = bounded(400, at_least=4)
    """Most pixels of the object that are followed."""
    window_px: int = bounded(11, at_least=3)
    """Patch size of optical flow."""
    levels: int = bounded(3, at_least=0)
    """Pyramid levels of optical flow."""
    forward_backward_px: float = bounded(0.7, above=0)
    """Points that do not come back this close backwards are not used."""
    correct_texture: bool = True
    """Also compare each frame with the first one, which stops the drift of textured objects."""
    correct_surface: bool = True
    """Align the points with the measured surface."""
    most_lost: float = bounded(0.5, at_least=0, at_most=1)
    """Reject the video when a larger share of its frames has too few points."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points; see `Tracker`."""
        noise = depth_noise_m(video.known_depth_m)
        agree = max(0.008, 3 * noise) if self.agree_m is None else self.agree_m
        poses, lost = self._poses(video, mask, agree, noise)
        share = lost / (len(video) - 1)
        if share > self.most_lost:
            raise RejectedVideo("lost_track", f"too few points in {100 * share:.0f} % of the frames")
        rest = resting_depth(video.known_depth_m, 4 * noise)
        tracks = rigid_tracks(video, uv_px, poses[:, None], max(0.01, agree), rest)
        tracks.quality.update(lost_frames=share, depth_noise_m=noise)
        return tracks

    def _poses(self, video: RgbdVideo, mask: BoolArray, agree_m: float, noise_m: float) -> tuple[FloatArray, int]:
        """(L, 4, 4) motions since the first frame, and the number of frames with too few points."""
        K, depth_m, grey = video.intrinsics_px, video.known_depth_m, grey_frames(video.rgb)
        inlier = max(0.006, 3 * noise_m) if self.inlier_m is None else self.inlier_m
        model_uvz = _model(mask, resting_depth(depth_m, 4 * noise_m), self.most_points)
        model, rng = lift(model_uvz, K), np.random.default_rng(0)
        T, poses, lost = np.eye(4), [np.eye(4)], 0
        for frame in range(1, len(video)):
            seen, uv = _visible(model, T, K, depth_m[frame - 1], agree_m)
            there, good = self._follow(grey[frame - 1], grey[frame], uv)
            moved = self._fit(model[seen][good], there[good], depth_m[frame], K, inlier, rng)
            lost += moved is None
            T = self._supported(T, moved, model, K, depth_m[frame], agree_m)
            if self.correct_texture:
                T = self._against_first(T, model, mask, grey, depth_m, frame, K, agree_m, inlier, rng)
            if self.correct_surface and noise_m < SMOOTH_M:
                normals = surface_normals(depth_m[frame], K)
                T = align_to_surface(T, model, depth_m[frame], normals, K, agree_m)
            poses.append(T)
        return np.stack(poses), lost

    def _against_first(
        self,
        T: FloatArray,
        model: FloatArray,
        mask: BoolArray,
        grey: list[ImageArray],
        depth_m: DepthArray,
        frame: int,
        K: FloatArray,
        agree_m: float,
        inlier_m: float,
        rng: np.random.Generator,
    ) -> FloatArray:
        expected = warped_image(T, grey[0], mask, depth_m[0], grey[frame], depth_m[frame], K, 2 * agree_m)
        seen, uv = _visible(model, T, K, depth_m[frame], 2 * agree_m)
        there, good = self._follow(expected, grey[frame], uv, levels=0)
        near = good & (np.linalg.norm(there - uv, axis=-1) < self.window_px / 2)
        better = self._fit(model[seen][near], there[near], depth_m[frame], K, inlier_m, rng)
        return self._supported(T, better, model, K, depth_m[frame], agree_m)

    def _supported(
        self,
        T: FloatArray,
        other: FloatArray | None,
        model: FloatArray,
        K: FloatArray,
        depth_m: DepthArray,
        agree_m: float,
    ) -> FloatArray:
        """The other pose, unless the depth image contradicts it: optical flow may have followed a hand instead."""
        if other is None:
            return T
        kept, found = (_support(pose, model, K, depth_m, agree_m) for pose in (T, other))
        return other if found >= min(LEAST_SUPPORT * kept, kept - 1) else T

    def _follow(
        self, before: ImageArray, after: ImageArray, uv: FloatArray, levels: int | None = None
    ) -> tuple[FloatArray, BoolArray]:
        halvings = self.levels if levels is None else levels
        return klt_step(before, after, uv, self.window_px, halvings, self.forward_backward_px)

    def _fit(
        self,
        model: FloatArray,
        uv: FloatArray,
        depth_m: DepthArray,
        K: FloatArray,
        inlier_m: float,
        rng: np.random.Generator,
    ) -> FloatArray | None:
        depth = depth_at(depth_m, uv)
        known = np.isfinite(depth)
        if known.sum() < MIN_POINTS:
            return None
        target = lift(np.concatenate([uv, depth[:, None]], -1)[known], K)
        source = model[known]
        T = ransac_kabsch(source, target, tolerance_m=inlier_m, iterations=self.iterations, rng=rng)
        fits = np.linalg.norm(apply_pose(T, source) - target, axis=-1) < inlier_m
        if fits.sum() < MIN_POINTS:
            return None
        uvz = np.concatenate([uv, depth[:, None]], -1)[known]
        return fit_reprojection(T, source[fits], uvz[fits], K, SIGMA_PX, inlier_m / 3)


def _model(mask: BoolArray, depth_m: DepthArray, most: int) -> FloatArray:
    """(n, 3) u, v, z of pixels of the object that have a depth, evenly thinned."""
    rows, columns = np.nonzero(mask & np.isfinite(depth_m))
    if len(rows) < MIN_POINTS:
        raise RejectedVideo("holed_depth", f"{len(rows)} pixels of the object have a depth")
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    rows, columns = rows[chosen], columns[chosen]
    return np.stack([columns + 0.5, rows + 0.5, depth_m[rows, columns].astype(np.float64)], -1)


def _visible(
    model: FloatArray, T: FloatArray, K: FloatArray, depth_m: DepthArray, agree_m: float
) -> tuple[IndexArray, FloatArray]:
    """Indices (k,) of the model points that are visible at a pose, and their pixels (k, 2)."""
    uvz = project(apply_pose(T, model), K)
    seen = np.flatnonzero(np.abs(depth_at(depth_m, uvz[:, :2]) - uvz[:, 2]) < agree_m)
    return seen, uvz[seen, :2]


def _support(T: FloatArray, model: FloatArray, K: FloatArray, depth_m: DepthArray, agree_m: float) -> int:
    """Number of visible points at a pose, minus those in front of the measured surface, which cannot be there."""
    uvz = project(apply_pose(T, model), K)
    behind = depth_at(depth_m, uvz[:, :2]) - uvz[:, 2]
    return int((np.abs(behind) < agree_m).sum() - (behind > agree_m).sum())
