"""How far a predicted flow is from the true one, in centimetres of the camera frame and degrees.

Shapes: K guesses, T frames, N x N points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.geometry import lift
from robotics.flow3d.metrics import best_of, flow_metrics, rotation_errors_rad
from robotics.flow3d.rigid_fit import fit_motions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import FlowClip

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
    found = lift(predicted[..., :VISIBLE], clip.observation.K).reshape(len(predicted), len(clip.flow), -1, 3)
    true, start = clip.flow_cam_m, clip.points_cam_m
    each = [flow_metrics(guess, true, clip.visible) for guess in found]
    still = flow_metrics(np.broadcast_to(start, true.shape), true)

    def mean(name: str, factor: float = 100.0) -> float:
        return factor * float(np.mean([metrics[name] for metrics in each]))

    return FlowErrors(
        ade_cm=mean("ade_m"),
        fde_cm=mean("fde_m"),
        ade_visible_cm=mean("ade_visible_m"),
        fde_visible_cm=mean("fde_visible_m"),
        best_ade_cm=100 * best_of(each)["ade_m"],
        within_5cm=mean("acc_5cm", 1.0),
        rotation_deg=_rotation_deg(start, found[:, -1], true[-1]),
        zero_motion_ade_cm=100 * still["ade_m"],
        zero_motion_fde_cm=100 * still["fde_m"],
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
    return float(np.degrees(rotation_errors_rad(np.stack(fitted), wanted)).mean())
