"""Follows an object as one rigid body: optical flow and depth of its visible points say how it moved in each frame.

Points hidden by a hand go along with the rest. Frame-to-frame motion drifts, so each pose is corrected twice: against
the picture of the first frame, carried to where the object is now (`correct_texture`), and against the surface that the
depth picture shows (`correct_surface`, point-to-plane).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.extract.classical_flow import grey_frames, klt_step
from robotics.flow3d.extract.depth_noise import depth_noise_m, resting_depth
from robotics.flow3d.extract.reprojection import fit_reprojection
from robotics.flow3d.extract.simulated import carried_tracks
from robotics.flow3d.extract.surface import align_to_surface, carried_picture, surface_normals
from robotics.flow3d.extract.video import RejectedVideo
from robotics.flow3d.geometry import apply_pose, depth_at, lift, project
from robotics.flow3d.rigid_fit import ransac_kabsch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.extract.protocols import Tracks
    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class RigidChain:
    """Tracker of a rigid object in RGB-D."""

    agree_m: float | None = bounded(None, above=0)
    """A point is visible where the depth agrees with it within that; None takes 8 mm, or three deviations of noise."""
    inlier_m: float | None = bounded(None, above=0)
    """A point fits a motion within that; None takes 6 mm, or three deviations of noise."""
    iterations: int = bounded(60, at_least=1)
    """Triples of points that a motion is tried from."""
    most_points: int = bounded(400, at_least=4)
    """Pixels of the object that are followed."""
    window_px: int = bounded(11, at_least=3)
    """Side of the patch that optical flow compares."""
    levels: int = bounded(3, at_least=0)
    """Halvings of the picture for optical flow."""
    forward_backward_px: float = bounded(0.7, above=0)
    """A point that does not come back this close is not used."""
    correct_texture: bool = True
    """Compare each frame with the first one as well, which stops the drift of what has a texture."""
    correct_surface: bool = True
    """Put the points onto the measured surface."""
    most_lost: float = bounded(0.5, at_least=0, at_most=1)
    """Share of frames without enough points above which the video is refused."""

    def track(self, video: RgbdVideo, mask: NDArray[np.bool_], uv_px: NDArray[np.float64]) -> Tracks:
        """Follow points; see `Tracker`."""
        noise = depth_noise_m(video.known_depth_m)
        agree = max(0.008, 3 * noise) if self.agree_m is None else self.agree_m
        poses, lost = self._poses(video, mask, agree, noise)
        share = lost / (len(video) - 1)
        if share > self.most_lost:
            raise RejectedVideo("lost_track", f"too few points in {100 * share:.0f} % of the frames")
        rest = resting_depth(video.known_depth_m, 4 * noise)
        tracks = carried_tracks(video, uv_px, poses[:, None], max(0.01, agree), rest)
        tracks.quality.update(lost_frames=share, depth_noise_m=noise)
        return tracks

    def _poses(
        self, video: RgbdVideo, mask: NDArray[np.bool_], agree_m: float, noise_m: float
    ) -> tuple[NDArray[np.float64], int]:
        """(L, 4, 4) motions since the first frame, and in how many frames there were too few points."""
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
        T: NDArray[np.float64],
        model: NDArray[np.float64],
        mask: NDArray[np.bool_],
        grey: list[NDArray[np.uint8]],
        depth_m: NDArray[np.float32],
        frame: int,
        K: NDArray[np.float64],
        agree_m: float,
        inlier_m: float,
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:
        expected = carried_picture(T, grey[0], mask, depth_m[0], grey[frame], depth_m[frame], K, 2 * agree_m)
        seen, uv = _visible(model, T, K, depth_m[frame], 2 * agree_m)
        there, good = self._follow(expected, grey[frame], uv, levels=0)
        near = good & (np.linalg.norm(there - uv, axis=-1) < self.window_px / 2)
        better = self._fit(model[seen][near], there[near], depth_m[frame], K, inlier_m, rng)
        return self._supported(T, better, model, K, depth_m[frame], agree_m)

    def _supported(
        self,
        T: NDArray[np.float64],
        other: NDArray[np.float64] | None,
        model: NDArray[np.float64],
        K: NDArray[np.float64],
        depth_m: NDArray[np.float32],
        agree_m: float,
    ) -> NDArray[np.float64]:
        """The other pose, unless the depth picture contradicts it: optical flow may have followed a hand instead."""
        if other is None:
            return T
        kept, found = (_support(pose, model, K, depth_m, agree_m) for pose in (T, other))
        return other if found >= min(LEAST_SUPPORT * kept, kept - 1) else T

    def _follow(
        self, before: NDArray[np.uint8], after: NDArray[np.uint8], uv: NDArray[np.float64], levels: int | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        halvings = self.levels if levels is None else levels
        return klt_step(before, after, uv, self.window_px, halvings, self.forward_backward_px)

    def _fit(
        self,
        model: NDArray[np.float64],
        uv: NDArray[np.float64],
        depth_m: NDArray[np.float32],
        K: NDArray[np.float64],
        inlier_m: float,
        rng: np.random.Generator,
    ) -> NDArray[np.float64] | None:
        depth = depth_at(depth_m, uv)
        known = np.isfinite(depth)
        if known.sum() < FEWEST:
            return None
        target = lift(np.concatenate([uv, depth[:, None]], -1)[known], K)
        source = model[known]
        T = ransac_kabsch(source, target, tolerance_m=inlier_m, iterations=self.iterations, rng=rng)
        fits = np.linalg.norm(apply_pose(T, source) - target, axis=-1) < inlier_m
        if fits.sum() < FEWEST:
            return None
        uvz = np.concatenate([uv, depth[:, None]], -1)[known]
        return fit_reprojection(T, source[fits], uvz[fits], K, SIGMA_PX, inlier_m / 3)


def _model(mask: NDArray[np.bool_], depth_m: NDArray[np.float32], most: int) -> NDArray[np.float64]:
    """(n, 3) u, v, z of pixels of the object that have a depth, evenly thinned."""
    rows, columns = np.nonzero(mask & np.isfinite(depth_m))
    if len(rows) < FEWEST:
        raise RejectedVideo("holed_depth", f"{len(rows)} pixels of the object have a depth")
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    rows, columns = rows[chosen], columns[chosen]
    return np.stack([columns + 0.5, rows + 0.5, depth_m[rows, columns].astype(np.float64)], -1)


def _visible(
    model: NDArray[np.float64],
    T: NDArray[np.float64],
    K: NDArray[np.float64],
    depth_m: NDArray[np.float32],
    agree_m: float,
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Which points of the model the depth picture shows at a pose, and (k, 2) where."""
    uvz = project(apply_pose(T, model), K)
    seen = np.flatnonzero(np.abs(depth_at(depth_m, uvz[:, :2]) - uvz[:, 2]) < agree_m)
    return seen, uvz[seen, :2]


def _support(
    T: NDArray[np.float64],
    model: NDArray[np.float64],
    K: NDArray[np.float64],
    depth_m: NDArray[np.float32],
    agree_m: float,
) -> int:
    """Points that the depth picture shows at a pose, less those that it looks through, which cannot be there."""
    uvz = project(apply_pose(T, model), K)
    behind = depth_at(depth_m, uvz[:, :2]) - uvz[:, 2]
    return int((np.abs(behind) < agree_m).sum() - (behind > agree_m).sum())


SIGMA_PX = 0.5
"""Deviation of a place that optical flow finds."""
SMOOTH_M = 0.002
"""With more noise of depth, normals from neighbouring pixels say nothing."""
LEAST_SUPPORT = 0.7
"""Share of the support of the pose before that a new one must have."""
FEWEST = 6
"""Points that a motion is fitted to."""
