"""Verifiers: the protocol, and those that need no model or images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mmrl.fields import bounded, check_config
from robotics.flow3d.geometry import FloatArray, ImageArray, angle_rad
from robotics.flow3d.rigid_motion import ObjectMotion


@dataclass(frozen=True)
class Verdict:
    """A judgement of a plan."""

    ok: bool | None
    """Whether the plan does the task; None if it could not be judged, for example because a server is down."""
    score: float
    """0 to 1; among rejected plans the highest score wins."""
    reason: str
    """Explanation in a sentence."""


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a plan that its images do not show."""

    motion: ObjectMotion
    """Motion of the object."""
    support_z_m: float | None = None
    """Height of the support."""
    reachable: Callable[[], bool] | None = None
    """Whether the arm can do the motion with any grasp; slow, so call it only if needed."""


class Verifier(Protocol):
    """Judges the predicted outcome of a plan."""

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Judge a plan by the image now and the rendered outcome from the same camera, (H, W, 3) each."""


class AlwaysVerifier:
    """Accepts every plan."""

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Accept; see `Verifier`."""
        return Verdict(True, 1.0, "not checked")


class PredicateVerifier:
    """Calls `predicate` with the object's motion (4, 4) to the end of the plan, in the world frame."""

    def __init__(self, predicate: Callable[[FloatArray], Any]) -> None:
        self.predicate = predicate

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Call the predicate; see `Verifier`."""
        ok = bool(self.predicate(meta.motion.T_t_0_world[-1]))
        return Verdict(ok, float(ok), "the predicate holds" if ok else "the predicate does not hold")


def closeness(error: float) -> float:
    """Score of a check: 1 up to an error of one tolerance, then its inverse."""
    return 1 / max(error, 1.0)


def judged(verifier: Verifier, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
    """Call a verifier; an error or an invalid result becomes a verdict without judgement."""
    try:
        verdict = verifier.verify(before, after, instruction, meta)
    except Exception as error:  # user code and models; the loop must end cleanly
        return Verdict(None, 0.0, f"{type(verifier).__name__} failed: {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict) or not 0.0 <= verdict.score <= 1.0:
        return Verdict(None, 0.0, f"{type(verifier).__name__} returned {verdict!r}, not a verdict")
    return verdict


@dataclass(frozen=True)
class GeometricLimits:
    """Limits of a plausible plan."""

    rmse_m: float = bounded(0.015, above=0)
    """Weighted root mean square distance of the flow from its rigid motion, in any frame."""
    below_support_m: float = bounded(0.01, at_least=0)
    """Maximum distance of a moved point of the object below its support."""
    low_m: tuple[float, float, float] = (0.0, -0.8, -0.1)
    """Corner of the workspace."""
    high_m: tuple[float, float, float] = (1.0, 0.8, 1.0)
    """Opposite corner."""
    last_step_m: float = bounded(0.05, above=0)
    """Displacement of the object's center in the last step; it should be at rest at the end."""
    step_rad: float = bounded(math.radians(60), above=0)
    """Rotation in one step."""
    least_motion_m: float = bounded(0.01, at_least=0)
    """Minimum mean displacement of the object's points; no task is solved without motion."""


class GeometricVerifier:
    """Judges by geometry alone; the score is the mean of the checks' `closeness`.

    Args:
        limits: limits of a plausible plan.
        reachable: also check that the arm can do it with any grasp.
    """

    def __init__(self, limits: GeometricLimits | None = None, *, reachable: bool = True) -> None:
        self.limits = limits or GeometricLimits()
        self.reachable = reachable
        check_config(self.limits, "limits")

    def verify(self, before: ImageArray, after: ImageArray, instruction: str, meta: PlanFacts) -> Verdict:
        """Check the motion; see `Verifier`."""
        errors = self._errors(meta)
        # the search for a path is slow, so only a motion that passes all other checks is worth it
        if self.reachable and meta.reachable is not None and max(errors.values()) <= 1:
            errors["out of reach with every grasp"] = _unless(meta.reachable())
        # negated, so that NaN fails
        failed = [name for name, error in errors.items() if not error <= 1]
        score = sum(closeness(error) for error in errors.values()) / len(errors)
        return Verdict(not failed, score, "; ".join(failed) or "all checks hold")

    def _errors(self, meta: PlanFacts) -> dict[str, float]:
        """Error of each check in units of its limit, by the message for an error above 1."""
        limits, motion = self.limits, meta.motion
        T = np.concatenate([np.eye(4)[None], motion.T_t_0_world])
        moved = motion.moved_world_m
        # the centre of the box, carried along by the mean of the points
        centres = np.concatenate([motion.centre_m[None], moved.mean(1) - moved[0].mean(0) + motion.centre_m])
        motion_m = float(np.linalg.norm(moved - motion.points_world_m, axis=-1).mean(-1).max())
        below_m = -math.inf if meta.support_z_m is None else meta.support_z_m - float(moved[..., 2].min())
        return {
            "not one rigid motion": _over(float(motion.fit.rmse_m.max()), limits.rmse_m),
            "too few points for a rotation": _unless(not motion.fit.degenerate.any()),
            "through the support": _over(below_m, limits.below_support_m),
            "out of the workspace": _from_center(moved, limits.low_m, limits.high_m),
            "still moving at the end": _over(float(np.linalg.norm(centres[-1] - centres[-2])), limits.last_step_m),
            "turns too fast": _over(float(angle_rad(T[:-1], T[1:]).max()), limits.step_rad),
            "hardly moves": 2 - motion_m / limits.least_motion_m if limits.least_motion_m else 0.0,
        }


def _unless(holds: bool) -> float:
    return 0.0 if holds else math.inf


def _over(value: float, limit: float) -> float:
    """A value in units of its upper limit, which may be 0."""
    return value / limit if limit else _unless(value <= 0)


def _from_center(points_m: FloatArray, low_m: Sequence[float], high_m: Sequence[float]) -> float:
    """Maximum distance of points (..., 3) from the center of a box, in units of half its size along each axis."""
    low, high = np.array(low_m), np.array(high_m)
    away = np.abs(points_m - (low + high) / 2).reshape(-1, 3).max(0)
    return max(_over(*pair) for pair in zip(away.tolist(), ((high - low) / 2).tolist(), strict=True))
