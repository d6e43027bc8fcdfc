"""Encoding of flow as tensors for a network.

A normalised flow has u and v in -1..1 over the image and z in -1..1 over a range of depths. `absolute` is the paper's
target, `displacement` the scaled displacement from the query point, which a small network learns best.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmrl.fields import bounded, choice, rare
from robotics.flow3d.clip import VISIBLE, U, V, Z
from robotics.flow3d.geometry import BoolArray, DepthArray, FloatArray, IndexArray

TARGETS = ("absolute", "displacement")
VISIBILITIES = ("none", "ones", "channel")


@dataclass(frozen=True)
class FlowEncoding:
    """Encoding of a flow for a network; part of a checkpoint."""

    num_frames: int = bounded(8, at_least=1)
    """T, frames of a flow; the paper's data have 25."""
    grid: int = bounded(4, at_least=1)
    """N, query points a side; the paper's data have 16."""
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
            raise ValueError(f"z_max_m is {self.z_max_m} and z_min_m {self.z_min_m}; it must be greater")

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
            seen = 2 * flow[..., VISIBLE:] - 1 if self.visibility == "channel" else np.ones_like(flow[..., VISIBLE:])
            numbers = np.concatenate([numbers, seen], -1)
        return np.moveaxis(numbers, -1, -4).astype(np.float32)

    def decode(self, encoded: DepthArray, points: FloatArray, size_px: tuple[int, int]) -> FloatArray:
        """Decode (..., C, T, N, N) to a flow (..., T, N, N, 4); visibility is 1 where it is not encoded."""
        numbers = np.moveaxis(np.asarray(encoded, dtype=np.float64), -4, -1)
        places, seen = numbers[..., :VISIBLE], np.ones_like(numbers[..., :1])
        if self.target == "displacement":
            start = self.normalise(points, size_px)[..., None, :, :, :]
            places = places / self.displacement_scale + start
        if self.visibility == "channel":
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

    Points on the background next to the object would stand still and distort the fitted motion.
    """
    pixels = np.argwhere(mask)[:, ::-1] + 0.5
    low, high = pixels.min(0), pixels.max(0)
    wanted = grid_in_box((low[0], low[1], high[0], high[1]), side).reshape(-1, 2)
    nearest = np.argmin(((wanted[:, None] - pixels[None]) ** 2).sum(-1), 1)
    return pixels[nearest].reshape(side, side, 2)
