"""Verifiers: the protocol, and those that need no model or images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from robotics.flow3d.geometry import FloatArray, ImageArray

if TYPE_CHECKING:
    from robotics.flow3d.act.motion import ObjectMotion


@dataclass(frozen=True)
class Verdict:
    """A judgement of a plan."""

    ok: bool | None
    """Whether the plan does the task; None where it could not be judged, for example with a server that is down."""
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
    """Whether the arm can do it with any grasp; slow, so call it only when needed."""


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
