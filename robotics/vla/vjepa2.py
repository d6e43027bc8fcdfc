"""The latent of V-JEPA 2: the mean over all tokens of its encoder for a clip of the trajectory.

Source: sii-research/siiRL siirl/utils/embodied/video_emb.py (frames, crop and mean of SRPO's release).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from robotics.vla.latent_rows import TrajectoryLatent, check_frames, check_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

PADS = ("cycle", "edge")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RESIZE_PER_CROP = 256 / 224


@dataclass
class Vjepa2Settings:
    """Settings of the V-JEPA 2 latent."""

    path: str = ""
    """Folder or hub name of a V-JEPA 2 model for transformers, e.g. facebook/vjepa2-vitg-fpc64-384."""
    pad: str = rare(choice("cycle", PADS))
    """Padding of a clip that is too short: the clip again from its start (code), or its last frame (edge)."""
    batch_size: int = rare(bounded(1, at_least=1))
    """Trajectories at once."""
    device: str = "cpu"
    """Where the model runs; in float16 on a GPU, in float32 on the CPU."""
    cache: int = rare(bounded(4096, at_least=0))
    """Latents in the cache."""

    def validate(self) -> None:
        """Refuse an empty path; raises UserError."""
        check_path(self.path, "vjepa2")


class Vjepa2Latent(TrajectoryLatent):
    """Mean over all space-time tokens of a V-JEPA 2 encoder; its predictor is not used.

    Frames are taken evenly from the whole episode, as many as the model was trained on, resized to a short side of
    256/224 of the model's image (438 for 384), cropped in the middle and standardised with ImageNet's statistics.

    Source: V-JEPA 2, arXiv 2506.09985; sii-research/siiRL siirl/utils/embodied/video_emb.py. There the resized pixels
        are rounded to whole numbers, here they are not.
    """

    def __init__(self, settings: Vjepa2Settings) -> None:
        check_config(settings, "latent")
        model = _load_vjepa2(settings.path)
        self.settings = settings
        self._device = torch.device(settings.device)
        self._encoder = model.encoder.to(self._device).eval().requires_grad_(False)
        self._frames = int(model.config.frames_per_clip)
        side = model.config.crop_size
        self._side = int(side[0] if isinstance(side, (list, tuple)) else side)
        super().__init__(int(model.config.hidden_size), settings.batch_size, settings.cache)

    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        images = check_frames(frames)
        return images[sample_indices(len(images), self._frames, self.settings.pad)]

    @torch.no_grad()
    def _compute(self, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
        clips = torch.stack([crop_clip(clip, self._side) for clip in inputs]).to(self._device)
        with torch.autocast(self._device.type, torch.float16, enabled=self._device.type == "cuda"):
            tokens = self._encoder(pixel_values_videos=clips).last_hidden_state
        return np.asarray(tokens.float().mean(1).cpu().numpy(), np.float32)


def sample_indices(count: int, wanted: int, pad: str = "cycle") -> NDArray[np.int64]:
    """Indices (wanted,) of the frames that make a clip: evenly spaced, or padded where there are fewer.

    Source: sii-research/siiRL siirl/utils/embodied/video_emb.py (cycle).
    """
    if count < 1 or pad not in PADS:
        raise ValueError(f"cannot take {wanted} of {count} frames with pad {pad!r}; pads: {', '.join(PADS)}")
    if count >= wanted:
        return np.linspace(0, count - 1, wanted).astype(np.int64)
    indices = np.arange(wanted)
    return indices % count if pad == "cycle" else np.minimum(indices, count - 1)


def crop_clip(frames: NDArray[np.uint8], side: int) -> Tensor:
    """Resize (T, H, W, 3) uint8 frames to a short side of 256/224 `side`, crop and standardise: (T, 3, side, side)."""
    planes = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    height, width = planes.shape[-2:]
    short = int(RESIZE_PER_CROP * side)
    size = (int(short * height / min(height, width)), int(short * width / min(height, width)))
    resized = functional.interpolate(planes, size, mode="bilinear", align_corners=False, antialias=True)
    top, left = round((size[0] - side) / 2), round((size[1] - side) / 2)
    cropped = resized[..., top : top + side, left : left + side].clamp(0, 255) / 255
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return (cropped - mean) / std


def _load_vjepa2(path: str) -> Any:
    from mmrl.hub.compat import ensure_torchvision, quiet_transformers

    ensure_torchvision()
    from transformers import VJEPA2Model

    try:
        with quiet_transformers():
            return VJEPA2Model.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"no V-JEPA 2 model can be read from {path!r}: {reason}") from error
