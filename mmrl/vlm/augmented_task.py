"""Questions made easier or harder for training: with a hint, with a given start of the answer, with noisy images."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrl.hub.video_sampling import Frames
from mmrl.vlm.task import VlmTask

IMAGES, VIDEOS = 0, 1
"""Streams of random numbers."""


@dataclass
class AugmentedTask(VlmTask):
    """A question with its augmentation in one training step."""

    given_start: str = ""
    """Text that the answer begins with."""
    hint_fraction: float = 0.0
    """Share of a reasoning trace in the question or in the start of its answer; 0 without a hint."""
    noise_sigma: float = 0.0
    """Standard deviation of the noise on images and frames, as a share of full contrast."""
    noise_seed: int = 0
    """Seed of the noise: the same question always looks the same."""

    @property
    def answer_start(self) -> str:
        """See `VlmTask`."""
        return self.given_start

    def load_images(self) -> list[Image.Image]:
        """The images with their noise."""
        images = super().load_images()
        if not self.noise_sigma:
            return images
        return [noisy_image(image, self.noise_sigma, self._rng(IMAGES, n)) for n, image in enumerate(images)]

    def shown_frames(self, frames: Frames, number: int) -> Frames:
        """The frames with their noise."""
        return noisy_frames(frames, self.noise_sigma, self._rng(VIDEOS, number)) if self.noise_sigma else frames

    def _rng(self, kind: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self.noise_seed, kind, number])


def augment_task(task: VlmTask, **changes: Any) -> AugmentedTask:
    """A copy of a task with some of its fields and those of `AugmentedTask` set."""
    own = {field.name: getattr(task, field.name) for field in fields(VlmTask)}
    return AugmentedTask(**(own | changes))


def noisy_image(image: Image.Image, sigma: float, rng: np.random.Generator) -> Image.Image:
    """Add Gaussian noise to an image."""
    pixels = np.asarray(image.convert("RGB"), np.float32)
    noise = rng.standard_normal(pixels.shape, np.float32) * (255 * sigma)
    return Image.fromarray((pixels + noise).round().clip(0, 255).astype(np.uint8))


def noisy_frames(frames: Frames, sigma: float, rng: np.random.Generator) -> Frames:
    """Add Gaussian noise to a video, independent for each frame."""
    pixels, metadata = frames
    noise = torch.from_numpy(rng.standard_normal(tuple(pixels.shape), np.float32))
    return (pixels + noise.to(pixels) * (255 * sigma)).clamp(0, 255), metadata


def rewrite_question(task: VlmTask, template: str, **values: str) -> list[dict[str, Any]]:
    """Chat turns of a task with another text in the last user turn."""
    turns = [{**turn, "content": list(turn["content"])} for turn in task.messages]
    content = next(turn for turn in reversed(turns) if turn["role"] == "user")["content"]
    last = max((index for index, item in enumerate(content) if item["type"] == "text"), default=len(content))
    question = content[last]["text"] if last < len(content) else ""
    # in one pass: a question may hold braces itself
    known = {"question": question, **values}
    text = re.sub(r"\{(\w+)\}", lambda match: known.get(match[1], match[0]), template)
    content[last : last + 1] = [{"type": "text", "text": text}]
    return turns


def reasoning_of(text: str, start: str, end: str) -> str:
    """The text between two marks in a response, from its beginning where the first mark is missing."""
    _, found, rest = text.partition(start)
    return (rest if found else text).partition(end)[0]


def partial_trace(text: str, fraction: float, tokenizer: Any) -> str:
    """The beginning of a reasoning trace."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(ids[: math.ceil(fraction * len(ids))])).rstrip("\N{REPLACEMENT CHARACTER}")
