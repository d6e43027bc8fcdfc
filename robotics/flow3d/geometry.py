"""Cameras, points and rigid motions, in NumPy and batched over leading dimensions.

Pixels are (u right, v down) and the center of the first one is at (0.5, 0.5). The camera frame is OpenCV's: x right,
y down, z forward. Lengths are metres. A rigid motion is a 4 x 4 matrix; `T_a_b` takes points of frame b to frame a.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
ImageArray = NDArray[np.uint8]
"""(..., H, W, 3) colours, or (H, W) grey."""
DepthArray = NDArray[np.float32]
"""(..., H, W) metres along the camera's axis."""
EDGE_M = 0.02
"""Neighbouring depths that differ by more belong to two surfaces."""
RIGID = 1e-2
"""Maximum deviation of a pose's R^T R from the identity, which poses written with two or three digits stay below."""


def intrinsics(
    size_px: tuple[int, int], *, fov_x_rad: float | None = None, fov_y_rad: float | None = None
) -> FloatArray:
    """(3, 3) K in pixels of a pinhole camera with square pixels whose axis goes through the image's center."""
    given = [(angle, side) for angle, side in ((fov_x_rad, size_px[0]), (fov_y_rad, size_px[1])) if angle is not None]
    if len(given) != 1 or not 0 < given[0][0] < math.pi:
        raise UserError(
            f"fov_x_rad is {fov_x_rad}, fov_y_rad is {fov_y_rad}; pass exactly one of them, between 0 and pi"
        )
    angle, side = given[0]
    focal = 0.5 * side / math.tan(angle / 2)
    return np.array([[focal, 0.0, size_px[0] / 2], [0.0, focal, size_px[1] / 2], [0.0, 0.0, 1.0]])


def has_focal(K: FloatArray) -> bool:
    """Whether intrinsics (3, 3) are finite and have focal lengths."""
    return bool(np.isfinite(K).all() and K[0, 0] > 0 and K[1, 1] > 0)


def check_intrinsics(K: FloatArray) -> None:
    """Reject intrinsics (3, 3) that are not those of a camera whose pixels have no skew; raises UserError."""
    if not has_focal(K):
        raise UserError(
            "K must be finite with focal lengths above 0 in pixels; without them pixels cannot be lifted to 3D"
        )
    if not np.allclose([K[0, 1], K[1, 0], *K[2]], [0, 0, 0, 0, 1], atol=1e-6):
        raise UserError(
            f"K is {K.tolist()}; must be [[fx, 0, cx], [0, fy, cy], [0, 0, 1]] in pixels, not its transpose"
        )


def check_poses(T: FloatArray, name: str) -> None:
    """Reject poses (..., 4, 4) that are no rigid motions in metres; raises UserError."""
    R = T[..., :3, :3]
    if not np.isfinite(T).all() or not np.allclose(T[..., 3, :], [0, 0, 0, 1], atol=1e-6):
        raise UserError(
            f"{name} is {T.tolist()}; must be finite, with the last row 0, 0, 0, 1 and metres in the last column"
        )
    if not np.allclose(np.swapaxes(R, -1, -2) @ R, np.eye(3), atol=RIGID) or (np.linalg.det(R) < 0).any():
        raise UserError(f"{name} is {T.tolist()}; its 3 x 3 part must be a right-handed rotation without a scale")


def check_kinds(**entries: NDArray[Any] | None) -> None:
    """Reject depth that is not in floating-point metres and masks that are not bool; raises UserError."""
    for name, value in entries.items():
        if value is None:
            continue
        if name == "depth_m" and not np.issubdtype(value.dtype, np.floating):
            raise UserError(f"{name} is {value.dtype}; must be floats in metres, such as 0.001 * depth of millimetres")
        if name != "depth_m" and value.dtype != bool:
            raise UserError(f"{name} is {value.dtype}; must be bool, such as {name} > 0")


def project(points_cam_m: FloatArray, K: FloatArray) -> FloatArray:
    """Points (..., 3) in the camera frame as u, v in pixels and z in metres; pixels are NaN behind the camera."""
    depth = points_cam_m[..., 2:]
    safe = np.where(depth > 0, depth, np.nan)
    # pixel centres are at .5: the image spans 0..W, which is why K has its centre at W / 2
    pixels = points_cam_m[..., :2] / safe * np.array([K[0, 0], K[1, 1]]) + K[:2, 2]
    return np.concatenate([pixels, depth], -1)


