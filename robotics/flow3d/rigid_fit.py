"""The rigid motion that takes some points to others, also where part of them is wrong.

Flow of a whole object is one rigid motion a frame. The least-squares motion has a closed form (Kabsch); points on the
background, or that a model got wrong, pull it away, so the default weighs points by how well they fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.geometry import apply_pose, make_pose

if TYPE_CHECKING:
    from numpy.typing import NDArray

FLAT = 1e-5
"""Points lie on a line where their second singular value is below this share of the first, or of a metre."""
LOW_WEIGHT = 0.3
"""Below this median weight the least-squares start was no good."""


@dataclass(frozen=True)
class RigidFit:
    """Motions fitted to a flow."""

    T_t_0: NDArray[np.float64]
    """(T, 4, 4) from the first positions to those of each frame."""
    weights: NDArray[np.float64]
    """(T, n) in 0..1: how much a point counted."""
    rmse_m: NDArray[np.float64]
    """(T,) weighted root mean square distance between moved and given points."""
    degenerate: NDArray[np.bool_]
    """(T,) whether the points that counted were too few or lay on a line, so that only a translation was fitted."""


def kabsch(
    source_m: NDArray[np.float64], target_m: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """Rigid motion with the least weighted sum of squared distances, batched over leading dimensions.

    Source:
        Kabsch 1976, with the sign of the determinant as in Umeyama 1991, eq. 40 to 42.
    """
    leading = np.broadcast_shapes(source_m.shape[:-1], target_m.shape[:-1])
    w = np.broadcast_to(np.ones(leading) if weights is None else weights, leading)[..., None]
    total = w.sum(-2, keepdims=True)
    share = w / np.where(total > 0, total, 1.0)
    mean_source, mean_target = (share * source_m).sum(-2), (share * target_m).sum(-2)
    centred = source_m - mean_source[..., None, :]
    U, _, Vt = np.linalg.svd(np.swapaxes(centred * w, -1, -2) @ (target_m - mean_target[..., None, :]))
    V = np.swapaxes(Vt, -1, -2)
    V[..., 2] *= np.sign(np.linalg.det(V @ np.swapaxes(U, -1, -2)))[..., None]
    rotation = V @ np.swapaxes(U, -1, -2)
    rotation = np.where(_on_a_line(centred * np.sqrt(share))[..., None, None], np.eye(3), rotation)
    T = make_pose(rotation, mean_target - (rotation @ mean_source[..., None])[..., 0])
    return np.where(total > 0, T, np.eye(4))


def robust_kabsch(
    source_m: NDArray[np.float64],
    target_m: NDArray[np.float64],
    weights: NDArray[np.float64] | None = None,
    *,
    scale_m: float = 0.01,
    iterations: int = 5,
    rng: np.random.Generator | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Rigid motions that points far off hardly change: least squares with Cauchy weights, again and again.

    Args:
        source_m: (n, 3).
        target_m: (n, 3), or (T, n, 3) for T motions.
        weights: (n,) or (T, n) at least 0, such as visibility; None for equal ones.
        scale_m: distance at which a point counts half; 0.01 for measured flow, 0.03 for that of a model.
        iterations: of weighing and fitting.
        rng: for the random start that is tried where half of the points do not fit; None for seed 0.

    Returns:
        (4, 4) and the weights (n,) that the points had last, or (T, 4, 4) and (T, n).

    Source:
        Iteratively reweighted least squares, w = 1 / (1 + (e / s)^2).
    """
    targets = target_m.reshape(-1, *source_m.shape)
    given = np.broadcast_to(1.0 if weights is None else weights, targets.shape[:-1])
    rng = np.random.default_rng(0) if rng is None else rng
    T, cauchy = _reweighted(source_m, targets, given, kabsch(source_m, targets, given), scale_m, iterations)
    for row, (target, own) in enumerate(zip(targets, given, strict=True)):
        counted = own > 0
        if counted.sum() < 3 or np.median(cauchy[row, counted]) >= LOW_WEIGHT:
            continue
        start = ransac_kabsch(source_m, target, own, tolerance_m=1.5 * scale_m, rng=rng)
        other, others = _reweighted(source_m, target, own, start, scale_m, iterations)
        if (own * others).sum() > (own * cauchy[row]).sum():
            T[row], cauchy[row] = other, others
    used = given * cauchy
    return (T[0], used[0]) if target_m.ndim == 2 else (T, used)


