"""How far a predicted flow is from the true one, in centimetres of the camera frame and degrees.

Shapes: K guesses, T frames, N x N points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.geometry import angle_rad, lift
from robotics.flow3d.rigid_fit import fit_motions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

__all__ = ["FlowErrors", "flow_errors", "goal_reached"]

NEAR_CM = 5.0
LEARNED_M = 0.03
"""Scale of the robust fit for flow of a model."""


@dataclass(frozen=True)
class FlowErrors:
    """Errors of K guesses for one clip; means over the guesses where the name does not say otherwise."""

    ade_cm: float
    """Mean distance over all frames and points."""
    fde_cm: float
    """Mean distance in the last frame."""
    ade_visible_cm: float
    """Mean distance over the points that are seen in their frame; NaN where none is."""
    fde_visible_cm: float
    """The same in the last frame."""
    best_ade_cm: float
    """Mean distance of the best guess."""
    within_5cm: float
    """Share of points, over all frames, that are nearer than 5 cm."""
    rotation_deg: float
    """Angle between the rotations of the object to the last frame, fitted to predicted and to true points."""
    zero_motion_ade_cm: float
    """Mean distance if nothing moved, for comparison."""
    zero_motion_fde_cm: float
    """The same in the last frame."""


def flow_errors(predicted: NDArray[np.float64], clip: FlowClip) -> FlowErrors:
    """Compare guesses with a clip.

    Args:
        predicted: (K, T, N, N, 4).
        clip: the truth.

    Returns:
        The errors.
    """
    K = clip.observation.K
    found = lift(predicted[..., :VISIBLE], K).reshape(len(predicted), len(clip.flow), -1, 3)
    true, start = clip.flow_cam_m, clip.points_cam_m
    distance_cm = 100 * np.linalg.norm(found - true, axis=-1)
    still_cm = 100 * np.linalg.norm(start - true, axis=-1)
    seen = clip.visible > 0.5
    return FlowErrors(
        ade_cm=float(distance_cm.mean()),
        fde_cm=float(distance_cm[:, -1].mean()),
        ade_visible_cm=_mean(distance_cm[:, seen]),
        fde_visible_cm=_mean(distance_cm[:, -1][:, seen[-1]]),
        best_ade_cm=float(distance_cm.mean((1, 2)).min()),
        within_5cm=float((distance_cm < NEAR_CM).mean()),
        rotation_deg=_rotation_deg(start, found[:, -1], true[-1]),
        zero_motion_ade_cm=float(still_cm.mean()),
        zero_motion_fde_cm=float(still_cm[-1].mean()),
    )


def goal_reached(end_m: NDArray[np.float64], goals_m: dict[str, list[float]], instruction: str) -> bool:
    """Whether the middle of some points ends nearest to the goal that an instruction names.

    Args:
        end_m: (n, 3) last positions.
        goals_m: (3,) of each instruction of the scene, in the same frame.
        instruction: a key of it.
    """
    names = list(goals_m)
    away = np.linalg.norm(np.array([goals_m[name] for name in names]) - end_m.mean(0), axis=-1)
    return names[int(away.argmin())] == instruction


def _rotation_deg(start: NDArray[np.float64], found: NDArray[np.float64], true: NDArray[np.float64]) -> float:
    wanted = fit_motions(start, true[None]).T_t_0[0]
    fitted = [fit_motions(start, guess[None], scale_m=LEARNED_M).T_t_0[0] for guess in found]
    return float(np.degrees([angle_rad(T, wanted) for T in fitted]).mean())


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else math.nan
