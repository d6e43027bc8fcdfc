"""The grasp with which an arm can do the whole motion: reachable all along, clear of obstacles, least joint path.

Source: arXiv 2506.06199, which keeps grasps whose start and goal have a solution; checking every pose between them as
well is the default here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded, check_config
from robotics.flow3d.act.grasps import Grasp
from robotics.flow3d.act.ik import ArmIk, JointPath
from robotics.flow3d.act.motion import gripper_poses, interpolate_joints, interpolate_poses

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.act.clearance import ArmClearance

__all__ = ["GraspPlan", "Obstacles", "ReachSettings", "choose_grasps", "held_path", "motion_path"]


@dataclass(frozen=True)
class ReachSettings:
    """How a motion is checked."""

    standoff_m: float = bounded(0.1, above=0)
    """Way along the fingers from the first pose to the grasp."""
    step_m: float = bounded(0.05, above=0)
    """Largest way between poses that are solved for."""
    step_rad: float = bounded(0.34, above=0)
    """Largest turn between them."""
    goal_only: bool = False
    """Keep a grasp when its first and last pose are reachable, as in the paper; the path between may then be cut."""
    clearance_m: float = bounded(0.003, at_least=0)
    """Height of the arm above the support, at least."""
    points_inside: int = bounded(3, at_least=0)
    """Points of object or scene that may lie inside the hand, as noise puts them there."""


@dataclass(frozen=True)
class Obstacles:
    """What the arm must not touch."""

    support_z_m: float | None = None
    """Height of the support; None where there is none."""
    object_m: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    """(n, 3) the object before it moves."""
    scene_m: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 3)))
    """(m, 3) everything else above the support."""


@dataclass(frozen=True)
class GraspPlan:
    """A grasp and how the arm gets there and goes on."""

    grasp: Grasp
    approach: JointPath
    """From before the object to the grasp."""
    motion: JointPath
    """From the grasp along the motion of the object."""
    places: NDArray[np.intp]
    """(T,) rows of `motion` at which the object is where the flow has it."""
    T_world_grip: NDArray[np.float64]
    """(T, 4, 4) poses of the grip at those."""
    length_rad: float
    """Joint path from the present angles to the end."""


def choose_grasps(
    grasps: Sequence[Grasp],
    T_t_0_world: NDArray[np.float64],
    ik: ArmIk,
    start_rad: NDArray[np.float64],
    *,
    clearance: ArmClearance | None = None,
    obstacles: Obstacles | None = None,
    settings: ReachSettings | None = None,
) -> tuple[list[GraspPlan], Counter[str]]:
    """Plan with each grasp and with each turned by half a turn, and keep those that work.

    Args:
        grasps: proposals.
        T_t_0_world: (T, 4, 4) motion of the object.
        ik: kinematics of the arm.
        start_rad: (J,) angles now.
        clearance: boxes of the arm; None to check no obstacles.
        obstacles: what to keep clear of.
        settings: how the motion is checked.

    Returns:
        Plans, that with the least joint path first, and how many grasps failed for which reason.
    """
    settings = settings or ReachSettings()
    check_config(settings, "reach")
    plans: list[GraspPlan] = []
    refused: Counter[str] = Counter()
    for grasp in grasps:
        for candidate in (grasp, grasp.turned):
            plan = _plan(candidate, T_t_0_world, ik, start_rad, settings)
            if isinstance(plan, str):
                refused[plan] += 1
                continue
            problem = _collision(plan, start_rad, ik, clearance, obstacles or Obstacles(), settings)
            if problem:
                refused[problem] += 1
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

    Returns:
        The plan, its approach where the arm is; None where it is not reachable.
    """
    start = ik.pose(joint_rad)
    poses = gripper_poses(T_t_0_world, start)
    path, places = motion_path(np.concatenate([start[None], poses]), ik, joint_rad, settings)
    fits = path.reached[-1] if settings.goal_only else path.complete
    if not fits:
        return None
    here = JointPath(np.asarray(joint_rad, dtype=np.float64)[None], np.ones(1, dtype=np.bool_))
    return GraspPlan(Grasp(start, 1.0, 0.0, "in the hand"), here, path, places[1:], poses, path.length_rad)


def _plan(
    grasp: Grasp,
    T_t_0_world: NDArray[np.float64],
    ik: ArmIk,
    start_rad: NDArray[np.float64],
    settings: ReachSettings,
) -> GraspPlan | str:
    """The plan, or why there is none."""
    T_grasp = grasp.T_world_grip
    before = T_grasp.copy()
    before[:3, 3] -= settings.standoff_m * T_grasp[:3, 2]
    dense, _ = interpolate_poses(np.stack([before, T_grasp]), step_m=settings.step_m, step_rad=settings.step_rad)
    approach = ik.follow(dense, start_rad)
    if not approach.complete:
        return "the grasp is out of reach"
    poses = gripper_poses(T_t_0_world, T_grasp)
    path, places = motion_path(np.concatenate([T_grasp[None], poses]), ik, approach.joint_rad[-1], settings)
    if not (path.reached[-1] if settings.goal_only else path.complete):
        return "the motion is out of reach"
    length = float(np.linalg.norm(approach.joint_rad[0] - start_rad)) + approach.length_rad + path.length_rad
    return GraspPlan(grasp, approach, path, places[1:], poses, length)


def _collision(
    plan: GraspPlan,
    start_rad: NDArray[np.float64],
    ik: ArmIk,
    clearance: ArmClearance | None,
    obstacles: Obstacles,
    settings: ReachSettings,
) -> str:
    """What the arm would hit; empty if nothing."""
    if clearance is None:
        return ""
    there = interpolate_joints(np.stack([start_rad, plan.approach.joint_rad[0]]), 8)
    coming = np.concatenate([there, plan.approach.joint_rad])
    if obstacles.support_z_m is not None:
        lowest = clearance.lowest_m(np.concatenate([coming, plan.motion.joint_rad])).min()
        if lowest < obstacles.support_z_m + settings.clearance_m:
            return "the arm would hit the support"
    coming_poses = np.stack([ik.pose(row) for row in coming])
    if clearance.inside(coming_poses, obstacles.object_m).max(initial=0) > settings.points_inside:
        return "the hand would hit the object"
    all_poses = np.concatenate([coming_poses, np.stack([ik.pose(row) for row in plan.motion.joint_rad])])
    if clearance.inside(all_poses, obstacles.scene_m).max(initial=0) > settings.points_inside:
        return "the hand would hit the scene"
    return ""
