"""Synthetic video clips of real handwritten digits, of any length, drawn frame by frame while they are encoded.

A clip is a list of shots. Each draws its own background, colours and motion from the seed of the clip and its place in
it, so a frame of a long clip does not depend on the shots before its own, and the same plan gives the same clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mmrl.hub.video_writing import VideoSettings, write_mp4
from mmrl.vlm.toy.digits import CELL_PX, scans_and_labels, texture

CUE_RGB = (0.9, 0.1, 0.1)
SMALLEST_PX = 40
"""Side of the smallest digit."""


@dataclass(frozen=True)
class Shot:
    """Consecutive frames of one thing."""

    frames: int
    """Number of frames."""
    scan: int | None = None
    """Place of a scan in `scans_and_labels`, whose digit drifts across the image; None shows none."""
    cue: bool = False
    """Whether the image flashes red, the cue for the next shot."""


def clip_frames(shots: Sequence[Shot], *, noise: float = 0.1, seed: int = 0) -> Iterator[np.ndarray]:
    """Draw the frames of a clip, one at a time.

    Args:
        shots: what is shown, in order.
        noise: strength of background texture and pixel noise, as a fraction of full contrast.
        seed: of backgrounds, colours, motion and noise.

    Yields:
        (56, 56, 3) uint8.
    """
    for number, shot in enumerate(shots):
        yield from _draw_shot(shot, noise, np.random.default_rng([seed, number]))


def write_clip(path: Path, shots: Sequence[Shot], *, fps: float, noise: float = 0.1, seed: int = 0) -> Path:
    """Encode a clip as mp4 while it is drawn; memory does not depend on its length.

    Args:
        path: file to write.
        shots: what is shown, in order.
        fps: frames a second.
        noise: see `clip_frames`.
        seed: see `clip_frames`.
    """
    # a key frame every ten seconds lets readers of long clips jump
    settings = VideoSettings(gop=max(1, round(10 * fps)))
    return write_mp4(path, clip_frames(shots, noise=noise, seed=seed), fps, settings)


def first_frames(shots: Sequence[Shot]) -> list[int]:
    """Number of the first frame of each shot."""
    return [sum(shot.frames for shot in shots[:index]) for index in range(len(shots))]


def _draw_shot(shot: Shot, noise: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    ground = texture(rng, CELL_PX, CELL_PX) * noise
    light, dark = rng.uniform(0.75, 1.0, 3), rng.uniform(0.0, 0.25, 3)
    if shot.cue:
        light, dark = np.array([0.2, 0.0, 0.0]), np.array(CUE_RGB)
    glyph = None if shot.scan is None else _glyph(shot.scan, int(rng.integers(SMALLEST_PX, CELL_PX - 3)))
    room = CELL_PX - (0 if glyph is None else len(glyph))
    first, last = rng.uniform(0, room, (2, 2))
    path = np.linspace(first, last, num=shot.frames)
    for top, left in path.round().astype(int):
        ink = ground + rng.normal(0.0, 0.2 * noise, ground.shape)
        if glyph is not None:
            ink[top : top + len(glyph), left : left + len(glyph)] += glyph
        pixels = dark + np.clip(ink, 0.0, 1.0)[..., None] * (light - dark)
        yield (pixels * 255).astype(np.uint8)


def _glyph(scan: int, side: int) -> np.ndarray:
    image = Image.fromarray((scans_and_labels()[0][scan] * 255).astype(np.uint8))
    return np.asarray(image.resize((side, side), Image.Resampling.BICUBIC)) / 255.0
