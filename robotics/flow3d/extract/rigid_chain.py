"""Tracks an object as one rigid body, by optical flow and depth of its visible points.

Points hidden by a hand move along with the rest. Frame-to-frame motion drifts, so each pose is corrected twice: against
the first frame, warped to where the object is now (`correct_texture`), and against the measured surface
(`correct_surface`, point-to-plane).

Source: Kabsch in RANSAC, then Gauss-Newton on pixels and depth with Cauchy weights; point-to-plane with projective
association, Chen & Medioni 1992, Newcombe et al. 2011 (KinectFusion).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from mmrl.fields import bounded
from robotics.flow3d.clouds import FAR_M, depth_points, normals_towards
from robotics.flow3d.extract.backends import Tracks
from robotics.flow3d.extract.camera import grey_frames, klt_step
from robotics.flow3d.extract.depth import depth_noise_m, resting_depth
from robotics.flow3d.extract.simulated import rigid_tracks
from robotics.flow3d.geometry import (
    EDGE_M,
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
from robotics.flow3d.video import RejectedVideo, RgbdVideo

MIN_EIGENVALUE, NOISY_EIGENVALUE = 0.02, 0.1
"""Fraction of the largest eigenvalue below which the surface does not determine a motion, like the rotation of a round
object about its axis; in these directions the pose stays as it is. The second one is for noisy depth."""
MIN_SURFACE_POINTS = 12
"""With fewer visible points the pose stays as it is."""
DAMPING = 1e-6
"""Damping of the normal equations, as a fraction of their largest entry."""
SIGMA_PX = 0.5
"""Standard deviation of optical flow."""
SMOOTH_M = 0.002
"""With more depth noise, normals from neighbouring pixels are meaningless, so planes are fitted to more of them."""
PLANE_PIXELS, PLANE_MARGIN_PX = 30, 12
"""Pixels that a plane is fitted to, and the border around the object in which planes are fitted."""
LEAST_SUPPORT = 0.7
"""Fraction of the previous pose's support that a new pose must have."""
MIN_POINTS = 6
"""Minimum number of points to fit a motion to."""


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
    there = depth_points(depth_m, K)[0].reshape(-1, 3)
    back = project(apply_pose(inverse_pose(T), there), K)
    # OpenCV's first pixel center is at 0, ours at 0.5; holes go far outside the image, where nothing is inside the mask
    at = np.nan_to_num(back[:, :2] - 0.5, nan=-9.0, posinf=-9.0, neginf=-9.0).clip(-9, 2**14).astype(np.float32)
    uv = at.reshape(height, width, 2)
    colours = cv2.remap(first, uv[..., 0], uv[..., 1], cv2.INTER_LINEAR)
    inside = cv2.remap(mask.astype(np.uint8), uv[..., 0], uv[..., 1], cv2.INTER_NEAREST) > 0
    agrees = np.abs(depth_at(first_depth_m, at.astype(np.float64) + 0.5) - back[:, 2]) < agree_m
    return np.where(inside & agrees.reshape(height, width), colours, now).astype(np.uint8)


def surface_normals(depth_m: DepthArray, K: FloatArray) -> FloatArray:
    """(H, W, 3) unit normals towards the camera of depth (H, W), NaN at the border, in holes and at edges."""
    height, width = depth_m.shape
    points, _ = depth_points(depth_m, K)
    normals = np.full((height, width, 3), np.nan)
    # central differences: over two pixels, noise of the depth tilts a normal half as much
    across, down = points[1:-1, 2:] - points[1:-1, :-2], points[2:, 1:-1] - points[:-2, 1:-1]
    # in this order the normal points to the camera: x right, y down, z forward
    cross = np.cross(down, across)
    # a larger step in depth is an edge between two surfaces, not a slope
    smooth = (np.abs(across[..., 2]) < 0.02) & (np.abs(down[..., 2]) < 0.02)
    # NaN holes make NaN normals, which the alignment drops
    length = np.linalg.norm(cross, axis=-1, keepdims=True)
    normals[1:-1, 1:-1] = np.where(smooth[..., None], cross / np.where(length > 0, length, np.nan), np.nan)
    return normals


