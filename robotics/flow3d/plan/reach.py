"""Chooses grasps from which an arm can do the whole motion: reachable and collision-free, shortest joint path first.

Source: arXiv 2506.06199, which keeps grasps with a solution for start and goal; here every pose in between is checked
too, by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import check_config, rare
from robotics.flow3d.geometry import BoolArray, FloatArray, IndexArray, apply_pose, inverse_pose, make_pose
from robotics.flow3d.kinematics import ArmIk, FlowArm, JointPath
from robotics.flow3d.plan.grasps import Grasp
from robotics.flow3d.rigid_motion import gripper_poses, interpolate_joints, interpolate_poses

if TYPE_CHECKING:
    import mujoco

SKIPPED_LINKS = 2
"""Links at the base that cannot reach the table."""


class ArmClearance:
    """Boxes around the geoms of an arm's model with open fingers, which errs on the safe side."""

    def __init__(self, arm: FlowArm) -> None:
        import mujoco

        self._model = model = arm.load()
        self._data = mujoco.MjData(model)
        self._joints = [int(model.joint(name).qposadr[0]) for name in arm.joints]
        # open fingers are the widest, so what clears these boxes clears the hand in every state
        self._data.qpos[:] = _open_posture(model, self._joints)
        # the last link carries the hand; the first ones cannot come near the table
        links = [int(model.joint(name).bodyid[0]) for name in arm.joints]
        mujoco.mj_kinematics(model, self._data)
        self._low_geoms = _geoms_below(model, links[min(SKIPPED_LINKS, len(links) - 1)])
        hand = _geoms_below(model, links[-1])
        site = int(model.site(arm.grip_site).id)
        # boxes in the frame of the grip: a pose then places the hand without any kinematics
        T_grip_world = inverse_pose(_frame(self._data.site_xmat[site], self._data.site_xpos[site]))
        self._boxes = T_grip_world @ _frame(self._data.geom_xmat[hand], self._data.geom_xpos[hand])
        # geom_aabb holds center and half sizes, and the center is not the geom's origin
        self._boxes[:, :3, 3] += np.einsum("gij,gj->gi", self._boxes[:, :3, :3], model.geom_aabb[hand, :3])
        self._halves = model.geom_aabb[hand, 3:].copy()

    def lowest_m(self, joint_rad: FloatArray) -> FloatArray:
        """(M,) height of the lowest corner of the arm, without its base, at angles (M, J)."""
        import mujoco

        geoms = self._low_geoms
        centre, half = self._model.geom_aabb[geoms, :3], self._model.geom_aabb[geoms, 3:]
        lowest = np.empty(len(joint_rad))
        for row, angles in enumerate(joint_rad):
            self._data.qpos[self._joints] = angles
            mujoco.mj_kinematics(self._model, self._data)
            # the lowest corner of a box is its center minus the half sizes projected on the vertical
            up = self._data.geom_xmat[geoms].reshape(-1, 3, 3)[:, 2]
            height = self._data.geom_xpos[geoms, 2] + (up * centre).sum(-1) - (np.abs(up) * half).sum(-1)
            lowest[row] = height.min()
        return lowest

    def hand_points_m(self, T_world_grip: FloatArray) -> FloatArray:
        """(n, 3) corners, edges and centers of the hand's boxes at a pose (4, 4) of the grip."""
        # 27 points per box: -1, 0 and 1 along each axis
        grid = np.stack(np.meshgrid(*[(-1.0, 0.0, 1.0)] * 3), -1).reshape(-1, 3)
        return apply_pose(T_world_grip @ self._boxes, grid * self._halves[:, None]).reshape(-1, 3)

    def inside(self, T_world_grip: FloatArray, points_m: FloatArray, margin_m: float = 0.0) -> IndexArray:
        """(M,) number of points (n, 3) inside the hand at poses (M, 4, 4) of the grip."""
        to_boxes = inverse_pose(T_world_grip[:, None] @ self._boxes[None])
        local = np.einsum("mgij,nj->mgni", to_boxes[..., :3, :3], points_m) + to_boxes[..., None, :3, 3]
        # a negative margin shrinks the boxes, at most to nothing
        within = (np.abs(local) <= np.maximum(self._halves + margin_m, 0.0)[None, :, None]).all(-1)
        # a point inside two boxes counts once
        return within.any(1).sum(-1)


