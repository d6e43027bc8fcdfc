"""Finds plans of the arm for a predicted motion: propose grasps, keep those at the right part, plan, refine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import Observation
from robotics.flow3d.geometry import BoolArray, FloatArray
from robotics.flow3d.kinematics import ArmIk, FlowArm
from robotics.flow3d.plan.clouds import hidden_points, normals_towards, scene_cloud
from robotics.flow3d.plan.grasps import PROPOSERS, Grasp, GraspProposer, ObjectSurface
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.prediction import one_line
from robotics.flow3d.plan.reach import ArmClearance, Obstacles, ReachChecks, choose_grasps, held_path
from robotics.flow3d.plan.result import Failure, PlanFailed, PlanRound, PlanTry
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
            raise UserError(f"grasps has {proposer!r}; there are {', '.join(PROPOSERS)}, or give a function")
        return PROPOSERS[proposer]
    return proposer
