"""How far a predicted flow is from the true one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import angle_rad

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEAR_M = 0.05
"""Distance within which a point counts as right."""


def flow_metrics(
    predicted_m: NDArray[np.float64], true_m: NDArray[np.float64], visible: NDArray[np.float64] | None = None
) -> dict[str, float]:
    """Errors of one flow.

    Args:
        predicted_m: (T, n, 3).
        true_m: (T, n, 3).
        visible: (T, n); points above 0.5 are visible. All are when None.

    Returns:
        ade_m and fde_m, mean distance over all frames and in the last one; the same over visible points as
        ade_visible_m and fde_visible_m, NaN where there are none; acc_5cm, the share of points of all frames within
        5 cm.

    Source: ADE and FDE as in michaelyuancb/general_flow.
    """
    if predicted_m.shape != true_m.shape or predicted_m.ndim != 3 or predicted_m.shape[-1] != 3:
        raise UserError(f"predicted flow {predicted_m.shape} and true flow {true_m.shape} must both be (T, n, 3)")
    distance = np.linalg.norm(predicted_m - true_m, axis=-1)
    seen = np.ones(distance.shape, np.bool_) if visible is None else np.asarray(visible) > 0.5
    return {
        "ade_m": float(distance.mean()),
        "fde_m": float(distance[-1].mean()),
        "ade_visible_m": _mean(distance[seen]),
        "fde_visible_m": _mean(distance[-1][seen[-1]]),
        "acc_5cm": float((distance < NEAR_M).mean()),
    }


def best_of(metrics: list[dict[str, float]], key: str = "ade_m") -> dict[str, float]:
    """The metrics of the best of K guesses, which is the one with the least error in `key`."""
    return min(metrics, key=lambda each: each[key])


def rotation_errors_rad(fitted: NDArray[np.float64], true: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T,) angles between fitted and true motions (T, 4, 4)."""
    return angle_rad(fitted, true)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
