"""The grasp with which an arm can do the whole motion: reachable all along, clear of obstacles, least joint path.

Source: arXiv 2506.06199, which keeps grasps whose start and goal have a solution; checking every pose between them as
well is the default here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded, check_config, rare
from robotics.flow3d.act.grasps import Grasp
from robotics.flow3d.act.ik import ArmIk, JointPath
from robotics.flow3d.act.motion import gripper_poses, interpolate_joints, interpolate_poses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.act.clearance import ArmClearance


@dataclass(frozen=True)
class ReachSettings:
    """How a motion is checked."""

    standoff_m: float = rare(bounded(0.1, above=0))
    """Way along the fingers from the first pose to the grasp."""
    step_m: float = rare(bounded(0.05, above=0))
    """Largest way between poses that are solved for."""
    step_rad: float = rare(bounded(0.34, above=0))
    """Largest turn between them."""
    goal_only: bool = rare(False)
    """Keep a grasp when its first and last pose are reachable, as in the paper; the path between may then be cut."""
    clearance_m: float = rare(bounded(0.003, at_least=0))
    """Height of the arm above the support, at least."""
    points_inside: int = rare(bounded(3, at_least=0))
    """Points of object or scene that may lie inside the hand, as noise puts them there."""
    hidden_share: float = rare(bounded(0.05, at_least=0, below=1))
    """Share of the hand that may be hidden by the scene at the grasp."""
    plans: int = rare(bounded(24, at_least=1))
    """Plans after which no further grasp is tried; that with the least joint path is chosen among them."""


@dataclass(frozen=True)
class Obstacles:
    """What the arm must not touch."""

    support_z_m: float | None = None
    """Height of the support; None where there is none."""
    object_m: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    """(n, 3) the object before it moves."""
    scene_m: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    """(m, 3) everything else above the support."""
    hidden: Callable[[NDArray[np.float64]], NDArray[np.bool_]] | None = None
    """Whether places (n, 3) lie close behind the scene, where nobody knows what there is; None to go there as well."""


@dataclass(frozen=True)
class GraspPlan:
    """A grasp and how the arm gets there and goes on."""

    grasp: Grasp
    approach: JointPath
    """From the present pose, or from before the object, to the grasp."""
    motion: JointPath
    """From the grasp along the motion of the object."""
    places: NDArray[np.intp]
    """(T,) rows of `motion` at which the object is where the flow has it."""
    T_world_grip: NDArray[np.float64]
    """(T, 4, 4) poses of the grip at those."""
    length_rad: float
    """Joint path from the present angles to the end."""
    T_t_0_world: NDArray[np.float64]
    """(T, 4, 4) motion of the object that is carried out."""


@dataclass(frozen=True)
class ReachChecks:
    """An arm, where it is, and what it may hit on its way; settings out of range raise UserError."""

    ik: ArmIk
    """Kinematics."""
    start_rad: NDArray[np.float64]
    """(J,) angles now."""
    clearance: ArmClearance | None = None
    """Boxes of the arm; None to check no obstacles."""
    obstacles: Obstacles = field(default_factory=Obstacles)
    """What to keep clear of."""
    settings: ReachSettings = field(default_factory=ReachSettings)
    """How a motion is checked."""

    def __post_init__(self) -> None:
        check_config(self.settings, "reach")

    def hand(self, grasp: Grasp) -> str:
        """What the hand would hit at a grasp and before it, whatever the arm does; empty if nothing."""
        if self.clearance is None:
            return ""
        ends = np.stack([_before_grasp(grasp.T_world_grip, self.settings), grasp.T_world_grip])
        problem = self._hits(ends, self.obstacles.object_m, "object") or self._hits(
            ends, self.obstacles.scene_m, "scene"
        )
        if not problem and self.obstacles.hidden is not None:
            hidden = self.obstacles.hidden(self.clearance.places_m(grasp.T_world_grip)).mean()
            problem = "the hand would reach where nothing is seen" if hidden > self.settings.hidden_share else ""
        return problem

    def way(self, plan: GraspPlan) -> str:
        """What arm and hand would hit on the whole way; empty if nothing."""
        if self.clearance is None:
            return ""
        there = interpolate_joints(np.stack([self.start_rad, plan.approach.joint_rad[0]]), 8)
        coming = np.concatenate([there, plan.approach.joint_rad])
        if self.obstacles.support_z_m is not None:
            lowest = self.clearance.lowest_m(np.concatenate([coming, plan.motion.joint_rad])).min()
            if lowest < self.obstacles.support_z_m + self.settings.clearance_m:
                return "the arm would hit the support"
        coming_poses = np.stack([self.ik.pose(row) for row in coming])
        all_poses = np.concatenate([coming_poses, np.stack([self.ik.pose(row) for row in plan.motion.joint_rad])])
        return self._hits(coming_poses, self.obstacles.object_m, "object") or self._hits(
            all_poses, self.obstacles.scene_m, "scene"
        )

    def _hits(self, T_world_grip: NDArray[np.float64], points_m: NDArray[np.float64], name: str) -> str:
        assert self.clearance is not None
        most = self.clearance.inside(T_world_grip, points_m).max(initial=0)
        return f"the hand would hit the {name}" if most > self.settings.points_inside else ""


def choose_grasps(
    grasps: Sequence[Grasp], T_t_0_world: NDArray[np.float64], checks: ReachChecks
) -> tuple[list[GraspPlan], Counter[str]]:
    """Plan with each grasp and with each turned by half a turn, and keep those that work.

    Args:
        grasps: proposals.
        T_t_0_world: (T, 4, 4) motion of the object; with T of 0 only the way to the grasp is planned.
        checks: the arm, where it is now, and what it may hit.
    """
    plans: list[GraspPlan] = []
    refused: Counter[str] = Counter()
    for grasp in grasps:
        if len(plans) >= checks.settings.plans:
            break
        for candidate in (grasp, grasp.turned):
            plan = checks.hand(candidate) or _plan(candidate, T_t_0_world, checks)
            if isinstance(plan, str):
                refused[plan] += 1
            else:
                plans.append(plan)
    return sorted(plans, key=lambda plan: plan.length_rad), refused


def motion_path(
    T_world_grip: NDArray[np.float64], ik: ArmIk, start_rad: NDArray[np.float64], settings: ReachSettings
) -> tuple[JointPath, NDArray[np.intp]]:
    """Solve for poses of the grip and for poses in between; returns the path and the rows (M,) of the given poses."""
    dense, places = interpolate_poses(T_world_grip, step_m=settings.step_m, step_rad=settings.step_rad)
    path = ik.follow(dense, start_rad, stop_early=not settings.goal_only)
    return path, places


def held_path(
    T_t_0_world: NDArray[np.float64], ik: ArmIk, joint_rad: NDArray[np.float64], settings: ReachSettings
) -> GraspPlan | None:
    """Go on with an object that is in the hand already.

    Args:
        T_t_0_world: (T, 4, 4) motion of the object from where it is now.
        ik: kinematics of the arm.
        joint_rad: (J,) angles now.
        settings: how the motion is checked.
    """
    start = ik.pose(joint_rad)
    poses = gripper_poses(T_t_0_world, start)
    path, places = motion_path(np.concatenate([start[None], poses]), ik, joint_rad, settings)
    fits = path.reached[-1] if settings.goal_only else path.complete
    if not fits:
        return None
    here = JointPath(np.asarray(joint_rad, dtype=np.float64)[None], np.ones(1, dtype=np.bool_))
    return GraspPlan(Grasp(start, 1.0, 0.0, "in the hand"), here, path, places[1:], poses, path.length_rad, T_t_0_world)


def different_plans(plans: Sequence[GraspPlan]) -> list[GraspPlan]:
    """The first plan and those whose grasp lies elsewhere or closes along another line."""
    kept: list[GraspPlan] = []
    for plan in plans:
        pose = plan.grasp.T_world_grip
        same = (
            np.linalg.norm(pose[:3, 3] - other.grasp.T_world_grip[:3, 3]) < 0.01
            and abs(pose[:3, 1] @ other.grasp.T_world_grip[:3, 1]) > 0.9
            for other in kept
        )
        if not any(same):
            kept.append(plan)
    return kept


def _plan(grasp: Grasp, T_t_0_world: NDArray[np.float64], checks: ReachChecks) -> GraspPlan | str:
    """The plan, or why there is none."""
    settings, ik = checks.settings, checks.ik
    poses = gripper_poses(T_t_0_world, grasp.T_world_grip)
    if ik.beyond(grasp.T_world_grip):
        return "the grasp is out of reach"
    if ik.beyond(poses[-1:] if settings.goal_only else poses):
        return "the motion is out of reach"
    problem = "the grasp is out of reach"
    for approach in _approaches(grasp, checks):
        plan = plan_along(grasp, approach, T_t_0_world, checks)
        if not isinstance(plan, str):
            return plan
        problem = plan
    return problem


def plan_along(
    grasp: Grasp, approach: JointPath, T_t_0_world: NDArray[np.float64], checks: ReachChecks
) -> GraspPlan | str:
    """The plan that goes to a grasp by a given approach and then along a motion (T, 4, 4), or why there is none."""
    settings = checks.settings
    poses = gripper_poses(T_t_0_world, grasp.T_world_grip)
    path, places = motion_path(
        np.concatenate([grasp.T_world_grip[None], poses]), checks.ik, approach.joint_rad[-1], settings
    )
    if not (path.reached[-1] if settings.goal_only else path.complete):
        return "the motion is out of reach"
    length = float(np.linalg.norm(approach.joint_rad[0] - checks.start_rad))
    length += approach.length_rad + path.length_rad
    plan = GraspPlan(grasp, approach, path, places[1:], poses, length, T_t_0_world)
    return checks.way(plan) or plan


def _approaches(grasp: Grasp, checks: ReachChecks) -> Iterator[JointPath]:
    """Ways to a grasp: the hand straight through space, then the arm straight in joint space.

    A search that starts far off may end with the elbow in the table or the wrist wound up; one that follows the hand
    keeps the arm as it is. Where something is in the way of the hand, or a joint at its limit, the other one may do.
    """
    settings, ik, T_grasp = checks.settings, checks.ik, grasp.T_world_grip
    steps = {"step_m": settings.step_m, "step_rad": settings.step_rad}
    for poses in (
        [ik.pose(checks.start_rad), _before_grasp(T_grasp, settings), T_grasp],
        [_before_grasp(T_grasp, settings), T_grasp],
    ):
        dense, _ = interpolate_poses(np.stack(poses), **steps)
        path = ik.follow(dense, checks.start_rad)
        if path.complete:
            yield path


def _before_grasp(T_world_grip: NDArray[np.float64], settings: ReachSettings) -> NDArray[np.float64]:
    """(4, 4) the pose from which a grasp is approached along the fingers."""
    before = T_world_grip.copy()
    before[:3, 3] -= settings.standoff_m * T_world_grip[:3, 2]
    return before
