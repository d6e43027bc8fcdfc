"""Options of difficulty-aware augmentation: which questions are made easier or harder in training, and by how much."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmrl.errors import ConfigError
from mmrl.fields import bounded, choice, only_with, rare
from mmrl.hub.video_sampling import Frames
from mmrl.vlm.data.task import VlmTask


@dataclass
class AugmentationSettings:
    """Hints for hard questions and noise for easy ones; a scale of 0 disables either."""

    measure: str = rare(choice("history", ("history", "probe")))
    """Source of a question's mean reward. history: its last group, so a question is changed from its second occurrence
    on; probe: extra samples drawn first in every step, which cost as much as any others."""
    probe_samples: int = rare(only_with(bounded(4, at_least=1), measure="probe"))
    """Number of samples per question that `measure: probe` draws."""
    window: int = rare(bounded(100, at_least=1))
    """Number of last samples whose mean reward a question is compared with."""
    hint_scale: float = bounded(1.0, at_least=0)
    """Fraction of a trace to reveal at a difficulty of 1 (in units of the reward); 0 = no hints."""
    hint_max: float = rare(bounded(0.5, above=0, at_most=1))
    """Maximum fraction of a trace to reveal."""
    traces: int = rare(bounded(4, at_least=1))
    """Number of traces sampled for each hard question, with the answer in the prompt; they count towards the cost."""
    max_hinted: int = bounded(0, at_least=0)
    """Maximum number of questions per step and process to sample traces for, hardest first; 0 = all hard ones."""
    hint_place: str = choice("question", ("question", "answer"))
    """question: the hint is part of the question; answer: the response begins with it, which also works for models that
    do not follow instructions."""
    hint_template: str = rare(only_with("{question} Hint: {hint}", hint_place="question"))
    """Question with a hint, for `hint_place: question`; {question} is replaced by the text of the question."""
    answer_template: str = "{question} The answer is {answer}. Explain how to find it."
    """Question with the answer, from which traces are sampled."""
    think_start: str = rare("<think>")
    """Text that a response's reasoning begins with."""
    think_end: str = rare("</think>")
    """Text that a response's reasoning ends with."""
    noise_scale: float = bounded(0.5, at_least=0)
    """Standard deviation of the noise at a difficulty of -1, as a fraction of full contrast; 0 = no noise."""
    noise_max: float = rare(bounded(0.3, above=0))
    """Maximum standard deviation of the noise."""

    @property
    def enabled(self) -> bool:
        """Whether anything is changed."""
        return self.hint_scale > 0 or self.noise_scale > 0

    def hint_fraction(self, difficulty: float) -> float:
        """Fraction of a trace to reveal, clip(hint_scale * difficulty, 0, hint_max)."""
        return min(max(self.hint_scale * difficulty, 0.0), self.hint_max)

    def noise_sigma(self, difficulty: float) -> float:
        """Noise of an easy question, clip(noise_scale * |difficulty|, 0, noise_max); 0 for hard ones."""
        return min(max(-self.noise_scale * difficulty, 0.0), self.noise_max)

    def validate(self) -> None:
        """Reject incomplete templates and empty markers; raises ConfigError."""
        for key, name in (("answer_template", "answer"), ("hint_template", "hint")):
            if f"{{{name}}}" not in getattr(self, key):
                raise ConfigError(f"augmentation.{key} is {getattr(self, key)!r}; it must contain {{{name}}}")
        for key in ("think_start", "think_end"):
            if not getattr(self, key):
                raise ConfigError(f"augmentation.{key} is empty; set the text, such as <think> and </think>")


IMAGES, VIDEOS = 0, 1
"""Streams of random numbers."""


@dataclass
class AugmentedTask(VlmTask):
    """A question with its augmentation in one training step."""

    given_start: str = ""
    """Text that the response begins with."""
    hint_fraction: float = 0.0
    """Fraction of a reasoning trace in the question or at the start of its response; 0 without a hint."""
    noise_sigma: float = 0.0
    """Standard deviation of the noise on images and frames, as a fraction of full contrast."""
    noise_seed: int = 0
    """Seed of the noise, so that the same question always looks the same."""

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
    """Chat turns of a task with a different text in the last user turn."""
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
    """The text between two markers in a response, from its beginning if the first marker is missing."""
    _, found, rest = text.partition(start)
    return (rest if found else text).partition(end)[0]


def partial_trace(text: str, fraction: float, tokenizer: Any) -> str:
    """The beginning of a reasoning trace."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return str(tokenizer.decode(ids[: math.ceil(fraction * len(ids))])).rstrip("\N{REPLACEMENT CHARACTER}")
