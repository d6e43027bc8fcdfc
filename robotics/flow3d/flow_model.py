"""The protocol of flow models, and user-provided flow: from another model, a tracker or a simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import FloatArray, project


class FlowModel(Protocol):
    """Predicts flow, as `robotics.flow3d.model.FlowWorldModel` does."""

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """(K, T, N, N, 4) samples of the flow of query points (N, N, 3) u, v, z on the object."""


@dataclass(frozen=True)
class FixedFlow:
    """One fixed flow."""

    flow: FloatArray
    """(T, N, N, 4)."""
    points: FloatArray | None = None
    """(N, N, 3) query points of the flow; None = the planner's own."""

    def __post_init__(self) -> None:
        if self.flow.ndim != 4 or self.flow.shape[1] != self.flow.shape[2] or self.flow.shape[3] != 4:
            raise UserError(
                f"the flow has the shape {self.flow.shape}; must be (T, N, N, 4): u, v, z, visibility. "
                "clip_of_points converts points in space"
            )

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """The flow, repeated; see `FlowModel`."""
        return np.repeat(self.flow[None], samples, axis=0)


def clip_of_points(
    observation: Observation, points_cam_m: FloatArray, flow_cam_m: FloatArray, visible: FloatArray | None = None
) -> FlowClip:
    """A clip from points in space, the usual output of other models.

    Args:
        observation: the first frame.
        points_cam_m: (n, 3) in the camera frame, in front of the camera.
        flow_cam_m: (T, n, 3).
        visible: (T, n) in 0..1; None = all visible.

    Returns:
        The clip. If n is not a square, the last point fills the grid with visibility 0.

    Raises:
        UserError: the shapes do not fit, or a point is not in front of the camera.
    """
    frames, count = flow_cam_m.shape[:2] if flow_cam_m.ndim == 3 else (0, 0)
    if points_cam_m.shape != (count, 3) or flow_cam_m.shape != (frames, count, 3) or not frames or not count:
        raise UserError(f"points {points_cam_m.shape} and flow {flow_cam_m.shape} must be (n, 3) and (T, n, 3)")
    if not (points_cam_m[..., 2] > 0).all() or not (flow_cam_m[..., 2] > 0).all():
        raise UserError("points must lie in front of the camera: z above 0, in metres")
    side = math.ceil(math.sqrt(count))
    rows = np.minimum(np.arange(side * side), count - 1)
    seen = (np.ones((frames, count)) if visible is None else np.asarray(visible, dtype=np.float64))[:, rows]
    seen[:, count:] = 0.0
    uvz = project(flow_cam_m[:, rows], observation.K)
    flow = np.concatenate([uvz, seen[..., None]], -1).reshape(frames, side, side, 4)
    return FlowClip(observation, project(points_cam_m[rows], observation.K).reshape(side, side, 3), flow)
