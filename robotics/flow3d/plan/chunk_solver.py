"""The paper's optimisation of the gripper's poses over a chunk, with ReKep's terms, around the closed form.

Where the flow is one rigid motion, the closed form is its optimum; the optimisation adds clearance from obstacles and
reachability. Its variables are small rotations and shifts about the closed form rather than Euler angles in the world,
which wrap for a gripper that points down and lead the solver astray. Likewise smoothness is the difference from the
closed form's own step: ReKep's length of the step itself, against squared distances of keypoints, would stop every
rotation.

Source: huangwl18/ReKep utils.py, subgoal_solver.py, path_solver.py and configs/config.yaml; arXiv 2506.06199.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from robotics.flow3d.geometry import FloatArray, angle_rad, apply_pose, farthest_points, inverse_pose, make_pose
from robotics.flow3d.kinematics import ArmIk
from robotics.flow3d.plan.reach import GraspPlan, ReachChecks, plan_along
from robotics.flow3d.rigid_motion import ObjectMotion, turn_by

SOLVERS = ("slsqp", "dual_annealing")
RADIAN_M = 1.5
"""Weight in metres of one radian of a step."""
POINT_RADIUS_M = 0.005
"""Radius of the ball around each point of the scene."""
COUNTED = 0.3
"""Mean weight in the fit above which a point of the flow can be a keypoint; others are outliers."""


def collision_cost(
    T: FloatArray, points_m: FloatArray, inside_m: Callable[[FloatArray], FloatArray], margin_m: float
) -> float:
    """Penetration of points (n, 3) at poses (M, 4, 4) into the margin of obstacles, summed, in metres.

    `inside_m` gives signed distances of positions (k, 3), positive inside obstacles.
    """
    depth = inside_m(apply_pose(T, points_m).reshape(-1, 3)) + margin_m
    return float(np.maximum(depth, 0.0).sum())


def pose_consistency(first: FloatArray, second: FloatArray, rot_weight: float = 0.5) -> float:
    """Mean distance of poses (M, 4, 4) from the nearest of others (L, 4, 4), one radian worth `rot_weight` metres."""
    shift = np.linalg.norm(first[:, None, :3, 3] - second[None, :, :3, 3], axis=-1)
    turn = angle_rad(first[:, None], second[None])
    return float((shift + rot_weight * turn).min(1).mean())


def flow_keypoint_cost(keypoints_m: FloatArray, predicted_m: FloatArray, p: int = 2) -> float:
    """Mean distance of keypoints (n, 3) from their predicted positions, to the power p."""
    if p not in (1, 2):
        raise UserError(f"p is {p}; must be 1 or 2")
    return float((np.linalg.norm(keypoints_m - predicted_m, axis=-1) ** p).mean())


@dataclass(frozen=True)
class ChunkSettings:
    """Weights and bounds; the numbers are ReKep's unless said otherwise."""

    keypoints: int = rare(bounded(16, at_least=3))
    """Points of the object that follow the flow; our choice, the paper gives no number."""
    keypoint_weight: float = rare(bounded(200.0, at_least=0))
    """Weight of the mean distance of keypoints, to the power p, in metres."""
    p: int = rare(choice(2, (1, 2)))
    """Squared or plain distances."""
    smoothness_weight: float = rare(bounded(1.0, at_least=0))
    """Weight of the difference from the closed form's step, 1.5 m a radian."""
    collision_weight: float = rare(bounded(0.8, at_least=0))
    """Weight of the depth within the margin, summed over points."""
    collision_points: int = rare(bounded(60, at_least=1))
    """Points of the object checked for collisions."""
    collision_margin_m: float = rare(bounded(0.02, at_least=0))
    """Distance from obstacles; ReKep's 0.10 keeps objects from being set down."""
    reach_weight: float = rare(bounded(20.0, at_least=0))
    """Weight of the share of steps that inverse kinematics needs, and of its error in metres."""
    rest_weight: float = rare(bounded(0.2, at_least=0))
    """Weight of the distance from the home posture, at most 3 rad, which also counts for an unreachable pose."""
    shift_m: float = rare(bounded(0.08, above=0))
    """Largest shift from the closed form along an axis."""
    turn_rad: float = rare(bounded(0.5, above=0))
    """Largest turn from it about an axis."""
    first_solver: str = rare(choice("slsqp", SOLVERS))
    """Solver of a chunk's first pose; ReKep uses the global dual_annealing there and SLSQP afterwards."""
    evaluations: int = rare(bounded(2000, at_least=1))
    """Most evaluations of dual annealing."""
    iterations: int = rare(bounded(60, at_least=1))
    """Most iterations of SLSQP."""


