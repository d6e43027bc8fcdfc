"""What a planner tried, what was said of it, what the arm did, and why it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.files import replaced

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.act.choice import GraspPlan
    from robotics.flow3d.act.motion import ObjectMotion
    from robotics.flow3d.check.verdict import Verdict
    from robotics.flow3d.clip import Observation


class Failure(StrEnum):
    """Why a plan or its execution ended early."""

    NO_OBSERVATION = "no_observation"
    """The camera gave nothing."""
    NO_MOVING_OBJECT = "no_moving_object"
    """No pixels of an object, or a flow that moves nothing."""
    TOO_FEW_POINTS = "too_few_points"
    """Too few points of the object are visible, now or in the flow."""
    MISSING_DEPTH = "missing_depth"
    """The object has no depth."""
    DEGENERATE_GEOMETRY = "degenerate_geometry"
    """The flow is not finite, or its points do not determine a rotation."""
    MODEL_FAILED = "model_failed"
    """The model raised an error, or its flow has another shape."""
    VERIFIER_REJECTS = "verifier_rejects"
    """No plan was accepted, and `when_rejected` is stop."""
    VERIFIER_DOWN = "verifier_down"
    """The verifier gave no judgement, and `when_unverified` is stop."""
    NO_PART = "no_part"
    """It could not be told which part of the object to take."""
    NO_GRASP = "no_grasp"
    """Nothing was proposed."""
    UNREACHABLE = "unreachable"
    """No grasp with which the arm can do the whole motion."""
    GRASP_MISSED = "grasp_missed"
    """The fingers closed on nothing."""
    OBJECT_DROPPED = "object_dropped"
    """The object is not in the hand any more."""
    OBJECT_DRIFTED = "object_drifted"
    """The object is elsewhere than predicted, and there are no plans left."""
    ARM_STALLED = "arm_stalled"
    """The arm did not arrive at the end of its path."""
    ROBOT_FAILED = "robot_failed"
    """The robot raised an error."""


class PlanFailed(Exception):  # noqa: N818 - it is a result, and never leaves the planner
    """Ends planning or execution."""

    def __init__(self, failure: Failure, detail: str) -> None:
        super().__init__(failure, detail)
        self.failure, self.detail = failure, detail
        self.round: PlanRound | None = None
        """What was planned until then."""


@dataclass
class PlanTry:
    """One predicted flow."""

    seed: int
    """Of the prediction."""
    flow: NDArray[np.float64]
    """(T, N, N, 4)."""
    motion: ObjectMotion | None = None
    """The fitted motion; None where the flow is unusable."""
    after: NDArray[np.uint8] | None = None
    """(H, W, 3) the predicted outcome."""
    verdict: Verdict | None = None
    """None where it was not asked for."""
    failure: Failure | None = None
    """Why it cannot be carried out."""
    detail: str = ""
    """The same in a sentence."""
    plans: list[GraspPlan] | None = None
    """Ways to do it, that with the least joint path first; None where they were not searched for."""


@dataclass
class PlanRound:
    """One time of looking and planning."""

    observation: Observation
    """What was seen."""
    points: NDArray[np.float64]
    """(N, N, 3) query points."""
    tries: list[PlanTry] = field(default_factory=list)
    """Predictions in their order."""
    chosen: PlanTry | None = None
    """The one that was carried out."""
    part_m: NDArray[np.float64] | None = None
    """(3,) point on the part to take, in the world frame; None for any part."""
    plan: GraspPlan | None = None
    """How; that of the last grasp that was tried."""


@dataclass
class PlanResult:
    """The whole story of one run."""

    instruction: str
    """What was to be done."""
    rounds: list[PlanRound] = field(default_factory=list)
    """The first plan and each new one."""
    failure: Failure | None = None
    """Why it ended early; None where it did not."""
    detail: str = ""
    """The same in a sentence."""
    joint_paths: list[NDArray[np.float64]] = field(default_factory=list)
    """(M, J) each: every path that was sent to the arm."""
    drifts_m: list[float] = field(default_factory=list)
    """Distance of the object from its prediction at each new look; NaN where it could not be seen."""
    released: bool = False
    """Whether the fingers were opened at the end."""

    @property
    def executed(self) -> bool:
        """Whether the plan was carried out to its end; whether the task is done is for others to judge."""
        return self.failure is None

    @property
    def tries(self) -> list[PlanTry]:
        """Predictions of all rounds."""
        return [each for round_ in self.rounds for each in round_.tries]

    def summary(self) -> dict[str, Any]:
        """What happened, as JSON holds it."""
        return {
            "instruction": self.instruction,
            "executed": self.executed,
            "failure": self.failure,
            "detail": self.detail,
            "released": self.released,
            "drifts_m": [None if np.isnan(drift) else round(drift, 4) for drift in self.drifts_m],
            "rounds": [[_try_summary(each, each is round_.chosen) for each in round_.tries] for round_ in self.rounds],
        }

    def save(self, folder: Path | str) -> Path:
        """Write plan.json, the pictures as PNG, and plan.npz with flows, poses and joint paths."""
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
