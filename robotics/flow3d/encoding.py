"""Flow as the tensors that a network sees, and back.

A normalised flow has u and v in -1..1 over the picture and z in -1..1 over a range of depths. `absolute` is the paper's
target, `displacement` is the way from the query point times a factor, which is what a small network learns best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmrl.fields import bounded, choice, rare
from robotics.flow3d.clip import VISIBLE, U, V, Z

if TYPE_CHECKING:
    from numpy.typing import NDArray

TARGETS = ("absolute", "displacement")
VISIBILITIES = ("none", "ones", "channel")


@dataclass(frozen=True)
class FlowEncoding:
    """How a flow is written for a network; part of a checkpoint."""

    num_frames: int = bounded(8, at_least=1)
    """T, frames of a flow; the paper's data have 25."""
    grid: int = bounded(4, at_least=1)
    """N, query points a side; the paper's data have 16."""
    z_min_m: float = rare(bounded(0.0, at_least=0))
    """Depth that is written as -1."""
    z_max_m: float = rare(bounded(1.5, above=0))
    """Depth that is written as 1; beyond both, depth is clipped."""
    target: str = choice("absolute", TARGETS)
    """absolute positions, or the displacement from the query point."""
    displacement_scale: float = bounded(4.0, above=0)
    """Factor of normalised displacements, which are small numbers."""
    visibility: str = choice("channel", VISIBILITIES)
    """Fourth channel: none, ones as in the public code, or channel with -1 (hidden) to 1 (visible) as in the paper."""

    def validate(self) -> None:
        """Check that the numbers fit together; raises ValueError."""
        if self.z_max_m <= self.z_min_m:
            raise ValueError(f"z_max_m is {self.z_max_m} and z_min_m {self.z_min_m}; it must be greater")

    @property
    def channels(self) -> int:
        """C, channels of a written flow."""
        return 3 if self.visibility == "none" else 4

    def normalise(self, uvz: NDArray[np.float64], size_px: tuple[int, int]) -> NDArray[np.float64]:
        """Points (..., 3) in pixels and metres as numbers of -1..1 within the picture and the range of depths.

        Source: Hoyyyaard/3DFlowAction im2flow2act/flow_generation/dataloader/animateflow_dataset.py, which clips u and
            v to the picture as well.
        """
        width, height = size_px
        share = np.clip((uvz[..., Z] - self.z_min_m) / (self.z_max_m - self.z_min_m), 0.0, 1.0)
        return np.stack([2 * uvz[..., U] / width - 1, 2 * uvz[..., V] / height - 1, 2 * share - 1], -1)

    def denormalise(self, numbers: NDArray[np.float64], size_px: tuple[int, int]) -> NDArray[np.float64]:
        """The inverse of `normalise`, for depths within the range."""
        width, height = size_px
        depth = self.z_min_m + (numbers[..., Z] + 1) / 2 * (self.z_max_m - self.z_min_m)
        return np.stack([(numbers[..., U] + 1) / 2 * width, (numbers[..., V] + 1) / 2 * height, depth], -1)

    def encode(
        self, flow: NDArray[np.float64], points: NDArray[np.float64], size_px: tuple[int, int]
    ) -> NDArray[np.float32]:
        """Write a flow for a network.

        Args:
            flow: (..., T, N, N, 4).
            points: (..., N, N, 3) query points.
            size_px: width and height of the picture.

        Returns:
            (..., C, T, N, N).
        """
        numbers = self.normalise(flow[..., :VISIBLE], size_px)
        if self.target == "displacement":
            start = self.normalise(points, size_px)[..., None, :, :, :]
            numbers = (numbers - start) * self.displacement_scale
        if self.visibility != "none":
            seen = 2 * flow[..., VISIBLE:] - 1 if self.visibility == "channel" else np.ones_like(flow[..., VISIBLE:])
            numbers = np.concatenate([numbers, seen], -1)
        return np.moveaxis(numbers, -1, -4).astype(np.float32)

    def decode(
        self, written: NDArray[np.float32], points: NDArray[np.float64], size_px: tuple[int, int]
    ) -> NDArray[np.float64]:
        """Read what a network has written; the inverse of `encode`.

        Args:
            written: (..., C, T, N, N).
            points: (..., N, N, 3) query points.
            size_px: width and height of the picture.

        Returns:
            (..., T, N, N, 4); visibility is 1 where the network does not write it.
        """
        numbers = np.moveaxis(np.asarray(written, dtype=np.float64), -4, -1)
        places, seen = numbers[..., :VISIBLE], np.ones_like(numbers[..., :1])
        if self.target == "displacement":
            start = self.normalise(points, size_px)[..., None, :, :, :]
            places = places / self.displacement_scale + start
        if self.visibility == "channel":
            seen = np.clip((numbers[..., VISIBLE:] + 1) / 2, 0.0, 1.0)
        return np.concatenate([self.denormalise(places, size_px), seen], -1)


def frame_indices(length: int, num_frames: int) -> NDArray[np.intp]:
    """The observed frame and T future ones, evenly spread over a clip.

    Returns:
        (T + 1,) indices from 0 to length - 1; some twice where the clip is shorter.

    Source: 3DFlowAction animateflow_dataset.py, floor(linspace(0, L - 1, T + 1)).
    """
    return np.floor(np.linspace(0, length - 1, num_frames + 1)).astype(np.intp)


def grid_in_box(box_px: tuple[float, float, float, float], side: int) -> NDArray[np.float64]:
    """Points of an even grid over a box, its border included, as in the public code.

    Returns:
        (N, N, 2) u and v, rows first.
    """
    left, top, right, bottom = box_px
    v, u = np.meshgrid(np.linspace(top, bottom, side), np.linspace(left, right, side), indexing="ij")
    return np.stack([u, v], -1)


def grid_in_mask(mask: NDArray[np.bool_], side: int) -> NDArray[np.float64]:
    """The same grid over the box of an object, each point moved to the nearest pixel of the object.

    Points on the background beside an object would stand still and pull the fitted motion away.

    Args:
        mask: (H, W) pixels of the object, at least one.
        side: N.

    Returns:
        (N, N, 2) middles of pixels, rows first.
    """
    pixels = np.argwhere(mask)[:, ::-1] + 0.5
    low, high = pixels.min(0), pixels.max(0)
    wanted = grid_in_box((low[0], low[1], high[0], high[1]), side).reshape(-1, 2)
    nearest = np.argmin(((wanted[:, None] - pixels[None]) ** 2).sum(-1), 1)
    return pixels[nearest].reshape(side, side, 2)