@dataclass(frozen=True)
class ChunkCost:
    """Weighted cost of one pose, by term."""

    keypoints: float
    smoothness: float
    collision: float
    reach: float

    @property
    def total(self) -> float:
        """Sum of the terms."""
        return self.keypoints + self.smoothness + self.collision + self.reach


def refine_chunk(
    T_t_0_world: FloatArray,
    object_m: FloatArray,
    flow_m: FloatArray,
    flow_points_m: FloatArray,
    T_world_grip: FloatArray,
    *,
    inside_m: Callable[[FloatArray], FloatArray] | None = None,
    ik: ArmIk | None = None,
    start_rad: FloatArray | None = None,
    settings: ChunkSettings | None = None,
    seed: int = 0,
) -> tuple[FloatArray, list[ChunkCost]]:
    """Adjust the motion of a held object over a chunk, frame by frame.

    `T_t_0_world` (M, 4, 4) is the closed form, `object_m` (n, 3) the object before it moves, `flow_points_m` (k, 3) the
    flow's points before they move and `flow_m` (M, k, 3) in each frame, all in the world frame. `T_world_grip` (4, 4)
    is the grasp. `inside_m` gives signed distances of positions (j, 3), positive inside obstacles. With `ik`,
    reachability counts, from `start_rad` (J,) on, by default the home posture. Returns (M, 4, 4) motions that cost at
    most as much as the closed form, and their costs.
    """
    settings = settings or ChunkSettings()
    check_config(settings, "chunk")
    chosen = farthest_points(flow_points_m, settings.keypoints)
    bulk = object_m[farthest_points(object_m, settings.collision_points)]
    joint_rad = None if ik is None else (ik.home_rad if start_rad is None else start_rad)
    refined, costs, change = np.empty_like(T_t_0_world), [], np.eye(4)
    for frame, closed in enumerate(T_t_0_world):
        expected = change @ closed @ T_world_grip
        problem = _Problem(
            settings, closed, flow_points_m[chosen], flow_m[frame, chosen], bulk, T_world_grip, expected, inside_m, ik,
            joint_rad,
        )  # fmt: skip
        shares = _minimise(problem, settings, first=frame == 0, seed=seed)
        refined[frame] = problem.moved(shares)
        costs.append(problem.cost(shares))
        change = refined[frame] @ inverse_pose(closed)
        if ik is not None and joint_rad is not None:
            joint_rad = ik.solve(refined[frame] @ T_world_grip, joint_rad).joint_rad
    return refined, costs


@dataclass(frozen=True)
class _Problem:
    """The cost of one pose."""

    settings: ChunkSettings
    closed: FloatArray
    keypoints_m: FloatArray
    predicted_m: FloatArray
    bulk_m: FloatArray
    T_world_grip: FloatArray
    expected: FloatArray
    """(4, 4) the grip with the same offset from the closed form as in the frame before."""
    inside_m: Callable[[FloatArray], FloatArray] | None
    ik: ArmIk | None
    joint_rad: FloatArray | None

    def moved(self, shares: FloatArray) -> FloatArray:
        """Motion (4, 4) of the object at shares (6,) of the largest shift and rotation about the keypoints' center."""
        shift, turn = self.settings.shift_m, self.settings.turn_rad
        bounds = np.repeat([[-shift, shift], [-turn, turn]], 3, axis=0)
        increment = (shares + 1) / 2 * (bounds[:, 1] - bounds[:, 0]) + bounds[:, 0]
        middle = apply_pose(self.closed, self.keypoints_m.mean(0)[None])[0]
        rotation = turn_by(increment[3:])
        return make_pose(rotation, middle - rotation @ middle + increment[:3]) @ self.closed

    def cost(self, shares: FloatArray) -> ChunkCost:
        """Cost of that motion."""
        settings, pose = self.settings, self.moved(shares)
        grip = pose @ self.T_world_grip
        follow = flow_keypoint_cost(apply_pose(pose, self.keypoints_m), self.predicted_m, settings.p)
        step = pose_consistency(grip[None], self.expected[None], RADIAN_M)
        hit = 0.0
        if self.inside_m is not None:
            hit = collision_cost(pose[None], self.bulk_m, self.inside_m, settings.collision_margin_m)
        reach = 0.0
        if self.ik is not None and self.joint_rad is not None:
            reach = _reach_cost(grip, self.ik, self.joint_rad, settings)
        return ChunkCost(
            settings.keypoint_weight * follow, settings.smoothness_weight * step, settings.collision_weight * hit, reach
        )

    def __call__(self, shares: FloatArray) -> float:
        return self.cost(shares).total