def ransac_kabsch(
    source_m: NDArray[np.float64],
    target_m: NDArray[np.float64],
    weights: NDArray[np.float64] | None = None,
    *,
    tolerance_m: float = 0.015,
    iterations: int = 100,
    rng: np.random.Generator | None = None,
) -> NDArray[np.float64]:
    """Rigid motion of three points that most of the others agree with, fitted to those.

    Returns:
        (4, 4); that of `kabsch` where fewer than three points count.
    """
    given = np.ones(len(source_m)) if weights is None else weights
    usable = np.flatnonzero(given > 0)
    if len(usable) < 3:
        return kabsch(source_m, target_m, given)
    rng = np.random.default_rng(0) if rng is None else rng
    threes = np.stack([rng.choice(usable, 3, replace=False) for _ in range(iterations)])
    agree = given * (_distances(kabsch(source_m[threes], target_m[threes]), source_m, target_m) < tolerance_m)
    return kabsch(source_m, target_m, agree[agree.sum(-1).argmax()])


def fit_motions(
    source_m: NDArray[np.float64],
    flow_m: NDArray[np.float64],
    visible: NDArray[np.float64] | None = None,
    *,
    robust: bool = True,
    scale_m: float = 0.01,
) -> RigidFit:
    """Motion of an object in each frame of a flow.

    Args:
        source_m: (n, 3) observed points.
        flow_m: (T, n, 3) where they are in each frame.
        visible: (T, n) weights at least 0, such as visibility; None for equal ones. A frame in which fewer than three
            points have a weight takes all of them.
        robust: weigh points by how well they fit; False for least squares.
        scale_m: see `robust_kabsch`.
    """
    own = np.ones(flow_m.shape[:2]) if visible is None else np.asarray(visible, dtype=np.float64)
    own = np.where((own > 0).sum(-1, keepdims=True) >= 3, own, 1.0)
    if robust:
        T, used = robust_kabsch(source_m, flow_m, own, scale_m=scale_m)
    else:
        T, used = kabsch(source_m, flow_m, own), own
    squared = ((apply_pose(T, source_m) - flow_m) ** 2).sum(-1)
    total = np.maximum(used.sum(-1), 1e-12)
    centred = source_m - (used @ source_m / total[:, None])[:, None]
    shares = np.sqrt(used / total[:, None])[..., None]
    degenerate = _on_a_line(centred * shares)
    return RigidFit(T, used, np.sqrt((used * squared).sum(-1) / total), degenerate)


def _reweighted(
    source_m: NDArray[np.float64],
    target_m: NDArray[np.float64],
    given: NDArray[np.float64],
    T: NDArray[np.float64],
    scale_m: float,
    iterations: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Motions (..., 4, 4) from a first guess T, and the weights (..., n) that the points had beside the given ones."""
    cauchy = np.ones(target_m.shape[:-1])
    for _ in range(iterations):
        cauchy = 1 / (1 + (_distances(T, source_m, target_m) / scale_m) ** 2)
        T = kabsch(source_m, target_m, given * cauchy)
    return T, cauchy


def _distances(
    T: NDArray[np.float64], source_m: NDArray[np.float64], target_m: NDArray[np.float64]
) -> NDArray[np.float64]:
    distance: NDArray[np.float64] = np.linalg.norm(apply_pose(T, source_m) - target_m, axis=-1)
    return distance


def lies_on_a_line(points_m: NDArray[np.float64]) -> bool:
    """Whether points (n, 3) are too few or lie so that they do not determine a rotation."""
    return len(points_m) < 3 or bool(_on_a_line((points_m - points_m.mean(0)) / np.sqrt(len(points_m))))


def _on_a_line(centred: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether centred points (..., n, 3), each times the root of its share, do not determine a rotation: (...)."""
    if centred.shape[-2] < 3:
        return np.ones(centred.shape[:-2], dtype=np.bool_)
    sizes = np.linalg.svd(centred, compute_uv=False)
    found: NDArray[np.bool_] = sizes[..., 1] <= FLAT * np.maximum(sizes[..., 0], 1.0)
    return found