def fitted_normals(depth_m: DepthArray, K: FloatArray, uv_px: FloatArray, noise_m: float) -> FloatArray:
    """(H, W, 3) normals as of `surface_normals` of noisy depth, only around pixels (n, 2), from planes through many."""
    import cv2

    height, width = depth_m.shape
    normals, uv = np.full((height, width, 3), np.nan), uv_px[np.isfinite(uv_px[:, 0])]
    points, known = depth_points(depth_m, K)
    # an object that left the image has an empty box
    low, high = uv.min(0, initial=width + height) - PLANE_MARGIN_PX, uv.max(0, initial=0) + PLANE_MARGIN_PX + 1
    left, top, right, bottom = np.clip([*low, *high], 0, [width, height] * 2).astype(int)
    box = np.s_[top:bottom, left:right]
    if known[box].sum() < PLANE_PIXELS:
        return normals
    inside = np.full((*known[box].shape, 3), np.nan)
    inside[known[box]] = normals_towards(points[box][known[box]], np.zeros(3), PLANE_PIXELS)
    # a larger step between neighbours than noise explains is an edge between two surfaces
    filled, square = np.where(known, depth_m, np.float32(FAR_M))[box], np.ones((3, 3), np.uint8)
    step = np.asarray(cv2.dilate(filled, square)) - np.asarray(cv2.erode(filled, square))
    normals[box] = np.where((step > max(2 * EDGE_M, 6 * noise_m))[..., None], np.nan, inside)
    return normals