def _reach_cost(T_world_grip: FloatArray, ik: ArmIk, joint_rad: FloatArray, settings: ChunkSettings) -> float:
    found = ik.solve(T_world_grip, joint_rad)
    away = float(np.linalg.norm(found.joint_rad - ik.home_rad)) if found.reached else 3.0
    # The error is needed too: step counts are integers, so they give an unreachable pose no direction.
    missing = max(0.0, found.position_error_m - ik.settings.position_tolerance_m)
    effort = found.iterations / ik.settings.iterations + missing
    return settings.reach_weight * effort + settings.rest_weight * min(away, 3.0)


def _minimise(total: Callable[[FloatArray], float], settings: ChunkSettings, *, first: bool, seed: int) -> FloatArray:
    """Shares of the bounds with the least cost; the closed form itself where nothing is better."""
    from scipy.optimize import dual_annealing, minimize

    start, limits = np.zeros(6), [(-1.0, 1.0)] * 6
    candidates = [start]
    if first and settings.first_solver == "dual_annealing":
        local = {"method": "SLSQP", "bounds": limits, "options": {"maxiter": settings.iterations}}
        annealed = dual_annealing(
            total, limits, maxfun=settings.evaluations, x0=start, minimizer_kwargs=local, rng=seed
        )
        candidates.append(np.clip(annealed.x, -1.0, 1.0))
    best = min(candidates, key=total)
    options = {"maxiter": settings.iterations, "eps": 1e-3, "ftol": 1e-9}
    solved = minimize(total, best, method="SLSQP", bounds=limits, options=options)
    candidates.append(np.clip(solved.x, -1.0, 1.0))
    return min(candidates, key=total)


def refined_plans(
    plans: Sequence[GraspPlan],
    motion: ObjectMotion,
    flow_m: FloatArray,
    flow_points_m: FloatArray,
    checks: ReachChecks,
    *,
    settings: ChunkSettings | None = None,
    chunk: int = 4,
) -> list[GraspPlan]:
    """Adjust the motion of each plan to the arm's reach and to obstacles.

    `flow_points_m` (k, 3) are the flow's points in the world frame before they move, `flow_m` (T, k, 3) in each frame.
    """
    weights = motion.fit.weights.mean(0)
    good = weights > COUNTED if (weights > COUNTED).sum() >= 3 else np.ones_like(weights, dtype=np.bool_)
    inside = inside_points(checks.obstacles.scene_m)
    found: list[GraspPlan] = []
    for plan in plans:
        joint_rad, parts = plan.approach.joint_rad[-1], []
        for begin in range(0, len(motion.T_t_0_world), chunk):
            frames = slice(begin, begin + chunk)
            part, _ = refine_chunk(
                motion.T_t_0_world[frames],
                motion.points_world_m,
                flow_m[frames][:, good],
                flow_points_m[good],
                plan.grasp.T_world_grip,
                inside_m=inside,
                ik=checks.ik,
                start_rad=joint_rad,
                settings=settings,
            )
            for pose in part @ plan.grasp.T_world_grip:
                joint_rad = checks.ik.solve(pose, joint_rad).joint_rad
            parts.append(part)
        refined = plan_along(plan.grasp, plan.approach, np.concatenate(parts), checks)
        if not isinstance(refined, str):
            found.append(refined)
        elif len(plan.frames):
            found.append(plan)
    return found


def inside_points(points_m: FloatArray) -> Callable[[FloatArray], FloatArray] | None:
    """Signed distance of places (j, 3) to balls of 5 mm around points (n, 3), positive inside; None without points."""
    if not len(points_m):
        return None
    from scipy.spatial import cKDTree

    tree = cKDTree(points_m)
    return lambda places: POINT_RADIUS_M - tree.query(places)[0]
