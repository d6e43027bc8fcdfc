"""Checks of a plan that need no model: is it one rigid motion, through free space, that an arm can do?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded, check_config
from robotics.flow3d.check.verdict import PlanFacts, Verdict
from robotics.flow3d.geometry import angle_rad

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GeometricLimits", "GeometricVerifier"]


@dataclass(frozen=True)
class GeometricLimits:
    """What a plausible plan keeps to."""

    rmse_m: float = bounded(0.015, above=0)
    """Weighted root mean square distance of the flow from its rigid motion, in any frame."""
    below_support_m: float = bounded(0.01, at_least=0)
    """How far the flow may put points of the object below its support."""
    low_m: tuple[float, float, float] = (0.0, -0.8, -0.1)
    """Corner of the workspace."""
    high_m: tuple[float, float, float] = (1.0, 0.8, 1.0)
    """Opposite corner."""
    last_step_m: float = bounded(0.05, above=0)
    """Way of the object's middle in the last step: at the end it should be at rest."""
    step_rad: float = bounded(math.radians(60), above=0)
    """Turn in one step."""
    least_way_m: float = bounded(0.01, at_least=0)
    """Way or, at the object's edge, turn that a plan has at least; standing still does no task."""


class GeometricVerifier:
    """Judges by geometry alone; the score is the share of checks that hold.

    Args:
        limits: what a plausible plan keeps to.
        reachable: also ask whether the arm can do it with any grasp.
    """

    def __init__(self, limits: GeometricLimits | None = None, *, reachable: bool = True) -> None:
        self.limits, self.reachable = limits or GeometricLimits(), reachable
        check_config(self.limits, "limits")

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Check the motion; see `Verifier`."""
        checks = self._checks(meta)
        if self.reachable and meta.reachable is not None and all(checks.values()):
            checks["out of reach with every grasp"] = meta.reachable()
        failed = [name for name, holds in checks.items() if not holds]
        return Verdict(not failed, 1 - len(failed) / len(checks), "; ".join(failed) or "all checks hold")

    def _checks(self, meta: PlanFacts) -> dict[str, bool]:
        """Each check under the words that are said when it fails."""
        limits, motion = self.limits, meta.motion
        T = np.concatenate([np.eye(4)[None], motion.T_t_0_world])
        moved = motion.moved_world_m
        centres = np.concatenate([motion.centre_m[None], moved.mean(1) - moved[0].mean(0) + motion.centre_m])
        ways = np.linalg.norm(moved - motion.points_world_m, axis=-1).mean(-1)
        inside = ((moved >= limits.low_m) & (moved <= limits.high_m)).all()
        low = -np.inf if meta.support_z_m is None else meta.support_z_m - limits.below_support_m
        return {
            "not one rigid motion": bool(motion.fit.rmse_m.max() <= limits.rmse_m),
            "too few points for a rotation": not motion.fit.degenerate.any(),
            "through the support": bool(moved[..., 2].min() >= low),
            "out of the workspace": bool(inside),
            "still moving at the end": bool(np.linalg.norm(centres[-1] - centres[-2]) <= limits.last_step_m),
            "turns too fast": bool(angle_rad(T[:-1], T[1:]).max() <= limits.step_rad),
            "hardly moves": bool(ways.max() >= limits.least_way_m),
        }
