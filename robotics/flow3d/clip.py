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
from mmrl.fields import bounded, choice, rare
from robotics.flow3d.geometry import (
    BoolArray,
    DepthArray,
    FloatArray,
    ImageArray,
    IndexArray,
    apply_pose,
    check_intrinsics,
    check_kinds,
    check_poses,
    lift,
)

U, V, Z, VISIBLE = range(4)
"""Channels of a flow."""
TARGETS = ("absolute", "displacement")
VISIBILITIES = ("none", "ones", "channel")


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
    """(H, W) pixels of the object; None if unknown."""

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
        check_kinds(depth_m=self.depth_m, mask=self.mask)
        check_intrinsics(self.K)
        check_poses(self.T_world_cam, "T_world_cam")

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
    """Origin: a dataset, or the simulator with arm and task."""
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

    def check_finite(self) -> None:
        """Reject points and flow with NaN or infinite numbers; raises UserError."""
        for name, values in (("points", self.points), ("flow", self.flow)):
            if not np.isfinite(values).all():
                raise UserError(
                    f"{name} of the clip {self.source!r}, {self.observation.instruction!r}, are not finite; lost "
                    "points keep their last position, with visibility 0"
                )

    @property
    def points_cam_m(self) -> FloatArray:
        """(N * N, 3) query points in the camera frame."""
        return lift(self.points, self.observation.K).reshape(-1, 3)

    @property
    def flow_cam_m(self) -> FloatArray:
        """(T, N * N, 3) future points in the camera frame."""
        # points row by row, the order of `points_cam_m` and `visible`
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


@dataclass(frozen=True)
class FlowEncoding:
    """Encoding of a flow for a network; part of a checkpoint."""

    num_frames: int = bounded(8, at_least=1)
    """T, frames of a flow; 25 in the paper's data."""
    grid: int = bounded(4, at_least=1)
    """N, query points per side; 16 in the paper's data."""
    z_min_m: float = rare(bounded(0.0, at_least=0))
    """Depth that is encoded as -1."""
    z_max_m: float = rare(bounded(1.5, above=0))
    """Depth that is encoded as 1; depth beyond both is clipped."""
    target: str = choice("absolute", TARGETS)
    """absolute positions, or the displacement from the query point."""
    displacement_scale: float = bounded(4.0, above=0)
    """Factor of normalised displacements, which are small."""
    visibility: str = choice("channel", VISIBILITIES)
    """Fourth channel: none, ones as in the public code, or channel with -1 (hidden) to 1 (visible) as in the paper."""

    def validate(self) -> None:
        """Check that the numbers fit together; raises ValueError."""
        if self.z_max_m <= self.z_min_m:
            raise ValueError(f"z_max_m is {self.z_max_m} and z_min_m {self.z_min_m}; z_max_m must be greater")

    @property
    def channels(self) -> int:
        """C, channels of an encoded flow."""
        return 3 if self.visibility == "none" else 4

    def normalise(self, uvz: FloatArray, size_px: tuple[int, int]) -> FloatArray:
        """Points (..., 3) in pixels and metres as numbers in -1..1 over the image and the range of depths.

        Source: Hoyyyaard/3DFlowAction im2flow2act/flow_generation/dataloader/animateflow_dataset.py, which clips u and
            v to the image as well.
        """
        width, height = size_px
        # depth is clipped, u and v are not: a point may leave the image and come back
        share = np.clip((uvz[..., Z] - self.z_min_m) / (self.z_max_m - self.z_min_m), 0.0, 1.0)
        return np.stack([2 * uvz[..., U] / width - 1, 2 * uvz[..., V] / height - 1, 2 * share - 1], -1)

    def denormalise(self, numbers: FloatArray, size_px: tuple[int, int]) -> FloatArray:
        """The inverse of `normalise`, for depths within the range."""
        width, height = size_px
        depth = self.z_min_m + (numbers[..., Z] + 1) / 2 * (self.z_max_m - self.z_min_m)
        return np.stack([(numbers[..., U] + 1) / 2 * width, (numbers[..., V] + 1) / 2 * height, depth], -1)

    def encode(self, flow: FloatArray, points: FloatArray, size_px: tuple[int, int]) -> DepthArray:
        """Encode a flow (..., T, N, N, 4) of query points (..., N, N, 3) as (..., C, T, N, N)."""
        numbers = self.normalise(flow[..., :VISIBLE], size_px)
        if self.target == "displacement":
            start = self.normalise(points, size_px)[..., None, :, :, :]
            numbers = (numbers - start) * self.displacement_scale
        if self.visibility != "none":
            # visibility on the scale of the other channels, -1..1
            seen = 2 * flow[..., VISIBLE:] - 1 if self.visibility == "channel" else np.ones_like(flow[..., VISIBLE:])
            numbers = np.concatenate([numbers, seen], -1)
        # channels first, as convolutions over time and grid expect
        return np.moveaxis(numbers, -1, -4).astype(np.float32)

    def decode(self, encoded: DepthArray, points: FloatArray, size_px: tuple[int, int]) -> FloatArray:
        """Decode (..., C, T, N, N) to a flow (..., T, N, N, 4); visibility is 1 if it is not encoded."""
        numbers = np.moveaxis(np.asarray(encoded, dtype=np.float64), -4, -1)
        places, seen = numbers[..., :VISIBLE], np.ones_like(numbers[..., :1])
        if self.target == "displacement":
            start = self.normalise(points, size_px)[..., None, :, :, :]
            places = places / self.displacement_scale + start
        if self.visibility == "channel":
            # a sample of the model may leave -1..1
            seen = np.clip((numbers[..., VISIBLE:] + 1) / 2, 0.0, 1.0)
        return np.concatenate([self.denormalise(places, size_px), seen], -1)


def frame_indices(length: int, num_frames: int) -> IndexArray:
    """(T + 1,) indices of the observed and T future frames, evenly spread over a clip, with repeats in a short one.

    Source: 3DFlowAction animateflow_dataset.py, floor(linspace(0, L - 1, T + 1)).
    """
    return np.floor(np.linspace(0, length - 1, num_frames + 1)).astype(np.intp)


def grid_in_box(box_px: tuple[float, float, float, float], side: int) -> FloatArray:
    """(N, N, 2) u, v of an even grid over a box, border included, rows first, as in the public code."""
    left, top, right, bottom = box_px
    v, u = np.meshgrid(np.linspace(top, bottom, side), np.linspace(left, right, side), indexing="ij")
    return np.stack([u, v], -1)


def grid_in_mask(mask: BoolArray, side: int) -> FloatArray:
    """(N, N, 2) the same grid over the box of a mask (H, W), each point moved to the nearest pixel of the object.

    Points on the background next to the object would not move and distort the fitted motion.
    """
    pixels = np.argwhere(mask)[:, ::-1] + 0.5
    low, high = pixels.min(0), pixels.max(0)
    wanted = grid_in_box((low[0], low[1], high[0], high[1]), side).reshape(-1, 2)
    # several grid points may share a pixel of a thin object
    nearest = np.argmin(((wanted[:, None] - pixels[None]) ** 2).sum(-1), 1)
    return pixels[nearest].reshape(side, side, 2)
