"""Executes a plan on a robot: grasp, move in chunks, look again after each, release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from mmrl.fields import bounded, choice, rare
from robotics.flow3d.clip import Observation
from robotics.flow3d.clouds import distances_m
from robotics.flow3d.geometry import BoolArray, FloatArray, apply_pose
from robotics.flow3d.kinematics import ArmIk, FlowRobot
from robotics.flow3d.plan.reach import STANDOFF_M, STEP_M, GraspPlan, different_plans
from robotics.flow3d.plan.rendering import scene_cloud
from robotics.flow3d.plan.result import Failure, PlanFailed, PlanResult, PlanRound
from robotics.flow3d.rigid_motion import ObjectMotion, interpolate_joints, interpolate_poses

Result = TypeVar("Result")
MIN_VISIBLE = 10
"""Visible points below which an object's position is unknown."""
SUB_STEPS = 4
"""Interpolation steps between solved poses."""
GRASP_TRIES = 2
"""Maximum number of grasps to try if the arm is blocked or the fingers close on nothing."""
DRIFT_M, DROPPED_M = 0.02, 0.05
"""Median distance of the object from its prediction that triggers a replan, and distance between grip and nearest point
of the object above which it counts as dropped."""
TILTED_RAD = 0.6
"""Rotation of the object's vertical axis above which it is tilted."""


@dataclass(frozen=True)
class ExecutionSettings:
    """Settings of the execution of a plan."""

    chunk: int = bounded(4, at_least=1)
    """Flow frames executed per chunk."""
    look_again: bool = False
    """Observe again after each chunk, and stop or replan if the object is not where it should be; off by default, as in
    the paper."""
    replans: int = bounded(5, at_least=0)
    """Maximum number of replans with look_again; a fixed flow cannot be replanned."""
    release: str = rare(choice("unless_tilted", ("always", "never", "unless_tilted")))
    """Open the fingers at the end; unless_tilted keeps holding an object that ends tilted, as in pouring."""


