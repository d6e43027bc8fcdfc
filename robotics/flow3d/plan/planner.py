"""Moves an object with any arm, given an observation and an instruction.

    planner = FlowPlanner(model, robot.arm, GeometricVerifier())
    result = planner.run(robot, "place the mug on the red pad")
    print(result.executed, result.failure, result.detail)

Predict a flow, render and verify its outcome, at most K times; grasp; execute the motion in chunks; optionally look
again and replan. Every error becomes a named failure of the result.

Source: arXiv 2506.06199, which looks only once, before the motion; looking again after each chunk is ours, and off by
default.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mmrl.errors import UserError, require_packages
from mmrl.fields import check_config
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.clouds import normals_towards
from robotics.flow3d.flow_model import FlowModel
from robotics.flow3d.geometry import BoolArray, FloatArray, ImageArray
from robotics.flow3d.kinematics import ArmIk, FlowArm, FlowRobot
from robotics.flow3d.plan.execution import Executor
from robotics.flow3d.plan.grasps import PROPOSERS, Grasp, GraspProposer, ObjectSurface
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.prediction import Predictor, one_line
from robotics.flow3d.plan.reach import ArmClearance, GraspPlan, Obstacles, ReachChecks, choose_grasps, held_path
from robotics.flow3d.plan.rendering import REPLAY, hidden_points, render_outcome, scene_cloud
from robotics.flow3d.plan.result import (
    Failure,
    PlanFacts,
    PlanFailed,
    PlanResult,
    PlanRound,
    PlanTry,
    Verdict,
    Verifier,
    judged,
)
from robotics.flow3d.plan.vlm import PartFinder

SCENE_POINTS = 1500
"""Maximum number of scene points checked for collisions; more take longer."""
OVER_SUPPORT_M = 0.01
"""Points of the scene up to this height above the support belong to it."""
PART_REACH_M = 0.05
"""Maximum distance of a grasp from the chosen part."""


class GraspSearch:
    """Searches for plans of one arm."""

    def __init__(
        self,
        arm: FlowArm,
        ik: ArmIk,
        config: PlannerConfig,
        proposers: Sequence[Sequence[str | GraspProposer]],
        part: PartFinder | None = None,
    ) -> None:
        self.arm = arm
        self.ik = ik
        self.config = config
        self.part = part
        self.proposers = [[_find_proposer(each) for each in some] for some in proposers]
        self.clearance = ArmClearance(arm)

    def fill(self, round_: PlanRound, each: PlanTry) -> None:
        """Set the plans of a try, or its failure."""
        assert each.motion is not None
        if round_.held:
            # the hand already holds the object, so there is nothing to grasp
            plan = held_path(each.motion.T_t_0_world, self.ik, round_.joint_rad, self.config.reach)
            each.plans = [] if plan is None else [plan]
            if plan is None:
                each.failure = Failure.UNREACHABLE
                each.detail = "with the object in the hand"
            return
        obstacles = self._obstacles(round_.observation, round_.mask)
        checks = ReachChecks(self.ik, round_.joint_rad, self.clearance, obstacles, self.config.reach)
        part_m = self._part(round_)
        each.plans, refused = [], Counter[str]()
        # the second list is for objects on which no grasp of the first list has a plan
        for proposers in self.proposers:
            grasps = self._propose(proposers, round_.observation, each.motion.points_world_m, part_m)
            plans, why = choose_grasps(grasps, each.motion.T_t_0_world, checks)
            if plans:
                each.plans = plans
                return
            refused += why
        if refused:
            each.failure = Failure.UNREACHABLE
            each.detail = ", ".join(f"{count} x {reason}" for reason, count in refused.most_common())
        else:
            where = "" if part_m is None else f", and no grasp is within {PART_REACH_M:g} m of the chosen part"
            each.failure = Failure.NO_GRASP
            each.detail = f"the gripper opens {self.arm.max_opening_m:g} m{where}"

    def _part(self, round_: PlanRound) -> FloatArray | None:
        """(3,) point on the part to grasp, found once per round; None allows any part."""
        if self.part is None:
            return None
        # the part does not depend on the flow, and asking a model is slow
        if round_.part_m is None:
            try:
                point = np.asarray(self.part(round_.observation, round_.mask), dtype=np.float64)
                if point.shape != (3,) or not np.isfinite(point).all():
                    raise ValueError(f"{point!r} is not a point (3,)")
            except Exception as error:  # a model or user code; the loop must end cleanly
                raise PlanFailed(Failure.NO_PART, one_line(error)) from error
            round_.part_m = point
        return round_.part_m

    def _propose(
        self,
        proposers: Sequence[GraspProposer],
        observation: Observation,
        points_m: FloatArray,
        part_m: FloatArray | None,
    ) -> list[Grasp]:
        # seen from the camera, a surface faces it; that fixes the sign of its normals
        surface = ObjectSurface(points_m, normals_towards(points_m, observation.T_world_cam[:3, 3]))
        found: list[Grasp] = []
        for propose in proposers:
            try:
                # all proposers of a list together: none of them is good at every object
                found += propose(surface, self.arm.max_opening_m)
            except Exception as error:  # user code; the loop must end cleanly
                raise PlanFailed(Failure.NO_GRASP, f"a grasp proposer failed: {one_line(error)}") from error
        if part_m is None:
            return found
        return [each for each in found if np.linalg.norm(each.T_world_grip[:3, 3] - part_m) <= PART_REACH_M]

    def _obstacles(self, observation: Observation, mask: BoolArray) -> Obstacles:
        cloud, support = scene_cloud(observation, mask), self.config.support_z_m
        rest = cloud.rest_m if support is None else cloud.rest_m[cloud.rest_m[:, 2] > support + OVER_SUPPORT_M]
        # every k-th point keeps the spread over the scene
        rest = rest[:: max(1, len(rest) // SCENE_POINTS)]
        return Obstacles(support, cloud.object_m, rest, partial(hidden_points, observation, mask))


def _find_proposer(proposer: str | GraspProposer) -> GraspProposer:
    if isinstance(proposer, str):
        if proposer not in PROPOSERS:
            raise UserError(f"unknown grasp proposer {proposer!r}; available: {', '.join(PROPOSERS)}, or a function")
        return PROPOSERS[proposer]
    return proposer


class FlowPlanner:
    """Plans with predicted flow and executes it.

    Args:
        flow: a model with `predict(observation, points, samples, seed)`, a clip, or an array (T, N, N, 4) for the
            planner's own query points.
        arm: the arm's kinematics.
        verifier: judges predicted outcomes; None accepts every plan without rendering its outcome.
        grasps: rows of `PROPOSERS` or your own functions, tried together.
        config: settings of prediction, grasping and execution.
        locate: finds the object's mask (H, W) if the observation has none.
        otherwise: like `grasps`, tried if none of those works, for example on a drawer, which is too wide to grasp
            around its center.
        part: chooses the part of the object to grasp, such as `AskedPart`; grasps farther than 5 cm from it are
            discarded. None allows any part.
        replay: renders the scene with the object moved by (4, 4), such as `FlowScene.replay`; used by the renderer
            `replay`.

    Raises:
        UserError: a setting is out of range, there is no such proposer, or a package or argument is missing.
    """

    def __init__(
        self,
        flow: FlowModel | FlowClip | FloatArray,
        arm: FlowArm,
        verifier: Verifier | None = None,
        grasps: Sequence[str | GraspProposer] = ("primitive", "antipodal"),
        config: PlannerConfig | None = None,
        locate: Callable[[Observation], BoolArray] | None = None,
        otherwise: Sequence[str | GraspProposer] = ("part",),
        part: PartFinder | None = None,
        replay: Callable[[FloatArray], ImageArray] | None = None,
    ) -> None:
        self.config = config or PlannerConfig()
        check_config(self.config, "planner")
        # before a robot moves: errors in a run end as failures of the plan
        require_packages("planning", ["open3d"], "flow3d")
        self.predictor = Predictor(flow, self.config, locate)
        self.arm = arm
        self.verifier = verifier
        self.ik = ArmIk(arm)
        self.search = GraspSearch(arm, self.ik, self.config, (grasps, otherwise), part)
        self.render = _find_renderer(self.config.renderer, replay) if verifier is not None else None

    def run(self, robot: FlowRobot, instruction: str | None = None, seed: int = 0) -> PlanResult:
        """Look, plan, and move the object.

        Args:
            robot: an arm in a scene.
            instruction: the task; None uses the observation's.
            seed: seed of the predictions.

        Returns:
            Everything that was tried and done. Errors of model, verifier or robot become failures.
        """
        result = PlanResult(instruction or "")
        executor = Executor(robot, self.ik, self.config.execution, result)
        try:
            self._run(executor, result, instruction, seed)
        except PlanFailed as ended:
            result.failure = ended.failure
            result.detail = ended.detail
        return result

    def plan(self, observation: Observation, joint_rad: FloatArray, *, seed: int = 0, held: bool = False) -> PlanRound:
        """Predict, verify, and plan the arm's path, without moving anything.

        Args:
            observation: the scene now.
            joint_rad: (J,) current angles.
            seed: seed of the first prediction; the k-th uses seed + k.
            held: the object is already in the hand, so that no grasp is needed.

        Returns:
            The tries and the chosen one.

        Raises:
            PlanFailed: no plan was found; if all tries failed, the reason is that of the last one. The error's `round`
                has the tries.
        """
        mask = self.predictor.mask(observation)
        round_ = PlanRound(observation, self.predictor.query_points(observation, mask), mask, joint_rad, held)
        try:
            self._fill(round_, seed)
        except PlanFailed as failed:
            failed.round = round_
            raise
        return round_

    def _run(self, executor: Executor, result: PlanResult, instruction: str | None, seed: int) -> None:
        held = False
        settings = self.config.execution
        start = executor.joint_rad()
        # a fixed flow would be the same in every round
        again = settings.replans if settings.look_again and not self.predictor.is_fixed else 0
        for number in range(1 + again):
            observation = executor.observe()
            if instruction is not None:
                observation = dataclasses.replace(observation, instruction=instruction)
            result.instruction = observation.instruction
            try:
                first_seed = seed + number * self.config.samples  # a replan must not repeat the noise of earlier tries
                round_ = self.plan(observation, executor.joint_rad(), seed=first_seed, held=held)
            except PlanFailed as failed:
                result.rounds += [] if failed.round is None else [failed.round]
                raise
            result.rounds.append(round_)
            if not held:
                executor.take(round_)
            ended = executor.carry(round_, self.predictor.mask_or_none, may_drift=self.predictor.is_fixed)
            if ended is None:
                executor.finish(round_)
                return
            # a drifted object is still in the hand, and the next round only corrects the motion; a dropped one is not
            held = ended.failure is Failure.OBJECT_DRIFTED
            if number == again:
                executor.let_go()
                raise ended
            if not held:
                executor.let_go()
                executor.back_off()
                executor.go_to(start)  # so that the arm neither hides the scene nor blocks the next grasp

    def _fill(self, round_: PlanRound, seed: int) -> None:
        """Try predictions until one is accepted and reachable; else choose the best of the others."""
        # a clip or an array gives the same flow for any seed
        for k in range(1 if self.predictor.is_fixed else self.config.samples):
            each = self.predictor.predict(round_, seed + k)
            round_.tries.append(each)
            if each.failure is not None:
                continue
            self._verify(round_, each)
            if each.verdict is not None and each.verdict.ok is None:
                break  # the verifier cannot judge; another try would only take time
            if (each.verdict is None or each.verdict.ok) and self._plans(round_, each):
                round_.chosen = each
                return
            if each.failure is Failure.NO_PART:
                break  # another flow of the same object has the same parts
        round_.chosen = self._best_rejected(round_)

    def _best_rejected(self, round_: PlanRound) -> PlanTry:
        judged_tries = [(each, each.verdict) for each in round_.tries if each.verdict is not None]
        usable = [(each, verdict) for each, verdict in judged_tries if each.failure is None]
        unsure = [verdict for _, verdict in usable if verdict.ok is None]
        if unsure and self.config.when_unverified == "stop":
            raise PlanFailed(Failure.VERIFIER_DOWN, unsure[-1].reason)
        # an unsure verdict is not a rejection: `when_unverified` has decided about it above
        if usable and not unsure and self.config.when_rejected == "stop":
            raise PlanFailed(Failure.VERIFIER_REJECTS, usable[-1][1].reason)
        # rejected plans are searched for a path only now: most are never needed, and the search is the slow part
        for each, _ in sorted(usable, key=lambda pair: -pair[1].score):
            if self._plans(round_, each):
                return each
        last = round_.tries[-1]
        raise PlanFailed(last.failure or Failure.UNREACHABLE, last.detail)

    def _verify(self, round_: PlanRound, each: PlanTry) -> None:
        if self.verifier is None or self.render is None or each.motion is None:
            return
        observation = round_.observation
        try:
            each.after = self.render(observation, round_.mask, each.motion.T_t_0_world[-1])
        except Exception as error:  # a simulator or library; the loop must end cleanly
            each.verdict = Verdict(None, 0.0, f"the outcome cannot be rendered: {one_line(error)}")
            return
        # a function, because the search for a path is slow and most verifiers do not ask
        facts = PlanFacts(each.motion, self.config.support_z_m, lambda: bool(self._plans(round_, each)))
        each.verdict = judged(self.verifier, observation.rgb, each.after, observation.instruction, facts)

    def _plans(self, round_: PlanRound, each: PlanTry) -> list[GraspPlan]:
        """Plans of the arm, searched once; a try without any has a failure."""
        if each.plans is None and each.motion is not None:
            try:
                self.search.fill(round_, each)
            except PlanFailed as failed:  # kept here: a verifier may have called, and errors become its verdict
                each.plans = []
                each.failure = failed.failure
                each.detail = failed.detail
        return each.plans or []


def _find_renderer(
    renderer: str, replay: Callable[[FloatArray], ImageArray] | None
) -> Callable[[Observation, BoolArray, FloatArray], ImageArray]:
    if renderer == REPLAY:
        if replay is None:
            raise UserError("the renderer replay needs the argument replay, such as FlowScene.replay")
        return lambda observation, mask, T_t_0_world: replay(T_t_0_world)
    require_packages("rendering a predicted outcome", ["cv2"], "flow3d")
    return render_outcome
