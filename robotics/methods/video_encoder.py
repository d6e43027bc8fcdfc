"""A small self-supervised video encoder whose latents measure progress along a trajectory.

Each frame has a latent, and the latents of two frames of a trajectory are trained to be as far apart as the frames are
in time, as a fraction of the trajectory: ||z_i - z_j|| = scale * |t_i - t_j|. The layout, which is constant in an
episode, motion without direction and noise do not help with that, so the latents mostly keep the changes that the robot
makes. A distance in latent space is then a fraction of the trajectory, as a distance to successful trajectories should
be. Latents do not collapse, because equal latents are wrong whenever time passes; no negatives, target network or
regularisers are needed, and training takes one to two minutes on two cores.

Other objectives were tried for 200 steps each, untuned, on synthetic clips with distractors. Masked prediction of
latents with a target network and VICReg's terms ranked failures by progress no better than random weights (it only
requires that latents vary, and distractors vary); cycle consistency and contrasts between neighbours in time did worse.
Distances in frames instead of fractions of the trajectory were near chance if failures idle until the end, since
these last longest.

Latents are computed frame by frame: an encoder that mixes frames could read the time off their number. Order enters
through the pooling.

Source: distances in time as a latent metric: dynamical distance learning, arXiv 1907.08225; the distance to the goal's
latent as a reward: XIRL, arXiv 2106.03911. Both learn from other signals than this regression.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from mmrl.files import read_json_object, write_atomically
from mmrl.runs.export import foreign_model
from robotics.data import LeRobotReader
from robotics.policies.base.saved import build_fitting, make_config, read_weights, write_weights

CONFIG_FILE = "config.json"
KIND = "mmrl_video_encoder"
DOWNSCALE = 8
END_SHARE = 4
NORM_GROUPS = 4
CENTRE = 0.5
DISTANCE_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-12


@dataclass(frozen=True)
class VideoEncoderConfig:
    """Sizes of a video encoder; the defaults have 0.2 million parameters."""

    height: int = bounded(64, at_least=1, multiple_of=DOWNSCALE)
    """Height of the frames in pixels, a multiple of 8; frames of other sizes are resized."""
    width: int = bounded(64, at_least=1, multiple_of=DOWNSCALE)
    """Width in pixels, a multiple of 8."""
    channels: int = bounded(16, at_least=1, multiple_of=NORM_GROUPS)
    """Channels after the first convolution, a multiple of 4; the next two have 2 and 4 times as many."""
    frame_channels: int = bounded(16, at_least=1)
    """Channels of the last map of a frame, each a value at every 8th pixel."""
    size: int = bounded(64, at_least=1)
    """Entries of a frame's latent."""
    clip_frames: int = bounded(16, at_least=2)
    """Frames of a trajectory, evenly spaced, from which it is embedded."""


@dataclass(frozen=True)
class VideoTraining:
    """Training of a video encoder; the defaults take one to two minutes on two cores with 64x64 frames."""

    steps: int = bounded(300, at_least=1)
    """Optimiser steps."""
    batch: int = bounded(16, at_least=1)
    """Trajectories per step."""
    frames: int = bounded(12, at_least=2)
    """Frames of each trajectory, at random times; every pair of them is one example."""
    scale: float = bounded(4.0, above=0)
    """Distance of the latents of the two ends of a trajectory."""
    learning_rate: float = bounded(1e-3, at_least=0)
    """Peak learning rate, after a warm-up of a tenth of the steps; then a cosine to 0."""
    weight_decay: float = bounded(0.01, at_least=0)
    """Weight decay of AdamW."""
    pixel_noise: float = bounded(0.05, at_least=0)
    """Standard deviation of the noise added to the frames, pixels being in 0..1."""
    seed: int = 0
    """Seed of the weights, the choice of frames and the noise."""


