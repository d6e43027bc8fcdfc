"""What a verifier is given and what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from robotics.flow3d.act.motion import ObjectMotion


@dataclass(frozen=True)
class Verdict:
    """A judgement of a plan."""

    ok: bool | None
    """Whether the plan does the task; None where nobody could judge, such as when a server is down."""
    score: float
    """0 to 1; of several rejected plans the one with the highest score is taken."""
    reason: str
    """Why, in a sentence."""


@dataclass(frozen=True)
class PlanFacts:
    """What is known of a plan beside its pictures."""

    motion: ObjectMotion
    """How the object moves."""
    support_z_m: float | None = None
    """Height of what the object stands on."""
    reachable: Callable[[], bool] | None = None
    """Whether the arm can do it with any grasp; asked only when needed, since it costs time."""


class Verifier(Protocol):
    """Judges the outcome of a plan before anything moves."""

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Judge a plan.

        Args:
            before: (H, W, 3) what is seen now.
            after: (H, W, 3) the predicted outcome, rendered into the same camera.
            instruction: what is to be done.
            meta: what is known beside the pictures.
        """


class AlwaysVerifier:
    """Accepts every plan."""

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Accept; see `Verifier`."""
        return Verdict(True, 1.0, "not checked")


class PredicateVerifier:
    """Asks a function of the user, such as a simulator's criterion on the predicted pose.

    Args:
        predicate: takes the (4, 4) motion of the object from now to the end of the plan, in the world frame.
    """

    def __init__(self, predicate: Callable[[NDArray[np.float64]], Any]) -> None:
        self.predicate = predicate

    def verify(self, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts) -> Verdict:
        """Ask the function; see `Verifier`."""
        ok = bool(self.predicate(meta.motion.T_t_0_world[-1]))
        return Verdict(ok, float(ok), "the predicate holds" if ok else "the predicate does not hold")


def closeness(error: float) -> float:
    """How close a plan comes to passing a check."""
    return 1 / max(error, 1.0)


def judged(
    verifier: Verifier, before: NDArray[np.uint8], after: NDArray[np.uint8], instruction: str, meta: PlanFacts
) -> Verdict:
    """Ask a verifier; whatever it raises, and an answer that is none, becomes a verdict without judgement."""
    try:
        verdict = verifier.verify(before, after, instruction, meta)
    except Exception as error:  # code of the user and models of all kinds; the loop must end cleanly
        return Verdict(None, 0.0, f"{type(verifier).__name__} failed: {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict) or not 0.0 <= verdict.score <= 1.0:
        return Verdict(None, 0.0, f"{type(verifier).__name__} gave {verdict!r}, which is no verdict")
    return verdict