def _open_posture(model: mujoco.MjModel, arm_joints: list[int]) -> FloatArray:
    """The default posture with the fingers' joints at the upper end of their range."""
    posture: FloatArray = model.qpos0.copy()
    for joint in np.flatnonzero(model.jnt_limited):
        if int(model.jnt_qposadr[joint]) not in arm_joints:
            posture[model.jnt_qposadr[joint]] = model.jnt_range[joint, 1]
    return posture


def _geoms_below(model: mujoco.MjModel, ancestor: int) -> IndexArray:
    """Geoms of a body and of its descendants."""
    members = {ancestor}
    for body in range(ancestor + 1, model.nbody):  # parents come before their children
        if int(model.body_parentid[body]) in members:
            members.add(body)
    return np.flatnonzero(np.isin(model.geom_bodyid, list(members)))


def _frame(rotation: FloatArray, position_m: FloatArray) -> FloatArray:
    return make_pose(rotation.reshape(*position_m.shape[:-1], 3, 3), position_m)


STANDOFF_M = 0.1
"""Distance along the fingers from which a grasp is approached."""
STEP_M, STEP_RAD = 0.05, 0.34
"""Maximum distance and rotation between poses that are solved for, as in ReKep's configuration."""
CLEARANCE_M = 0.003
"""Minimum height of the arm above the support."""
POINTS_INSIDE, HIDDEN_SHARE = 3, 0.05
"""Number of object or scene points tolerated inside the hand, to allow for noise, and maximum fraction of the hand that
the scene may hide at the grasp."""
MAX_PLANS = 24
"""Number of plans after which no further grasp is tried."""


@dataclass(frozen=True)
class ReachSettings:
    """Checks of a motion."""

    goal_only: bool = rare(False)
    """Require only the first and last pose to be reachable, as in the paper; the path between may then have gaps."""


@dataclass(frozen=True)
class Obstacles:
    """Geometry that the arm must not touch."""

    support_z_m: float | None = None
    """Height of the support, or None."""
    object_m: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))
    """(n, 3) the object before it moves."""
    scene_m: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))
    """(m, 3) everything else above the support."""
    hidden: Callable[[FloatArray], BoolArray] | None = None
    """Whether positions (n, 3) are hidden close behind the scene; None allows them."""


@dataclass(frozen=True)
class GraspPlan:
    """A grasp with the arm's path to it and along the motion."""

    grasp: Grasp
    approach: JointPath
    """From the current pose, or from the standoff, to the grasp."""
    motion: JointPath
    """From the grasp along the motion of the object."""
    frames: IndexArray
    """(T,) rows of `motion` at the frames of the flow."""
    T_world_grip: FloatArray
    """(T, 4, 4) poses of the grip at these frames."""
    length_rad: float
    """Length of the joint path from the current angles to the end."""
    T_t_0_world: FloatArray
    """(T, 4, 4) motion of the object."""


