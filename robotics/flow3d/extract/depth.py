"""Sources of depth: the sensor, its noise averaged away, or a model of depth from one image."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.hub.compat import ensure_torchvision
from robotics.flow3d.extract.backends import DepthSource
from robotics.flow3d.geometry import DepthArray
from robotics.flow3d.video import RgbdVideo

APART_PX = 8
"""Distance of compared pixels; more than the window in which depth is smoothed."""
RANGE_DEVIATIONS = 2.5
"""Sigma of the bilateral filter in standard deviations of the noise."""


class SensorDepth:
    """Uses the depth of the video."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """Depth with NaN in holes; see `DepthSource`."""
        return video.known_depth_m


@dataclass(frozen=True)
class DenoisedDepth:
    """Averages noisy depth within surfaces; edges and holes stay."""

    source: DepthSource = field(default_factory=SensorDepth)
    """Source of the depth."""
    window_px: int = bounded(7, at_least=1)
    """Diameter of the neighbourhood that a pixel is averaged over."""
    least_noise_m: float = bounded(0.001, at_least=0)
    """Depth with less noise is not changed."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """Depth of each frame; see `DepthSource`."""
        depth_m = self.source.depth_m(video)
        noise = depth_noise_m(depth_m)
        if noise <= self.least_noise_m:
            return depth_m
        return np.stack([smoothed(frame_m, noise, self.window_px) for frame_m in depth_m])


def depth_noise_m(depth_m: DepthArray) -> float:
    """Standard deviation in metres of a pixel's depth (L, H, W), estimated robustly from the first two frames.

    Compares the changes of pixels a little apart, so that a moving camera or surface cancels out.
    """
    change = depth_m[1] - depth_m[0]
    apart = np.abs(change[:, APART_PX:] - change[:, :-APART_PX])
    # two frames and two pixels: four times the variance; 0.6745 turns the median of |x| into a deviation
    return 0.0 if np.isnan(apart).all() else float(np.nanmedian(apart) / (0.6745 * 2.0))


def smoothed(depth_m: DepthArray, noise_m: float, window_px: int) -> DepthArray:
    """Average each pixel of depth (H, W) with neighbours of a similar depth; NaN holes stay.

    Source: bilateral filter, Tomasi & Manduchi 1998.
    """
    import cv2

    known = np.isfinite(depth_m)
    if not known.any():
        return depth_m
    # Holes are filled with a depth too far away to have a weight.
    far = float(depth_m[known].max()) + 20 * noise_m
    filled = np.where(known, depth_m, np.float32(far)).astype(np.float32)
    average = np.asarray(cv2.bilateralFilter(filled, window_px, RANGE_DEVIATIONS * noise_m, window_px / 2))
    return np.where(known, average, np.float32(np.nan)).astype(np.float32)


def resting_depth(depth_m: DepthArray, change_m: float) -> DepthArray:
    """Depth (H, W) of the first frame, averaged over later frames of (L, H, W) until a pixel changes by `change_m`."""
    total, count = depth_m[0].astype(np.float64), np.ones(depth_m[0].shape)
    rests = np.isfinite(depth_m[0])
    for frame_m in depth_m[1:]:
        # compared with the mean so far, whose noise falls; once changed, a pixel never counts again
        rests = rests & (np.abs(frame_m - total / count) < change_m)
        if not rests.any():
            break
        total, count = total + np.where(rests, frame_m, 0.0), count + rests
    return (total / count).astype(np.float32)


@dataclass(frozen=True)
class ModelDepth:
    """Estimates the depth of each frame separately.

    The model must be metric: a scale error of 5% already makes half of the plans fail. Compare the result with a
    known distance, and correct it with `scale`.
    """

    model: str
    """Folder or Hub id that `AutoModelForDepthEstimation` can load."""
    scale: float = bounded(1.0, above=0)
    """Factor on the estimated metres."""
    device: str = "cpu"
    """Torch device."""

    def depth_m(self, video: RgbdVideo) -> DepthArray:
        """Depth of each frame; see `DepthSource`."""
        import torch

        processor, model = self._loaded
        width, height = video.size_px
        frames = []
        for rgb in video.rgb:
            inputs = processor(images=rgb, return_tensors="pt").to(self.device)
            with torch.no_grad():
                outputs = model(**inputs)
            (found,) = processor.post_process_depth_estimation(outputs, target_sizes=[(height, width)])
            frames.append(self.scale * found["predicted_depth"].float().cpu().numpy())
        depth = np.stack(frames)
        return np.where(np.isfinite(depth) & (depth > 0), depth, np.nan).astype(np.float32)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        ensure_torchvision()
        from transformers import AutoImageProcessor, AutoModelForDepthEstimation

        from mmrl.runs.export import foreign_model

        name = foreign_model(self.model, "a depth model")
        try:
            processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForDepthEstimation.from_pretrained(name, trust_remote_code=False).to(self.device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"depth model {self.model} cannot be loaded: {' '.join(str(error).split())}") from error
        if getattr(model.config, "depth_estimation_type", "metric") != "metric":
            raise UserError(
                f"{self.model} estimates relative depth, which cannot be lifted to 3D; use a metric model, such as "
                "the -Metric- models of Depth Anything V2"
            )
        return processor, model