class Executor:
    """Drives one robot and records what happens."""

    def __init__(self, robot: FlowRobot, ik: ArmIk, settings: ExecutionSettings, result: PlanResult) -> None:
        self.robot = robot
        self.ik = ik
        self.settings = settings
        self.result = result

    def observe(self) -> Observation:
        """Observe; raises PlanFailed if the camera fails."""
        found = _call(self.robot.observe, Failure.NO_OBSERVATION)
        if not isinstance(found, Observation):
            raise PlanFailed(Failure.NO_OBSERVATION, f"observe() returned a {type(found).__name__}, not an Observation")
        return found

    def joint_rad(self) -> FloatArray:
        """(J,) current angles; raises PlanFailed if they are not those of the arm's joints."""
        found = np.asarray(_call(self.robot.joint_rad, Failure.ROBOT_FAILED), dtype=np.float64)
        joints = self.ik.arm.joints
        if found.shape != (len(joints),) or not np.isfinite(found).all():
            detail = f"joint_rad() returned {found.tolist()}; must be the finite angles of {', '.join(joints)}"
            raise PlanFailed(Failure.ROBOT_FAILED, detail)
        return found

    def take(self, round_: PlanRound) -> None:
        """Grasp the object, trying other grasps if one misses."""
        plans = (round_.chosen.plans if round_.chosen else None) or []
        stalled = False
        for plan in different_plans(plans)[:GRASP_TRIES]:
            round_.plan = plan
            self.let_go()
            stalled = not self._move(plan.approach.joint_rad)
            if not stalled and _call(self.robot.close_gripper, Failure.ROBOT_FAILED):
                return
            self.let_go()
            # back the way it came, which is known to be free, before the next grasp
            self._move(plan.approach.joint_rad[::-1])
        if stalled:
            raise PlanFailed(Failure.ARM_STALLED, "on the way to the last grasp that was tried")
        raise PlanFailed(Failure.GRASP_MISSED, f"{min(len(plans), GRASP_TRIES)} grasps closed on nothing")

    def carry(
        self, round_: PlanRound, find_mask: Callable[[Observation], BoolArray | None], *, may_drift: bool
    ) -> PlanFailed | None:
        """Move the object along the plan, chunk by chunk; `find_mask` gives the object's pixels in an observation."""
        plan, motion = _chosen(round_)
        # only the last chunk has to arrive: an arm that lags within the motion catches up
        arrived, before = True, 0
        for end in range(self.settings.chunk, len(plan.frames) + self.settings.chunk, self.settings.chunk):
            frame = min(end, len(plan.frames)) - 1
            # from the row where the last chunk ended, so that the arm does not jump
            rows = plan.motion.joint_rad[before : plan.frames[frame] + 1]
            arrived = self._move(interpolate_joints(rows, SUB_STEPS)[1:] if len(rows) > 1 else rows)
            before = int(plan.frames[frame])
            if self.settings.look_again:
                ended = self._check(plan, motion, frame, find_mask, may_drift)
                if ended is not None:
                    return ended
        if not arrived:
            raise PlanFailed(Failure.ARM_STALLED, "at the end of the motion")
        return None

    def finish(self, round_: PlanRound) -> None:
        """Release the object and back off if the settings say so."""
        plan, _ = _chosen(round_)
        # the vertical axis of the object after the motion; its z is the cosine of the tilt
        up = plan.T_t_0_world[-1, :3, 2]
        tilted = float(np.arccos(np.clip(up[2], -1.0, 1.0))) > TILTED_RAD
        if self.settings.release == "never" or (self.settings.release == "unless_tilted" and tilted):
            return
        self.let_go()
        self.result.released = True
        self.back_off()

    def back_off(self) -> None:
        """Retract the hand along the fingers, out of view and clear of the next grasp."""
        here = self.joint_rad()
        there = self.ik.pose(here)
        back = there.copy()
        back[:3, 3] -= STANDOFF_M * there[:3, 2]
        retreat, _ = interpolate_poses(np.stack([there, back]), step_m=STEP_M)
        path = self.ik.follow(retreat, here)
        # as far as the hand can follow; `follow` stops at the first pose that it cannot reach
        self._move(path.joint_rad[: max(1, int(path.reached.sum()))])

    def go_to(self, joint_rad: FloatArray) -> None:
        """Move straight in joint space to angles (J,)."""
        self._move(joint_rad[None])

    def let_go(self) -> None:
        """Open the fingers."""
        _call(self.robot.open_gripper, Failure.ROBOT_FAILED)

    def _move(self, joint_rad: FloatArray) -> bool:
        # recorded before the move: a robot that fails in it leaves a trace of what was asked
        self.result.joint_paths.append(joint_rad)
        return bool(_call(lambda: self.robot.move(joint_rad), Failure.ROBOT_FAILED))

    def _check(
        self,
        plan: GraspPlan,
        motion: ObjectMotion,
        frame: int,
        find_mask: Callable[[Observation], BoolArray | None],
        may_drift: bool,
    ) -> PlanFailed | None:
        """Observe the object; returns why the execution ends, if it does."""
        observation = self.observe()
        mask = find_mask(observation)
        seen = np.zeros((0, 3)) if mask is None else scene_cloud(observation, mask).object_m
        if len(seen) < MIN_VISIBLE:
            # most likely the hand hides the object, which is no reason to stop
            self.result.drifts_m.append(float("nan"))
            return None
        drift = drift_of(seen, apply_pose(plan.T_t_0_world[frame], motion.points_world_m))
        self.result.drifts_m.append(drift)
        grip = self.ik.pose(self.joint_rad())[:3, 3]
        away = float(np.linalg.norm(seen - grip, axis=-1).min())
        # before drift: a dropped object has drifted too, but needs a new grasp
        if away > DROPPED_M:
            return PlanFailed(Failure.OBJECT_DROPPED, f"after frame {frame + 1} it is {away:.3f} m from the fingers")
        if drift > DRIFT_M and not may_drift:
            return PlanFailed(Failure.OBJECT_DRIFTED, f"after frame {frame + 1} it is {drift:.3f} m off")
        return None


def drift_of(seen_m: FloatArray, predicted_m: FloatArray) -> float:
    """Median distance between the observed surface (n, 3) of an object and the predicted one (m, 3)."""
    # each surface may show only part of the other, so the smaller of the two distances counts
    there = np.median(distances_m(seen_m, predicted_m))
    back = np.median(distances_m(predicted_m, seen_m))
    return float(min(there, back))


def _chosen(round_: PlanRound) -> tuple[GraspPlan, ObjectMotion]:
    """Plan and motion of a round."""
    # no grasp was tried if the object was already in the hand
    plan = round_.plan or (round_.chosen.plans[0] if round_.chosen and round_.chosen.plans else None)
    if plan is None or round_.chosen is None or round_.chosen.motion is None:
        raise ValueError("the round has no plan to execute")
    round_.plan = plan
    return plan, round_.chosen.motion


def _call(method: Callable[[], Result], failure: Failure) -> Result:
    """Result of a robot's method; an error ends the plan with a named failure."""
    try:
        return method()
    except Exception as error:  # any robot; the loop must end cleanly
        raise PlanFailed(failure, f"{type(error).__name__}: {error}") from error