@dataclass(frozen=True)
class ReachChecks:
    """Checks motions of an arm against reach and obstacles; settings out of range raise UserError."""

    ik: ArmIk
    start_rad: FloatArray
    """(J,) current angles."""
    clearance: ArmClearance | None = None
    """Boxes of the arm; None checks no obstacles."""
    obstacles: Obstacles = field(default_factory=Obstacles)
    settings: ReachSettings = field(default_factory=ReachSettings)

    def __post_init__(self) -> None:
        check_config(self.settings, "reach")

    def hand_problem(self, grasp: Grasp) -> str:
        """Collision of the hand at a grasp and before it, for any posture of the arm; empty if there is none."""
        if self.clearance is None:
            return ""
        # only the two ends: the path in between depends on the arm, see `path_problem`
        ends = np.stack([_before_grasp(grasp.T_world_grip), grasp.T_world_grip])
        problem = self._hits(ends, self.obstacles.object_m, "object")
        problem = problem or self._hits(ends, self.obstacles.scene_m, "scene")
        if not problem and self.obstacles.hidden is not None:
            hidden = self.obstacles.hidden(self.clearance.hand_points_m(grasp.T_world_grip)).mean()
            # unseen space is not free space: something may be hidden behind the scene
            problem = "the hand would reach if nothing is seen" if hidden > HIDDEN_SHARE else ""
        return problem

    def path_problem(self, plan: GraspPlan) -> str:
        """Collision of arm and hand along the whole path; empty if there is none."""
        if self.clearance is None:
            return ""
        # the robot first moves straight in joint space to the start of the approach
        there = interpolate_joints(np.stack([self.start_rad, plan.approach.joint_rad[0]]), 8)
        coming = np.concatenate([there, plan.approach.joint_rad])
        if self.obstacles.support_z_m is not None:
            lowest = self.clearance.lowest_m(np.concatenate([coming, plan.motion.joint_rad])).min()
            if lowest < self.obstacles.support_z_m + CLEARANCE_M:
                return "the arm would hit the support"
        coming_poses = np.stack([self.ik.pose(row) for row in coming])
        all_poses = np.concatenate([coming_poses, np.stack([self.ik.pose(row) for row in plan.motion.joint_rad])])
        # the object is an obstacle only until it is in the hand; the scene remains one
        problem = self._hits(coming_poses, self.obstacles.object_m, "object")
        return problem or self._hits(all_poses, self.obstacles.scene_m, "scene")

    def _hits(self, T_world_grip: FloatArray, points_m: FloatArray, name: str) -> str:
        assert self.clearance is not None
        most = self.clearance.inside(T_world_grip, points_m).max(initial=0)
        return f"the hand would hit the {name}" if most > POINTS_INSIDE else ""


def choose_grasps(
    grasps: Sequence[Grasp], T_t_0_world: FloatArray, checks: ReachChecks
) -> tuple[list[GraspPlan], Counter[str]]:
    """Plans for the motion (T, 4, 4) with each grasp and its half turn, and counts of why others fail.

    With T of 0 only the path to the grasp is planned.
    """
    plans: list[GraspPlan] = []
    refused: Counter[str] = Counter()
    for grasp in grasps:
        # grasps come best first, and each further one costs searches
        if len(plans) >= MAX_PLANS:
            break
        for candidate in (grasp, grasp.turned):
            # the hand's collisions need no inverse kinematics, so they rule out most grasps cheaply
            plan = checks.hand_problem(candidate) or _plan(candidate, T_t_0_world, checks)
            if isinstance(plan, str):
                # counted by reason, so that a failure names what went wrong most often
                refused[plan] += 1
            else:
                plans.append(plan)
    return sorted(plans, key=lambda plan: plan.length_rad), refused


def motion_path(
    T_world_grip: FloatArray, ik: ArmIk, start_rad: FloatArray, settings: ReachSettings
) -> tuple[JointPath, IndexArray]:
    """Path through poses (M, 4, 4) of the grip and poses in between, and the rows (M,) of the given ones."""
    # poses in between are solved too: an arm may reach both ends of a step and not its middle
    dense, rows = interpolate_poses(T_world_grip, step_m=STEP_M, step_rad=STEP_RAD)
    return ik.follow(dense, start_rad, stop_early=not settings.goal_only), rows


def held_path(T_t_0_world: FloatArray, ik: ArmIk, joint_rad: FloatArray, settings: ReachSettings) -> GraspPlan | None:
    """Plan a motion (T, 4, 4) of an object that is already in the hand; None if it is out of reach."""
    start = ik.pose(joint_rad)
    poses = gripper_poses(T_t_0_world, start)
    # the current pose comes first and is no frame of the flow, hence rows[1:] below
    path, rows = motion_path(np.concatenate([start[None], poses]), ik, joint_rad, settings)
    if not (path.reached[-1] if settings.goal_only else path.complete):
        return None
    here = JointPath(np.asarray(joint_rad, dtype=np.float64)[None], np.ones(1, dtype=np.bool_))
    return GraspPlan(Grasp(start, 1.0, 0.0, "in the hand"), here, path, rows[1:], poses, path.length_rad, T_t_0_world)


