"""A clip of 3D flow, and its encoding as tensors for a network.

Shapes: T future frames, an N x N grid of query points with rows first (v, then u), H x W pixels. Flow is absolute: u
and v in pixels, z in metres, and a visibility of 0 to 1. Frame 0 is the observation and not part of the flow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, ImageArray, apply_pose, lift

U, V, Z, VISIBLE = range(4)
"""Channels of a flow."""


@dataclass(frozen=True)
class Observation:
    """Input of the planner: image, depth, camera and instruction."""

    rgb: ImageArray
    """(H, W, 3)."""
    depth_m: DepthArray
    """(H, W) along the camera's axis; 0, NaN and infinite values are holes."""
    K: FloatArray
    """(3, 3) intrinsics in pixels."""
    T_world_cam: FloatArray
    """(4, 4) pose of the camera (OpenCV axes) in the frame of the robot's base."""
    instruction: str
    """The task."""
    mask: BoolArray | None = None
    """(H, W) pixels of the object, where it is known."""

    def __post_init__(self) -> None:
        height, width = self.depth_m.shape
        for name, value, shape in (
            ("rgb", self.rgb, (height, width, 3)),
            ("K", self.K, (3, 3)),
            ("T_world_cam", self.T_world_cam, (4, 4)),
            ("mask", self.mask, (height, width)),
        ):
            if value is not None and value.shape != shape:
                raise UserError(
                    f"{name} has the shape {value.shape}; with depth {self.depth_m.shape} it must be {shape}"
                )
        if not np.isfinite(self.K).all() or self.K[0, 0] <= 0 or self.K[1, 1] <= 0:
            raise UserError("K must be finite with focal lengths above 0 in pixels; without them nothing can be lifted")

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return self.depth_m.shape[1], self.depth_m.shape[0]


@dataclass(frozen=True)
class FlowClip:
    """A first frame, query points on the object, and their flow."""

    observation: Observation
    """The first frame."""
    points: FloatArray
    """(N, N, 3) query points of the first frame: u, v, z."""
    flow: FloatArray
    """(T, N, N, 4): u, v, z, visibility."""
    source: str = ""
    """Origin: a data set, or the simulator with arm and task."""
    quality: dict[str, float] = field(default_factory=dict)
    """Statistics of the extraction."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Further JSON data."""

    def __post_init__(self) -> None:
        side = self.points.shape[0] if self.points.ndim else 0
        if self.points.shape != (side, side, 3) or self.flow.shape[1:] != (side, side, 4) or not len(self.flow):
            raise UserError(
                f"points have the shape {self.points.shape} and flow {self.flow.shape}; must be (N, N, 3), (T, N, N, 4)"
            )

    @property
    def points_cam_m(self) -> FloatArray:
        """(N * N, 3) query points in the camera frame."""
        return lift(self.points, self.observation.K).reshape(-1, 3)

    @property
    def flow_cam_m(self) -> FloatArray:
        """(T, N * N, 3) future points in the camera frame."""
        return lift(self.flow[..., :VISIBLE], self.observation.K).reshape(len(self.flow), -1, 3)

    @property
    def points_world_m(self) -> FloatArray:
        """(N * N, 3) query points in the world frame."""
        return apply_pose(self.observation.T_world_cam, self.points_cam_m)

    @property
    def flow_world_m(self) -> FloatArray:
        """(T, N * N, 3) future points in the world frame."""
        return apply_pose(self.observation.T_world_cam, self.flow_cam_m)

    @property
    def visible(self) -> FloatArray:
        """(T, N * N) visibility."""
        return self.flow[..., VISIBLE].reshape(len(self.flow), -1)

    def with_flow(self, flow: FloatArray) -> FlowClip:
        """The same clip with another flow, such as a predicted one."""
        return dataclasses.replace(self, flow=flow)