def align_to_surface(
    T: FloatArray,
    model_cam_m: FloatArray,
    depth_m: DepthArray,
    normals: FloatArray,
    K: FloatArray,
    agree_m: float,
    iterations: int = 3,
    min_eigenvalue: float = MIN_EIGENVALUE,
) -> FloatArray:
    """Adjust T (4, 4) so that the visible points of the object are on the measured surface.

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
        # no normal at edges and holes, so nothing to align to there
        near, normal = near[np.isfinite(normal[:, 0])], normal[np.isfinite(normal[:, 0])]
        if len(near) < MIN_SURFACE_POINTS:
            return T
        # projective association: the measured point on the same ray, without a search for the nearest one
        target = lift(np.concatenate([uvz[near, :2], depth[near, None]], -1), K)
        T = _plane_step(moved[near], target, normal, min_eigenvalue) @ T
    return T


def _plane_step(points: FloatArray, targets: FloatArray, normals: FloatArray, min_eigenvalue: float) -> FloatArray:
    """Small motion towards the planes at the targets, in the directions that the surface determines."""
    from scipy.spatial.transform import Rotation

    centre = points.mean(0)
    # turns in units of the object's size, so that eigenvalues of turns and shifts can be compared
    size = max(float(np.sqrt(((points - centre) ** 2).sum(-1).mean())), 1e-6)
    # point-to-plane error: only the part along the normal counts, so the points may slide on the surface
    jacobian = np.concatenate([np.cross((points - centre) / size, normals), normals], -1)
    residual = ((targets - points) * normals).sum(-1)
    values, directions = np.linalg.eigh(jacobian.T @ jacobian)
    # a pseudo-inverse: no step in directions that the surface leaves open, in which open3d's ICP drifts
    shares = np.where(values > min_eigenvalue * values.max(), 1 / np.maximum(values, 1e-12), 0.0)
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
        # a point without a projection (NaN) has no residual
        good = np.isfinite(weight)
        centre = moved[good].mean(0)
        # turned about the object's center: about the camera, turns and shifts would be almost the same
        jacobian = _by_twist(moved[good], centre, K) * scale[:, None]
        weighted = jacobian * weight[good, None, None]
        normal = np.einsum("nij,nik->jk", weighted, jacobian)
        right = np.einsum("nij,ni->j", weighted, residual[good])
        # damped, since few points or a plane leave directions without any curvature
        twist = np.linalg.solve(normal + DAMPING * normal.max() * np.eye(6), right)
        turn = Rotation.from_rotvec(twist[:3]).as_matrix()
        # the step applies in the camera frame, after T
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
    """Maximum depth difference of a visible point; None = 8 mm, or three standard deviations of the noise if that is
    more."""
    inlier_m: float | None = bounded(None, above=0)
    """Maximum distance of a point that fits a motion; None = 6 mm, or three standard deviations of the noise if that is
    more."""
    iterations: int = bounded(60, at_least=1)
    """Number of triples that RANSAC tries."""
    most_points: int = bounded(400, at_least=4)
    """Maximum number of object pixels to follow."""
    window_px: int = bounded(11, at_least=3)
    """Patch size of optical flow."""
    levels: int = bounded(3, at_least=0)
    """Pyramid levels of optical flow."""
    forward_backward_px: float = bounded(0.7, above=0)
    """A point is dropped if tracking it back misses its start by more than this."""
    correct_texture: bool = True
    """Also compare each frame with the first one, which stops the drift of textured objects."""
    correct_surface: bool = True
    """Align the points with the measured surface."""
    most_lost: float = bounded(0.5, at_least=0, at_most=1)
    """Reject the video if a larger fraction of its frames has too few points."""

    def track(self, video: RgbdVideo, mask: BoolArray, uv_px: FloatArray) -> Tracks:
        """Follow points; see `Tracker`."""
        noise = depth_noise_m(video.known_depth_m)
        chain = _Chain(self, video, mask, noise)
        poses, lost = chain.poses()
        # the first frame has no motion that could be lost
        share = lost / (len(video) - 1)
        if share > self.most_lost:
            raise RejectedVideo("lost_track", f"too few points in {100 * share:.0f}% of the frames")
        tracks = rigid_tracks(video, uv_px, poses[:, None], max(0.01, chain.agree_m), chain.rest_m)
        tracks.quality.update(lost_frames=share, depth_noise_m=noise)
        return tracks


class _Chain:
    """One object in one video; T (4, 4) is its motion since the first frame, in the camera frame."""

    def __init__(self, settings: RigidChain, video: RgbdVideo, mask: BoolArray, noise_m: float) -> None:
        self.settings = settings
        self.mask = mask
        self.noise_m = noise_m
        self.K = video.intrinsics_px
        self.depth_m = video.known_depth_m
        self.grey = grey_frames(video.rgb)
        self.agree_m = max(0.008, 3 * noise_m) if settings.agree_m is None else settings.agree_m
        self.inlier_m = max(0.006, 3 * noise_m) if settings.inlier_m is None else settings.inlier_m
        # the model is made from the first frame, whose noise would otherwise be in every pose
        self.rest_m = resting_depth(self.depth_m, 4 * noise_m)
        self.model = lift(_model(mask, self.rest_m, settings.most_points), self.K)
        # one fixed stream per video: the same video always gives the same clip
        self.rng = np.random.default_rng(0)

    def poses(self) -> tuple[FloatArray, int]:
        """(L, 4, 4) motions since the first frame, and the number of frames with too few points."""
        T = np.eye(4)
        poses = [np.eye(4)]
        lost = 0
        for frame in range(1, len(self.grey)):
            seen, uv = self._visible(T, frame - 1, self.agree_m)
            there, good = self._follow(self.grey[frame - 1], frame, uv, self.settings.levels)
            moved = self._fit(seen[good], there[good], frame)
            # the pose then stays where it was; a video with too many such frames is rejected
            lost += moved is None
            T = self._supported(T, moved, frame)
            if self.settings.correct_texture:
                T = self._against_first(T, frame)
            if self.settings.correct_surface:
                T = self._against_surface(T, frame)
            # the order matters: the step by flow brings the object close enough for the two corrections to find it
            poses.append(T)
        return np.stack(poses), lost

    def _against_first(self, T: FloatArray, frame: int) -> FloatArray:
        """Correct the drift of T by flow from the first frame, warped to T, so that flow only has to find the error."""
        now = self.grey[frame]
        depth_m = self.depth_m[frame]
        reach = 2 * self.agree_m
        expected = warped_image(T, self.grey[0], self.mask, self.depth_m[0], now, depth_m, self.K, reach)
        seen, uv = self._visible(T, frame, reach)
        # no pyramid: the warped frame leaves only the error, which is smaller than the window
        there, good = self._follow(expected, frame, uv, levels=0)
        # a longer correction would mean that the warped frame was wrong
        near = good & (np.linalg.norm(there - uv, axis=-1) < self.settings.window_px / 2)
        return self._supported(T, self._fit(seen[near], there[near], frame), frame)

    def _against_surface(self, T: FloatArray, frame: int) -> FloatArray:
        """T aligned with the measured surface."""
        depth_m = self.depth_m[frame]
        align = partial(align_to_surface, T, self.model, depth_m, K=self.K, agree_m=self.agree_m)
        if self.noise_m < SMOOTH_M:
            return align(normals=surface_normals(depth_m, self.K))
        uv = project(apply_pose(T, self.model), self.K)[:, :2]
        normals = fitted_normals(depth_m, self.K, uv, self.noise_m)
        return self._supported(T, align(normals=normals, min_eigenvalue=NOISY_EIGENVALUE), frame)

    def _supported(self, T: FloatArray, other: FloatArray | None, frame: int) -> FloatArray:
        """The other pose, unless the depth image contradicts it: optical flow may have followed a hand instead."""
        if other is None:
            return T
        kept, found = (self._support(pose, frame) for pose in (T, other))
        # kept - 1 is for a negative `kept`, a fraction of which would demand more than `kept` itself
        return other if found >= min(LEAST_SUPPORT * kept, kept - 1) else T

    def _support(self, T: FloatArray, frame: int) -> int:
        """Number of visible points at T, minus those in front of the measured surface, which cannot be there."""
        uvz = project(apply_pose(T, self.model), self.K)
        behind = depth_at(self.depth_m[frame], uvz[:, :2]) - uvz[:, 2]
        # the camera sees past such a point, so the object cannot be there; points behind the surface are only hidden
        return int((np.abs(behind) < self.agree_m).sum() - (behind > self.agree_m).sum())

    def _visible(self, T: FloatArray, frame: int, agree_m: float) -> tuple[IndexArray, FloatArray]:
        """Indices (k,) of the model points that are visible at T, and their pixels (k, 2)."""
        uvz = project(apply_pose(T, self.model), self.K)
        seen = np.flatnonzero(np.abs(depth_at(self.depth_m[frame], uvz[:, :2]) - uvz[:, 2]) < agree_m)
        return seen, uvz[seen, :2]

    def _follow(self, before: ImageArray, frame: int, uv: FloatArray, levels: int) -> tuple[FloatArray, BoolArray]:
        settings = self.settings
        return klt_step(before, self.grey[frame], uv, settings.window_px, levels, settings.forward_backward_px)

    def _fit(self, points: IndexArray, uv: FloatArray, frame: int) -> FloatArray | None:
        """T that takes model points (k,) to pixels (k, 2) of a frame; None with too few points."""
        depth = depth_at(self.depth_m[frame], uv)
        known = np.isfinite(depth)
        if known.sum() < MIN_POINTS:
            return None
        uvz = np.concatenate([uv, depth[:, None]], -1)[known]
        source, target = self.model[points[known]], lift(uvz, self.K)
        # RANSAC removes points on a hand; the refit then weighs pixels and depth by their own noise
        T = ransac_kabsch(source, target, tolerance_m=self.inlier_m, iterations=self.settings.iterations, rng=self.rng)
        fits = np.linalg.norm(apply_pose(T, source) - target, axis=-1) < self.inlier_m
        if fits.sum() < MIN_POINTS:
            return None
        return fit_reprojection(T, source[fits], uvz[fits], self.K, SIGMA_PX, self.inlier_m / 3)


def _model(mask: BoolArray, depth_m: DepthArray, most: int) -> FloatArray:
    """(n, 3) u, v, z of pixels of the object that have a depth, evenly thinned."""
    # pixels without a depth cannot be lifted
    rows, columns = np.nonzero(mask & np.isfinite(depth_m))
    if len(rows) < MIN_POINTS:
        raise RejectedVideo("holed_depth", f"only {len(rows)} pixels of the object have a depth")
    # every n-th pixel in scan order: spread over the whole mask, and the same on each run
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
    rows, columns = rows[chosen], columns[chosen]
    return np.stack([columns + 0.5, rows + 0.5, depth_m[rows, columns].astype(np.float64)], -1)
