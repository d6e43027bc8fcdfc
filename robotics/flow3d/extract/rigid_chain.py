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
from robotics.flow3d.extract.camera import grey_frames, klt_step
from robotics.flow3d.extract.depth import depth_noise_m, resting_depth
from robotics.flow3d.extract.simulated import rigid_tracks
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    IndexArray,
    apply_pose,
    depth_at,
    inverse_pose,
    lift,
    make_pose,
    project,
)
from robotics.flow3d.rigid_motion import ransac_kabsch
from robotics.flow3d.video import RejectedVideo

if TYPE_CHECKING:
    from robotics.flow3d.extract.backends import Tracks
    from robotics.flow3d.video import RgbdVideo


MIN_EIGENVALUE = 0.02
"""Share of the largest eigenvalue below which the surface does not determine a motion, such as the rotation of a round
object about its axis; in these directions the pose stays as it is."""
MIN_SURFACE_POINTS = 12
"""Fewer visible points leave the pose as it is."""
DAMPING = 1e-6
"""Damping of the normal equations, as a share of their largest entry."""
SIGMA_PX = 0.5
"""Standard deviation of optical flow."""
SMOOTH_M = 0.002
"""With more noise of depth, normals from neighbouring pixels mean nothing."""
LEAST_SUPPORT = 0.7
"""Share of the previous pose's support that a new pose must have."""
MIN_POINTS = 6
"""Least points that a motion is fitted to."""


def warped_image(
    T: FloatArray,
    first: ImageArray,
    mask: BoolArray,
    first_depth_m: DepthArray,
    now: ImageArray,
    depth_m: DepthArray,
    K: FloatArray,
    agree_m: float,
) -> ImageArray:
    """The frame `now` as it would look with the object at pose T in the colours of the first frame: (H, W).

    `T` (4, 4) is the motion since the first frame in the camera frame, `first`, `mask` and `first_depth_m` (H, W) the
    first frame, `now` and `depth_m` (H, W) the current one. Pixels farther than `agree_m` from the surface are not the
    object's and stay as in `now`.
    """
    import cv2

    height, width = now.shape
    v, u = np.mgrid[:height, :width] + 0.5
    there = lift(np.stack([u, v, depth_m], -1).astype(np.float64).reshape(-1, 3), K)
    back = project(apply_pose(inverse_pose(T), there), K)
    at = np.nan_to_num(back[:, :2] - 0.5, nan=-9.0, posinf=-9.0, neginf=-9.0).clip(-9, 2**14).astype(np.float32)
    uv = at.reshape(height, width, 2)
    colours = cv2.remap(first, uv[..., 0], uv[..., 1], cv2.INTER_LINEAR)
    inside = cv2.remap(mask.astype(np.uint8), uv[..., 0], uv[..., 1], cv2.INTER_NEAREST) > 0
    agrees = np.abs(depth_at(first_depth_m, at.astype(np.float64) + 0.5) - back[:, 2]) < agree_m
    return np.where(inside & agrees.reshape(height, width), colours, now).astype(np.uint8)


def surface_normals(depth_m: DepthArray, K: FloatArray) -> FloatArray:
    """(H, W, 3) unit normals towards the camera of depth (H, W), NaN at the border, in holes and at edges."""
    height, width = depth_m.shape
    v, u = np.mgrid[:height, :width] + 0.5
    points = lift(np.stack([u, v, depth_m], -1).astype(np.float64), K)
    normals = np.full((height, width, 3), np.nan)
    across, down = points[1:-1, 2:] - points[1:-1, :-2], points[2:, 1:-1] - points[:-2, 1:-1]
    cross = np.cross(down, across)
    smooth = (np.abs(across[..., 2]) < 0.02) & (np.abs(down[..., 2]) < 0.02)
    length = np.linalg.norm(cross, axis=-1, keepdims=True)
    normals[1:-1, 1:-1] = np.where(smooth[..., None], cross / np.where(length > 0, length, np.nan), np.nan)
    return normals