def different_plans(plans: Sequence[GraspPlan]) -> list[GraspPlan]:
    """The first plan and those with a clearly different grasp position or closing direction."""
    kept: list[GraspPlan] = []
    for plan in plans:
        pose = plan.grasp.T_world_grip
        same = (
            np.linalg.norm(pose[:3, 3] - other.grasp.T_world_grip[:3, 3]) < 0.01
            # absolute: fingers closing along -y grasp the same place
            and abs(pose[:3, 1] @ other.grasp.T_world_grip[:3, 1]) > 0.9
            for other in kept
        )
        if not any(same):
            kept.append(plan)
    return kept


def _plan(grasp: Grasp, T_t_0_world: FloatArray, checks: ReachChecks) -> GraspPlan | str:
    """The plan, or why there is none."""
    settings, ik = checks.settings, checks.ik
    poses = gripper_poses(T_t_0_world, grasp.T_world_grip)
    # distances first: a search that fails costs all its steps
    if ik.beyond(grasp.T_world_grip):
        return "the grasp is out of reach"
    if ik.beyond(poses[-1:] if settings.goal_only else poses):
        return "the motion is out of reach"
    problem = "the grasp is out of reach"
    for approach in _approach_paths(grasp, checks):
        plan = plan_along(grasp, approach, T_t_0_world, checks)
        if not isinstance(plan, str):
            return plan
        problem = plan
    return problem


def plan_along(grasp: Grasp, approach: JointPath, T_t_0_world: FloatArray, checks: ReachChecks) -> GraspPlan | str:
    """The plan with a given approach to the grasp and then along a motion (T, 4, 4), or why there is none."""
    settings = checks.settings
    poses = gripper_poses(T_t_0_world, grasp.T_world_grip)
    grips = np.concatenate([grasp.T_world_grip[None], poses])
    path, rows = motion_path(grips, checks.ik, approach.joint_rad[-1], settings)
    if not (path.reached[-1] if settings.goal_only else path.complete):
        return "the motion is out of reach"
    # an approach may begin away from the current angles, see `_approach_paths`
    length = float(np.linalg.norm(approach.joint_rad[0] - checks.start_rad))
    length += approach.length_rad + path.length_rad
    plan = GraspPlan(grasp, approach, path, rows[1:], poses, length, T_t_0_world)
    return checks.path_problem(plan) or plan


def _approach_paths(grasp: Grasp, checks: ReachChecks) -> Iterator[JointPath]:
    """Paths to a grasp: the hand straight through space, then the arm straight in joint space.

    A solution far from the start may have the elbow in the table or the wrist wound up; following the hand keeps the
    posture. If the hand's path is blocked or a joint is at its limit, the other path may work.
    """
    ik = checks.ik
    T_grasp = grasp.T_world_grip
    steps = {"step_m": STEP_M, "step_rad": STEP_RAD}
    for poses in (
        [ik.pose(checks.start_rad), _before_grasp(T_grasp), T_grasp],
        [_before_grasp(T_grasp), T_grasp],
    ):
        # the same steps as for the motion, so that no joint may jump on the way
        dense, _ = interpolate_poses(np.stack(poses), **steps)
        path = ik.follow(dense, checks.start_rad)
        if path.complete:
            yield path


def _before_grasp(T_world_grip: FloatArray) -> FloatArray:
    """(4, 4) the pose from which a grasp is approached along the fingers."""
    before = T_world_grip.copy()
    # z of the grip frame points along the fingers, towards the object
    before[:3, 3] -= STANDOFF_M * T_world_grip[:3, 2]
    return before
