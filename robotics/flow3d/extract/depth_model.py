"""Depth estimated from colour by a transformers model, such as Depth Anything, DepthPro or ZoeDepth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.fields import bounded
from robotics.flow3d.geometry import DepthArray

if TYPE_CHECKING:
    from robotics.flow3d.extract.video import RgbdVideo


@dataclass(frozen=True)
class ModelDepth:
    """Estimates the depth of each frame separately.

    The model must be metric: a scale error of 5 % already makes half of the plans fail. Compare the result with a
    known distance, and correct it with `scale`.
    """

    model: str
    """Folder or hub id that `AutoModelForDepthEstimation` loads."""
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
        from mmrl.hub.compat import ensure_torchvision

        ensure_torchvision()
        from transformers import AutoImageProcessor, AutoModelForDepthEstimation

        try:
            processor = AutoImageProcessor.from_pretrained(self.model)
            model = AutoModelForDepthEstimation.from_pretrained(self.model).to(self.device).eval()
        except (OSError, ValueError) as error:
            raise UserError(f"depth model {self.model} cannot be loaded: {' '.join(str(error).split())}") from error
        if getattr(model.config, "depth_estimation_type", "metric") != "metric":
            raise UserError(
                f"{self.model} estimates relative depth, which cannot be lifted; use a metric model, such as the "
                "-Metric- models of Depth Anything V2"
            )
        return processor, model
