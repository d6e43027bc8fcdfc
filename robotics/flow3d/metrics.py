"""Errors of predicted flow."""

from __future__ import annotations

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import FloatArray

NEAR_M = 0.05
"""Distance within which a point counts as correct."""


def flow_metrics(predicted_m: FloatArray, true_m: FloatArray, visible: FloatArray | None = None) -> dict[str, float]:
    """Errors of one flow (T, n, 3): ade_m and fde_m, the mean distance over all frames and in the last one.

    Also over visible points, those above 0.5 in `visible` (T, n), as ade_visible_m and fde_visible_m, NaN without any,
    and acc_5cm, the share of points of all frames within 5 cm.

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


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else float("nan")