def align_to_surface(
    T: FloatArray,
    model_cam_m: FloatArray,
    depth_m: DepthArray,
    normals: FloatArray,
    K: FloatArray,
    agree_m: float,
    iterations: int = 3,
) -> FloatArray:
    """Adjust T (4, 4) so that the visible points of the object lie on the measured surface.

    `model_cam_m` (n, 3) are points of the first frame, `depth_m` (H, W) and `normals` (H, W, 3) the current frame.
    Points farther than `agree_m` from the surface count as hidden.

    Source: point-to-plane with projective association, Chen & Medioni 1992; Newcombe et al. 2011 (KinectFusion).
    """
    for _ in range(iterations):
        moved = apply_pose(T, model_cam_m)
        uvz = project(moved, K)
        depth = depth_at(depth_m, uvz[:, :2])
        near = np.flatnonzero(np.abs(depth - uvz[:, 2]) < agree_m)
        normal = normals[uvz[near, 1].astype(int), uvz[near, 0].astype(int)]
        near, normal = near[np.isfinite(normal[:, 0])], normal[np.isfinite(normal[:, 0])]
        if len(near) < MIN_SURFACE_POINTS:
            return T
        target = lift(np.concatenate([uvz[near, :2], depth[near, None]], -1), K)
        T = _plane_step(moved[near], target, normal) @ T
    return T


def _plane_step(points: FloatArray, targets: FloatArray, normals: FloatArray) -> FloatArray:
    """Small motion towards the planes at the targets, in the directions that the surface determines."""
    from scipy.spatial.transform import Rotation

    centre = points.mean(0)
    size = max(float(np.sqrt(((points - centre) ** 2).sum(-1).mean())), 1e-6)
    jacobian = np.concatenate([np.cross((points - centre) / size, normals), normals], -1)
    residual = ((targets - points) * normals).sum(-1)
    values, directions = np.linalg.eigh(jacobian.T @ jacobian)
    shares = np.where(values > MIN_EIGENVALUE * values.max(), 1 / np.maximum(values, 1e-12), 0.0)
    twist = directions @ (shares * (directions.T @ (jacobian.T @ residual)))
    turn = Rotation.from_rotvec(twist[:3] / size).as_matrix()
    return make_pose(turn, centre + twist[3:] - turn @ centre)


def fit_reprojection(
    T: FloatArray,
    points_cam_m: FloatArray,
    uvz: FloatArray,
    K: FloatArray,
    sigma_px: float,
    sigma_m: float,
    iterations: int = 5,
) -> FloatArray:
    """Pose (4, 4) with the least robust sum of squared errors in the image and in depth, each by its own deviation.

        cost = sum_i log(1 + r_i^2),    r_i^2 = |uv(T X_i) - uv_i|^2 / sigma_px^2 + (z(T X_i) - z_i)^2 / sigma_m^2

    `T` (4, 4) is the start, `points_cam_m` (n, 3) X in the first frame, `uvz` (n, 3) where they are now.

    Source: iteratively reweighted Gauss-Newton with Cauchy weights 1 / (1 + r^2).
    """
    from scipy.spatial.transform import Rotation

    scale = np.array([1 / sigma_px, 1 / sigma_px, 1 / sigma_m])
    for _ in range(iterations):
        moved = apply_pose(T, points_cam_m)
        residual = (uvz - project(moved, K)) * scale
        weight = 1 / (1 + (residual**2).sum(-1))
        good = np.isfinite(weight)
        centre = moved[good].mean(0)
        jacobian = _by_twist(moved[good], centre, K) * scale[:, None]
        weighted = jacobian * weight[good, None, None]
        normal = np.einsum("nij,nik->jk", weighted, jacobian)
        right = np.einsum("nij,ni->j", weighted, residual[good])
        twist = np.linalg.solve(normal + DAMPING * normal.max() * np.eye(6), right)
        turn = Rotation.from_rotvec(twist[:3]).as_matrix()
        T = make_pose(turn, centre + twist[3:] - turn @ centre) @ T
    return T


def _by_twist(points: FloatArray, centre: FloatArray, K: FloatArray) -> FloatArray:
    """(n, 3, 6) derivatives of u, v, z of points by a turn about a centre and a translation."""
    x, y, z = points.T
    zero, one = np.zeros_like(z), np.ones_like(z)
    by_point = np.stack(
        [
            np.stack([K[0, 0] / z, zero, -K[0, 0] * x / z**2], -1),
            np.stack([zero, K[1, 1] / z, -K[1, 1] * y / z**2], -1),
            np.stack([zero, zero, one], -1),
        ],
        -2,
    )
    a, b, c = (points - centre).T
    # d(w x p) = -[p]_x dw
    by_turn = np.stack([np.stack([zero, c, -b], -1), np.stack([-c, zero, a], -1), np.stack([b, -a, zero], -1)], -2)
    return np.concatenate([by_point @ by_turn, by_point], -1)


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
