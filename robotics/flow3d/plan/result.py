"""The record of a run (predictions, verdicts, joint paths, ending), and the verifiers that need no model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmrl.fields import bounded, check_config
from mmrl.files import replaced
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.clouds import flow_cloud, write_ply
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray, angle_rad
from robotics.flow3d.plan.reach import GraspPlan
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


class Failure(StrEnum):
    """Why a plan or its execution ended early; docs/flow3d.md describes each."""

    NO_OBSERVATION = "no_observation"
    NO_MOVING_OBJECT = "no_moving_object"
    TOO_FEW_POINTS = "too_few_points"
    MISSING_DEPTH = "missing_depth"
    DEGENERATE_GEOMETRY = "degenerate_geometry"
    MODEL_FAILED = "model_failed"
    VERIFIER_REJECTS = "verifier_rejects"
    VERIFIER_DOWN = "verifier_down"
    NO_PART = "no_part"
    NO_GRASP = "no_grasp"
    UNREACHABLE = "unreachable"
    GRASP_MISSED = "grasp_missed"
    OBJECT_DROPPED = "object_dropped"
    OBJECT_DRIFTED = "object_drifted"
    ARM_STALLED = "arm_stalled"
    ROBOT_FAILED = "robot_failed"


class PlanFailed(Exception):  # noqa: N818 - a result that never leaves the planner
    """Ends planning or execution."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(failure, detail)
        self.failure = failure
        self.detail = detail
        self.round: PlanRound | None = None
        """The round planned so far."""


@dataclass
class PlanTry:
    """One predicted flow."""

    seed: int
    """Seed of the prediction."""
    flow: FloatArray
    """(T, N, N, 4)."""
    motion: ObjectMotion | None = None
    """The fitted motion; None if the flow is unusable."""
    after: ImageArray | None = None
    """(H, W, 3) the predicted outcome."""
    verdict: Verdict | None = None
    """None if there was no verifier."""
    failure: Failure | None = None
    """Reason why the flow cannot be executed."""
    detail: str = ""
    """Explanation of the failure."""
    plans: list[GraspPlan] | None = None
    """Plans of the arm, shortest joint path first; None before the search."""


@dataclass
class PlanRound:
    """One observation and the planning from it."""

    observation: Observation
    points: FloatArray
    """(N, N, 3) query points."""
    mask: BoolArray
    """(H, W) pixels of the object with depth."""
    joint_rad: FloatArray = field(default_factory=lambda: np.zeros(0))
    """(J,) angles of the arm at the observation."""
    held: bool = False
    """Whether the object was in the hand, so that no grasp is needed."""
    tries: list[PlanTry] = field(default_factory=list)
    """Predictions in order."""
    chosen: PlanTry | None = None
    """The executed prediction."""
    part_m: FloatArray | None = None
    """(3,) point on the part to grasp, in the world frame; None allows any part."""
    plan: GraspPlan | None = None
    """Plan of the last grasp that was tried."""

    @property
    def shown(self) -> PlanTry | None:
        """The executed prediction, or the first one if none was executed; None without any flow."""
        found = self.chosen or (self.tries[0] if self.tries else None)
        return found if found is not None and len(found.flow) else None


@dataclass
class PlanResult:
    """Everything that happened in one run."""

    instruction: str
    """The task."""
    rounds: list[PlanRound] = field(default_factory=list)
    """The first plan and each replan."""
    failure: Failure | None = None
    """Reason why the run ended early, or None."""
    detail: str = ""
    """Explanation of the failure."""
    joint_paths: list[FloatArray] = field(default_factory=list)
    """(M, J) each: every path sent to the arm."""
    drifts_m: list[float] = field(default_factory=list)
    """Distance of the object from its prediction at each later observation; NaN if it was not visible."""
    released: bool = False
    """Whether the fingers were opened at the end."""

    @property
    def executed(self) -> bool:
        """Whether the plan was executed to its end, whether or not the task is done."""
        return self.failure is None

    @property
    def tries(self) -> list[PlanTry]:
        """Predictions of all rounds."""
        return [each for round_ in self.rounds for each in round_.tries]

    def summary(self) -> dict[str, Any]:
        """The run as JSON."""
        return {
            "instruction": self.instruction,
            "executed": self.executed,
            "failure": self.failure,
            "detail": self.detail,
            "released": self.released,
            # JSON has no NaN
            "drifts_m": [None if np.isnan(drift) else round(drift, 4) for drift in self.drifts_m],
            "rounds": [[_try_summary(each, each is round_.chosen) for each in round_.tries] for round_ in self.rounds],
        }

    def save(self, folder: Path | str) -> Path:
        """Write plan.json, images as PNG, plan.npz with flows, poses and joint paths, and scene and flow as PLY."""
        # written as a whole or not at all
        with replaced(Path(folder)) as draft:
            draft.mkdir()
            self._write(draft)
        return Path(folder)

    def _write(self, draft: Path) -> None:
        from PIL import Image

        arrays = {f"joint_rad_{number}": path for number, path in enumerate(self.joint_paths)}
        for number, round_ in enumerate(self.rounds):
            Image.fromarray(round_.observation.rgb).save(draft / f"round_{number}_before.png")
            arrays[f"points_{number}"] = round_.points
            if round_.shown is not None and round_.shown.motion is not None:
                clip = FlowClip(round_.observation, round_.points, round_.shown.flow)
                write_ply(draft / f"round_{number}.ply", *flow_cloud(clip))
            if round_.plan is not None:
                arrays[f"T_world_grip_{number}"] = round_.plan.T_world_grip
            for k, each in enumerate(round_.tries):
                arrays[f"flow_{number}_{k}"] = each.flow
                if each.motion is not None:
                    arrays[f"T_t_0_world_{number}_{k}"] = each.motion.T_t_0_world
                if each.after is not None:
                    Image.fromarray(each.after).save(draft / f"round_{number}_try_{k}_after.png")
        (draft / "plan.json").write_text(json.dumps(self.summary(), indent=2) + "\n", encoding="utf-8")
        np.savez_compressed(draft / "plan.npz", **arrays)  # type: ignore[arg-type]


def _try_summary(each: PlanTry, chosen: bool) -> dict[str, Any]:
    verdict = each.verdict
    return {
        "seed": each.seed,
        "ok": None if verdict is None else verdict.ok,
        "score": None if verdict is None else verdict.score,
        "reason": None if verdict is None else verdict.reason,
        "failure": each.failure,
        "detail": each.detail,
        "chosen": chosen,
    }
