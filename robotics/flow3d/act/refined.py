"""Plans adjusted by the paper's optimisation, chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.act.choice import GraspPlan, ReachChecks, plan_along
from robotics.flow3d.act.chunk_solver import ChunkSettings, refine_chunk
from robotics.flow3d.geometry import FloatArray

if TYPE_CHECKING:
    from robotics.flow3d.act.motion import ObjectMotion

POINT_RADIUS_M = 0.005
"""Radius of the ball around each point of the scene."""
COUNTED = 0.3
"""Mean weight in the fit above which a point of the flow can be a keypoint; others are outliers."""


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
