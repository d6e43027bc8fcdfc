"""From a picture and an instruction to an object that has been moved, with any arm.

    planner = FlowPlanner(model, robot.arm, GeometricVerifier())
    result = planner.run(robot, "place the mug on the red pad")
    print(result.executed, result.failure, result.detail)

Predict a flow, render and verify its outcome, at most K times; grasp; carry out the motion in chunks; look again and
plan again where that is asked for. Whatever goes wrong is a named failure of the result.

Source: arXiv 2506.06199. It looks only once, before the motion; looking again after each chunk is ours, and off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import check_config
from robotics.flow3d.act.ik import ArmIk
from robotics.flow3d.check.outcome import REPLAY, check_renderer, render_outcome
from robotics.flow3d.check.verdict import PlanFacts, Verdict, Verifier, judged
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.execution import Executor
from robotics.flow3d.given import FlowModel
from robotics.flow3d.grasp_search import GraspSearch
from robotics.flow3d.plan_result import Failure, PlanFailed, PlanResult, PlanRound, PlanTry
from robotics.flow3d.planner_config import PlannerConfig
from robotics.flow3d.prediction import Predictor, said

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.act.choice import GraspPlan
    from robotics.flow3d.act.grasps import GraspProposer
    from robotics.flow3d.act.parts import PartFinder
    from robotics.flow3d.robot import FlowArm, FlowRobot


class FlowPlanner:
    """Plans with flow and carries it out.

    Args:
        flow: a model with `predict(observation, points, samples, seed)`, a clip, or an array (T, N, N, 4) for the
            planner's own query points.
        arm: the arm's kinematics.
        verifier: judges predicted outcomes; None accepts every plan without drawing it.
        grasps: rows of `PROPOSERS` or functions of the user, tried together.
        config: how a plan is made.
        locate: finds the pixels (H, W) of the object where the observation does not bring them.
        otherwise: like `grasps`, tried where none of those can be used, such as for a drawer, which no gripper takes
            around its middle.
        part: tells which part of the object to take, such as `AskedPart`; grasps farther than 5 cm from it are left
            out. None for any part.
        replay: draws the scene with the object moved by (4, 4), such as `FlowScene.replay`, for the renderer of that
            name.

    Raises:
        UserError: a setting is out of range, there is no such proposer, or the renderer lacks what it needs.
    """

    def __init__(
        self,
        flow: FlowModel | FlowClip | NDArray[np.float64],
        arm: FlowArm,
        verifier: Verifier | None = None,
        grasps: Sequence[str | GraspProposer] = ("primitive", "antipodal"),
        config: PlannerConfig | None = None,
        locate: Callable[[Observation], NDArray[np.bool_]] | None = None,
        otherwise: Sequence[str | GraspProposer] = ("part",),
        part: PartFinder | None = None,
        replay: Callable[[NDArray[np.float64]], NDArray[np.uint8]] | None = None,
    ) -> None:
        self.config = config or PlannerConfig()
        check_config(self.config, "planner")
        self.predictor = Predictor(flow, self.config, locate)
        self.arm, self.verifier = arm, verifier
        self.ik = ArmIk(arm, self.config.ik)
        self.search = GraspSearch(arm, self.ik, self.config, (grasps, otherwise), part)
        self.draw = _find_drawer(self.config.renderer, replay) if verifier is not None else None

    def run(self, robot: FlowRobot, instruction: str | None = None, seed: int = 0) -> PlanResult:
        """Look, plan, and move the object.

        Args:
            robot: an arm in front of something to do.
            instruction: what is to be done; None for what the observation says.
            seed: of the predictions.

        Returns:
            Everything that was tried and done. No error of model, verifier or robot gets out.
        """
        result = PlanResult(instruction or "")
        executor = Executor(robot, self.ik, self.config.reach, self.config.execution, result)
        try:
            self._run(executor, result, instruction, seed)
        except PlanFailed as ended:
            result.failure, result.detail = ended.failure, ended.detail
        return result

    def plan(
        self, observation: Observation, joint_rad: NDArray[np.float64], *, seed: int = 0, held: bool = False
    ) -> PlanRound:
        """Predict, verify, and find a way for the arm, without moving anything.

        Args:
            observation: what is seen.
            joint_rad: (J,) angles now.
            seed: of the first prediction; the k-th has seed + k.
            held: the object is in the hand already, so that no grasp is looked for.

        Returns:
            The tries and the chosen one.

        Raises:
            PlanFailed: there is no plan; its reason is that of the last try where all failed. The tries are kept in
                the attribute `round` of the error.
        """
        mask = self.predictor.mask(observation)
        round_ = PlanRound(observation, self.predictor.query_points(observation, mask))
        try:
            self._fill(round_, mask, joint_rad, seed, held)
        except PlanFailed as failed:
            failed.round = round_
            raise
        return round_

    def _run(self, executor: Executor, result: PlanResult, instruction: str | None, seed: int) -> None:
        held, settings, start = False, self.config.execution, executor.joint_rad()
        again = settings.replans if settings.look_again and not self.predictor.is_given else 0
        for number in range(1 + again):
            observation = executor.observe()
            if instruction is not None:
                observation = dataclasses.replace(observation, instruction=instruction)
            result.instruction = observation.instruction
            try:
                round_ = self.plan(
                    observation, executor.joint_rad(), seed=seed + number * self.config.samples, held=held
                )
            except PlanFailed as failed:
                result.rounds += [] if failed.round is None else [failed.round]
                raise
            result.rounds.append(round_)
            if not held:
                executor.take(round_)
            ended = executor.carry(round_, self.predictor.mask_or_none, may_drift=self.predictor.is_given)
            if ended is None:
                executor.finish(round_)
                return
            held = ended.failure is Failure.OBJECT_DRIFTED
            if number == again:
                executor.let_go()
                raise ended
            if not held:
                executor.let_go()
                executor.back_off()
                executor.go_to(start)  # or the arm would hide things, and be in the way of the next grasp

    def _fill(
        self, round_: PlanRound, mask: NDArray[np.bool_], joint_rad: NDArray[np.float64], seed: int, held: bool
    ) -> None:
        """Try predictions until one is accepted and reachable; else choose the best of the others."""
        single = self.predictor.is_given
        for k in range(1 if single else self.config.samples):
            each = self.predictor.predict(round_, mask, seed + k)
            round_.tries.append(each)
            if each.failure is not None:
                continue
            self._verify(round_, each, mask, joint_rad, held)
            judgement = None if each.verdict is None else each.verdict.ok
            if judgement is None and each.verdict is not None:
                break  # nobody can judge; asking again would only take time
            if (judgement or each.verdict is None) and self._plans(round_, each, mask, joint_rad, held):
                round_.chosen = each
                return
            if each.failure is Failure.NO_PART:
                break  # another flow of the same object has the same parts
        round_.chosen = self._best_of_the_rest(round_, mask, joint_rad, held)

    def _best_of_the_rest(
        self, round_: PlanRound, mask: NDArray[np.bool_], joint_rad: NDArray[np.float64], held: bool
    ) -> PlanTry:
        judged_tries = [each for each in round_.tries if each.verdict is not None]
        usable = [each for each in judged_tries if each.failure is None]
        unsure = [each for each in usable if each.verdict is not None and each.verdict.ok is None]
        if unsure and self.config.when_unverified == "stop":
            raise PlanFailed(Failure.VERIFIER_DOWN, _reason(unsure[-1]))
        if usable and not unsure and self.config.when_rejected == "stop":
            raise PlanFailed(Failure.VERIFIER_REJECTS, _reason(usable[-1]))
        for each in sorted(usable, key=lambda one: -one.verdict.score if one.verdict else 0.0):
            if self._plans(round_, each, mask, joint_rad, held):
                return each
        last = round_.tries[-1]
        raise PlanFailed(last.failure or Failure.UNREACHABLE, last.detail)

    def _verify(
        self,
        round_: PlanRound,
        each: PlanTry,
        mask: NDArray[np.bool_],
        joint_rad: NDArray[np.float64],
        held: bool,
    ) -> None:
        if self.verifier is None or self.draw is None or each.motion is None:
            return
        observation = round_.observation
        try:
            each.after = self.draw(observation, mask, each.motion.T_t_0_world[-1])
        except Exception as error:  # a simulator or library of any kind; the loop must end cleanly
            each.verdict = Verdict(None, 0.0, f"the outcome cannot be drawn: {said(error)}")
            return
        facts = PlanFacts(
            each.motion,
            self.config.support_z_m,
            lambda: bool(self._plans(round_, each, mask, joint_rad, held)),
        )
        each.verdict = judged(self.verifier, observation.rgb, each.after, observation.instruction, facts)

    def _plans(
        self,
        round_: PlanRound,
        each: PlanTry,
        mask: NDArray[np.bool_],
        joint_rad: NDArray[np.float64],
        held: bool,
    ) -> list[GraspPlan]:
        """Ways for the arm to do it, searched for once; a try without any has a failure."""
        if each.plans is None and each.motion is not None:
            try:
                self.search.fill(round_, each, mask, joint_rad, held)
            except PlanFailed as failed:  # not further up: a verifier may have asked, and what it meets is a verdict
                each.plans, each.failure, each.detail = [], failed.failure, failed.detail
        return each.plans or []


def _reason(each: PlanTry) -> str:
    return "" if each.verdict is None else each.verdict.reason


def _find_drawer(
    renderer: str, replay: Callable[[NDArray[np.float64]], NDArray[np.uint8]] | None
) -> Callable[[Observation, NDArray[np.bool_], NDArray[np.float64]], NDArray[np.uint8]]:
    if renderer == REPLAY:
        if replay is None:
            raise UserError("the renderer replay needs the argument replay, such as the `replay` of a FlowScene")
        return lambda observation, mask, T_t_0_world: replay(T_t_0_world)
    check_renderer(renderer)
    return partial(render_outcome, renderer=renderer)