class VideoEncoder(nn.Module):
    """Latents of the frames of trajectories, by convolutions over each frame."""

    def __init__(self, config: VideoEncoderConfig) -> None:
        super().__init__()
        check_fields(config, "encoder")
        self.config = config
        widths = [3, config.channels, 2 * config.channels, 4 * config.channels]
        cells = (config.height // DOWNSCALE) * (config.width // DOWNSCALE)
        self.frame = nn.Sequential(
            # three halvings: DOWNSCALE is 8
            *(_halve(into, out) for into, out in pairwise(widths)),
            nn.Conv2d(widths[-1], config.frame_channels, 1),
            # flattened and not pooled: where something is tells how far the task has come
            nn.Flatten(),
            nn.Linear(config.frame_channels * cells, 2 * config.size),
            nn.GELU(),
            nn.Linear(2 * config.size, config.size),
        )

    def forward(self, clips: Tensor) -> Tensor:
        """Embed each frame of clips.

        Args:
            clips: (B, T, H, W, 3) uint8, or float32 in 0..1.

        Returns:
            (B, T, size) float32.

        Raises:
            ValueError: the shape is another, or H and W are not the encoder's.
        """
        config = self.config
        if clips.ndim != 5 or tuple(clips.shape[2:]) != (config.height, config.width, 3):
            raise ValueError(f"clips are {tuple(clips.shape)}; expected (B, T, {config.height}, {config.width}, 3)")
        pixels = clips.float() / 255 if clips.dtype == torch.uint8 else clips
        images = (pixels - CENTRE).mul(2).flatten(0, 1).permute(0, 3, 1, 2).contiguous()
        latents: Tensor = self.frame(images).unflatten(0, clips.shape[:2])
        return latents

    def trajectory(self, clips: Tensor, pooling: str = "mean_and_end") -> Tensor:
        """Embed whole trajectories, one clip each.

        Args:
            clips: (B, T, H, W, 3) uint8, or float32 in 0..1.
            pooling: a name of `POOLINGS`: "mean" over time, "end" the mean of the last quarter, "mean_and_end" both,
                concatenated.

        Returns:
            (B, latent_size(pooling)) float32.

        Raises:
            UserError: no such pooling.
        """
        return _pool(self(clips), pooling)

    def latent_size(self, pooling: str) -> int:
        """Entries of a pooled latent; raises UserError for an unknown pooling."""
        # measured on zeros, so that new poolings need no second table of sizes
        return _pool(torch.zeros(1, 1, self.config.size), pooling).shape[1]

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights and sizes; the folder is created if it is missing."""
        write_weights(self, Path(folder))
        described = {"model_type": KIND, **asdict(self.config)}
        write_atomically(Path(folder) / CONFIG_FILE, json.dumps(described, indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read a folder of `save_pretrained`, in evaluation mode on the CPU; raises UserError if it is unusable."""
        folder = Path(foreign_model(str(folder), "a video encoder"))
        file = folder / CONFIG_FILE
        saved = read_json_object(file)
        kind = saved.pop("model_type", None)
        if kind != KIND:
            raise UserError(f"{file} describes a {kind or 'model without model_type'}; expected {KIND}")
        config = make_config(VideoEncoderConfig, saved, str(file))
        encoder = build_fitting(lambda: cls(config), saved, folder)
        read_weights(encoder, folder)
        return encoder.eval()


def train_video_encoder(
    frames: Sequence[NDArray[np.uint8]],
    config: VideoEncoderConfig | None = None,
    training: VideoTraining | None = None,
    on_step: Callable[[int, Mapping[str, float]], None] | None = None,
) -> VideoEncoder:
    """Train a video encoder on trajectories, successes and failures alike, without labels.

    Args:
        frames: frames (F_i, H, W, 3) uint8 of each trajectory, with F_i >= 2; resized to the encoder's size.
        config: sizes; None for the defaults.
        training: steps and rates; None for the defaults.
        on_step: called after each step with its number, from 1, its `loss` and `explained`, the fraction of the
            variance of distances in time that the latents explain.

    Returns:
        The trained encoder in evaluation mode; equal arguments give equal weights.

    Raises:
        UserError: no trajectory, one of another shape, or a setting out of range.
    """
    sizes, how = config or VideoEncoderConfig(), training or VideoTraining()
    check_fields(sizes, "encoder")
    check_fields(how, "training")
    videos = _prepare_videos(frames, sizes)
    # frames and noise have their own generator; the weights take the global one, forked
    generator = torch.Generator().manual_seed(how.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(how.seed)
        encoder = VideoEncoder(sizes)
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=how.learning_rate, weight_decay=how.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate_at(step, how.steps))
    for step in range(1, how.steps + 1):
        clips, times = _draw_frames(videos, how, generator)
        # distances as fractions of the trajectory; see the module docstring for why not in frames
        wanted = how.scale * (times[:, :, None] - times[:, None]).abs()
        loss = functional.mse_loss(_pair_distances(encoder(clips)), wanted)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if on_step is not None:
            variance = max(wanted.var(correction=0).item(), VARIANCE_FLOOR)
            on_step(step, {"loss": loss.item(), "explained": 1 - loss.item() / variance})
    return encoder.eval()


def build_video_encoder(path: str, *, data: str, camera: str = "front", max_episodes: int = 0, **training: Any) -> Path:
    """Build function for configurations: train an encoder on the images of a dataset and save it."""
    reader = LeRobotReader(data)
    if camera not in reader.cameras:
        raise UserError(f"{data} has no camera '{camera}'; available: {', '.join(reader.cameras)}")
    count = min(max_episodes or reader.num_episodes, reader.num_episodes)
    videos = [reader.images(number, camera) for number in range(count)]
    encoder = train_video_encoder([video for video in videos if len(video) > 1], training=VideoTraining(**training))
    encoder.save_pretrained(path)
    return Path(path)


def _halve(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, 3, stride=2, padding=1), nn.GroupNorm(NORM_GROUPS, out), nn.GELU())


