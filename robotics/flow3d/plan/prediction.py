"""Predicts with any flow model: query points on the object, a flow, and the motion that it describes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import FlowClip, Observation, grid_in_mask
from robotics.flow3d.flow_model import FixedFlow, FlowModel
from robotics.flow3d.geometry import BoolArray, FloatArray, depth_at
from robotics.flow3d.plan.planner_config import PlannerConfig
from robotics.flow3d.plan.rendering import find_object, object_points
from robotics.flow3d.plan.result import Failure, PlanFailed, PlanRound, PlanTry
from robotics.flow3d.rigid_motion import object_motion

VISIBLE_SHARE = 0.5
"""Visibility above which a point counts as visible."""
MIN_POINTS = 8
"""Minimum number of object pixels with depth."""
LEAST_MOTION_M = 0.005
"""Minimum displacement of any point of the object."""


class Predictor:
    """A flow model with its inputs from an observation; `locate` masks the object if the observation does not."""

    def __init__(
        self,
        flow: FlowModel | FlowClip | FloatArray,
        config: PlannerConfig,
        locate: Callable[[Observation], BoolArray] | None = None,
    ) -> None:
        self.model = _as_model(flow)
        self.config = config
        self.locate = locate

    @property
    def is_fixed(self) -> bool:
        """Whether the flow is fixed, so that it cannot be predicted again."""
        return isinstance(self.model, FixedFlow)

    def predict(self, round_: PlanRound, seed: int) -> PlanTry:
        """A flow and the motion that it describes, or the reason why it is unusable."""
        observation = round_.observation
        points = round_.points
        config = self.config
        try:
            flow = np.asarray(self.model.predict(observation, points, 1, seed)[0], dtype=np.float64)
            clip = FlowClip(observation, points, flow)
        except Exception as error:  # any model; the loop must end cleanly
            return PlanTry(
                seed, np.zeros((0, *points.shape[:2], 4)), failure=Failure.MODEL_FAILED, detail=one_line(error)
            )
        numbers = np.concatenate([points[None], flow[..., :3]])
        if not (np.isfinite(numbers).all() and np.isfinite(flow).all() and (numbers[..., 2] > 0).all()):
            return PlanTry(
                seed,
                flow,
                failure=Failure.DEGENERATE_GEOMETRY,
                detail="the points or their flow are not finite or lie behind the camera",
            )
        seen = (clip.visible > VISIBLE_SHARE).sum(-1)
        # a median, because a few frames may hide the object; three points determine a motion
        if np.median(seen) < 3:
            return PlanTry(
                seed, flow, failure=Failure.TOO_FEW_POINTS, detail=f"{int(np.median(seen))} visible points per frame"
            )
        motion = object_motion(
            clip,
            object_points(observation, round_.mask),
            estimator=config.estimator,
            scale_m=config.flow_scale_m,
            from_first_predicted=config.from_first_predicted,
            support_z_m=config.support_z_m,
        )
        if motion.fit.degenerate.any():
            detail = "the inlier points lie on a line, so the rotation is undetermined"
            return PlanTry(seed, flow, failure=Failure.DEGENERATE_GEOMETRY, detail=detail)
        # any point, so that a turn in place counts as motion too
        moved = float(np.linalg.norm(motion.moved_world_m - motion.points_world_m, axis=-1).max())
        if moved < LEAST_MOTION_M:
            detail = f"the flow moves the object by {1000 * moved:.1f} mm"
            return PlanTry(seed, flow, failure=Failure.NO_MOVING_OBJECT, detail=detail)
        return PlanTry(seed, flow, motion)

    def mask(self, observation: Observation) -> BoolArray:
        """(H, W) pixels of the object with depth; raises PlanFailed if there are too few."""
        mask = self.mask_or_none(observation)
        if mask is None or not mask.any():
            detail = "the observation has no mask, and `locate` is missing" if mask is None else "the mask is empty"
            raise PlanFailed(Failure.NO_MOVING_OBJECT, detail)
        known = mask & np.isfinite(observation.depth_m) & (observation.depth_m > 0)
        if known.sum() < MIN_POINTS:
            # a small mask and a mask without depth have different remedies
            few = mask.sum() < MIN_POINTS
            raise PlanFailed(
                Failure.TOO_FEW_POINTS if few else Failure.MISSING_DEPTH,
                f"the object has {int(mask.sum())} pixels, {int(known.sum())} of them with depth; "
                f"{MIN_POINTS} are needed",
            )
        return known

    def mask_or_none(self, observation: Observation) -> BoolArray | None:
        """(H, W) pixels of the object; None if they are unknown."""
        if observation.mask is not None:
            return observation.mask
        if isinstance(self.model, FixedFlow) and self.model.points is not None:
            clip = FlowClip(observation, self.model.points, self.model.flow)
            return find_object(observation, clip.points_world_m)
        if self.locate is None:
            return None
        try:
            return np.asarray(self.locate(observation), dtype=np.bool_)
        except Exception as error:  # user code; the loop must end cleanly
            raise PlanFailed(Failure.NO_MOVING_OBJECT, f"locate failed: {one_line(error)}") from error

    def query_points(self, observation: Observation, mask: BoolArray) -> FloatArray:
        """(N, N, 3) query points on the object."""
        if isinstance(self.model, FixedFlow) and self.model.points is not None:
            return self.model.points
        encoding = getattr(self.model, "encoding", None)
        if encoding is not None:
            # a model only takes the grid that it was trained with
            side = int(encoding.grid)
        else:
            side = self.model.flow.shape[1] if isinstance(self.model, FixedFlow) else self.config.grid
        uv = grid_in_mask(mask, side)
        return np.concatenate([uv, depth_at(observation.depth_m, uv)[..., None]], -1)


def _as_model(flow: FlowModel | FlowClip | FloatArray) -> FlowModel:
    if isinstance(flow, FlowClip):
        return FixedFlow(flow.flow, flow.points)
    if isinstance(flow, np.ndarray):
        return FixedFlow(flow)
    if not callable(getattr(flow, "predict", None)):
        raise UserError(f"flow is a {type(flow).__name__}; must be a model with predict(), a FlowClip or an array")
    return flow


def one_line(error: Exception) -> str:
    """An error as text."""
    return f"{type(error).__name__}: {error}"
