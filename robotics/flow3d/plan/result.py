"""The record of a run: predictions, verdicts, joint paths, and why it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.files import replaced
from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray
from robotics.flow3d.plan.reach import GraspPlan
from robotics.flow3d.plan.verdict import Verdict
from robotics.flow3d.rigid_motion import ObjectMotion


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
        """Write plan.json, the images as PNG, and plan.npz with flows, poses and joint paths."""
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