def lift(uvz: FloatArray, K: FloatArray) -> FloatArray:
    """Points (..., 3) in the camera frame of u, v in pixels and z in metres (..., 3); the inverse of `project`."""
    depth = uvz[..., 2:]
    across = (uvz[..., :2] - K[:2, 2]) / np.array([K[0, 0], K[1, 1]]) * depth
    return np.concatenate([across, depth], -1)


def depth_at(depth_m: DepthArray, uv_px: FloatArray, edge_m: float = EDGE_M) -> FloatArray:
    """Depth (...) at pixels (..., 2): bilinear within a surface, of the nearest pixel at edges above `edge_m`.

    0, NaN and infinite values of `depth_m` (H, W) are holes. NaN in holes and outside the image.
    """
    height, width = depth_m.shape
    known = np.where(np.isfinite(depth_m) & (depth_m > 0), depth_m, np.nan).astype(np.float64)
    u, v = uv_px[..., 0], uv_px[..., 1]
    inside = (u >= 0) & (u < width) & (v >= 0) & (v < height)
    # from coordinates with pixel centres at .5 to indices; points outside get a harmless index and NaN below
    x, y = np.where(inside, u, 0.5) - 0.5, np.where(inside, v, 0.5) - 0.5
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    # clipped at the border: a point within half a pixel of the edge has no neighbour beyond it
    columns = np.clip(np.stack([left, left + 1], -1), 0, width - 1)
    rows = np.clip(np.stack([top, top + 1], -1), 0, height - 1)
    # a hole among the four is NaN and makes the mean and the spread NaN, so the nearest pixel is used
    four = known[rows[..., :, None], columns[..., None, :]]
    share_x = np.stack([1 - (x - left), x - left], -1)
    share_y = np.stack([1 - (y - top), y - top], -1)
    mixed = (four * share_y[..., :, None] * share_x[..., None, :]).sum((-2, -1))
    spread = four.max((-2, -1)) - four.min((-2, -1))
    # mixing across an edge would give a depth on neither surface
    nearest = known[np.clip(np.rint(y).astype(int), 0, height - 1), np.clip(np.rint(x).astype(int), 0, width - 1)]
    return np.where(inside, np.where(spread <= edge_m, mixed, nearest), np.nan)


def make_pose(rotation: FloatArray, translation_m: FloatArray) -> FloatArray:
    """(..., 4, 4) of a rotation (..., 3, 3) and a translation (..., 3)."""
    leading = np.broadcast_shapes(rotation.shape[:-2], translation_m.shape[:-1])
    T = np.zeros((*leading, 4, 4))
    # the last row stays 0, 0, 0, 1
    T[..., :3, :3] = rotation
    T[..., :3, 3] = translation_m
    T[..., 3, 3] = 1.0
    return T


def apply_pose(T: FloatArray, points_m: FloatArray) -> FloatArray:
    """Points (..., n, 3) moved by poses (..., 4, 4)."""
    return points_m @ np.swapaxes(T[..., :3, :3], -1, -2) + T[..., None, :3, 3]


def inverse_pose(T: FloatArray) -> FloatArray:
    """Inverse of rigid motions (..., 4, 4)."""
    # a rotation's inverse is its transpose, which is exact
    back = np.swapaxes(T[..., :3, :3], -1, -2)
    return make_pose(back, -(back @ T[..., :3, 3:])[..., 0])


def angle_rad(first: FloatArray, second: FloatArray) -> FloatArray:
    """Angle (...) between two orientations (..., 3, 3) or poses (..., 4, 4)."""
    between = np.swapaxes(first[..., :3, :3], -1, -2) @ second[..., :3, :3]
    # by the chord: the arc cosine of the trace loses all digits near 0
    chord = np.linalg.norm(between - np.eye(3), axis=(-2, -1)) / (2 * math.sqrt(2))
    return 2 * np.arcsin(np.clip(chord, 0.0, 1.0))