def _pair_distances(latents: Tensor) -> Tensor:
    """(B, T, T) distances; the floor keeps the square root's slope finite for equal latents."""
    squares = (latents[:, :, None] - latents[:, None]).square().sum(-1)
    return (squares + DISTANCE_FLOOR).sqrt()


def _rate_at(step: int, steps: int) -> float:
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def _draw_frames(videos: list[Tensor], how: VideoTraining, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy frames (batch, frames, H, W, 3) in 0..1, and their times (batch, frames) in 0..1."""
    chosen = torch.randint(len(videos), (how.batch,), generator=generator).tolist()
    # times are relative to each trajectory's own length
    lasts = torch.tensor([len(videos[number]) - 1 for number in chosen])[:, None]
    # random times rather than even ones, so that all distances in time occur
    index = (torch.rand(how.batch, how.frames, generator=generator) * lasts).round().long()
    frames = torch.stack([videos[number][row] for number, row in zip(chosen, index, strict=True)])
    noise = how.pixel_noise * torch.randn(frames.shape, generator=generator)
    return frames.float() / 255 + noise, index / lasts


def _prepare_videos(frames: Sequence[NDArray[np.uint8]], config: VideoEncoderConfig) -> list[Tensor]:
    if not len(frames):
        raise UserError("the video encoder needs at least one trajectory to train on")
    videos = []
    for number, video in enumerate(frames):
        array = np.asarray(video)
        if array.ndim != 4 or array.shape[-1] != 3 or array.dtype != np.uint8 or len(array) < 2:
            raise UserError(
                f"trajectory {number} is {array.dtype} of shape {array.shape}; expected uint8 (F >= 2, H, W, 3)"
            )
        videos.append(fit_frames(array, config))
    return videos


def fit_frames(frames: NDArray[np.uint8], config: VideoEncoderConfig) -> Tensor:
    """Resize frames (F, H, W, 3) uint8 to an encoder's height and width, regardless of their proportions.

    Latents are only compared with those of the same camera. Frames of the right size are unchanged.
    """
    images = torch.from_numpy(np.ascontiguousarray(frames))
    wanted = (config.height, config.width)
    if images.shape[1:3] == wanted:
        return images
    planes = images.permute(0, 3, 1, 2).float()
    resized = functional.interpolate(planes, wanted, mode="bilinear", align_corners=False, antialias=True)
    # rounded back to uint8, so that resized and original frames take the same path
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def _pool(latents: Tensor, pooling: str) -> Tensor:
    if pooling not in POOLINGS:
        raise UserError(f"pooling is {pooling!r}; must be one of {', '.join(POOLINGS)}")
    return POOLINGS[pooling](latents)


def _end(latents: Tensor) -> Tensor:
    # a mean over several frames: the last one alone may be blurred or hidden by the arm
    return latents[:, -math.ceil(latents.shape[1] / END_SHARE) :].mean(1)


def _mean_and_end(latents: Tensor) -> Tensor:
    return torch.cat([latents.mean(1), _end(latents)], dim=-1)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda latents: latents.mean(1),
    "end": _end,
    "mean_and_end": _mean_and_end,
}
