"""What answers a question from the frames that were picked, and says whether the answer is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.hub.video_reading import VideoError
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.vlm.payload import Prompt, token_lists
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampler import sample
from mmrl.vlm.sampling import SamplerConfig, Samples
from mmrl.vlm.scoring import columns_of, score_texts
from mmrl.vlm.task import TaskError, VlmTask
from mmrl.vlm.tspo.config import AnswererConfig
from mmrl.vlm.tspo.policy import VideoFeatures
from mmrl.vlm.tspo.tasks import NeedleTask

ResultT = TypeVar("ResultT")


@dataclass
class Answers:
    """Answers of B rows."""

    texts: list[str]
    correct: list[float]
    """1 right, 0 wrong, NaN where a row could not be judged."""
    prompts: list[Prompt] = field(default_factory=list)
    """What a model read for each row; empty without one."""
    samples: Samples | None = None
    """What a model said; None without one."""
    result: RewardResult | None = None
    """What the reward function said; None without one."""


class Answerer(Protocol):
    """Answers questions from picked frames."""

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """Refuse questions that it cannot answer; raises UserError."""

    def answer(
        self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], generator: torch.Generator | None
    ) -> Answers:
        """Answer B questions."""

    def close(self) -> None:
        """Free worker processes."""


class OracleAnswerer:
    """Right where at least so many frames of the needle are picked; a rule that stands for a model in experiments."""

    def __init__(self, min_frames: int) -> None:
        self.min_frames = min_frames

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """Every question needs a needle."""
        without = next((task.id for task in tasks if not task.needle.any()), None)
        if without is not None:
            raise UserError(
                f"{key}: {without} has no needle, by which answerer.kind=oracle judges; use answerer.kind=vlm, or rows "
                "with a needle"
            )

    def answer(
        self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], generator: torch.Generator | None = None
    ) -> Answers:
        """See `Answerer`."""
        found = [
            sum(bool(task.needle[place]) for place in row) >= min(self.min_frames, int(task.needle.sum()))
            for task, row in zip(tasks, picks, strict=True)
        ]
        texts = [task.answer if right else "?" for task, right in zip(tasks, found, strict=True)]
        return Answers(texts, [float(right) for right in found])

    def close(self) -> None:
        """Nothing to free."""


class VlmAnswerer:
    """A vision-language model that reads the picked frames in the order of time."""

    def __init__(self, config: AnswererConfig, policy: VlmPolicy) -> None:
        self.config, self.policy = config, policy
        policy.check_response_length(config.sampler.max_new_tokens)
        self.rewards = RewardSum([replace(config.reward, weight=1.0)])

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """The reward function has to find its columns."""
        try:
            self.rewards.check_columns([*columns_of([task.task for task in tasks], [])])
        except UserError as error:
            raise UserError(f"{key}: {error}") from error

    def answer(
        self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], generator: torch.Generator | None
    ) -> Answers:
        """See `Answerer`."""
        asked = _asked(tasks, picks)
        prompts = [self.policy.encode(task, images) for task, images in asked]
        samples = self._sample(prompts, generator)
        tokens = token_lists(samples.response_ids, samples.mask)
        questions = [task for task, _ in asked]
        texts = [prompt.text for prompt in prompts]
        result = score_texts(self.rewards, TrainerState(), questions, texts, samples.texts, tokens)
        return Answers(samples.texts, list(result.total), prompts, samples, result)

    def close(self) -> None:
        """End the reward workers."""
        self.rewards.close()

    def _sample(self, prompts: Sequence[Prompt], generator: torch.Generator | None) -> Samples:
        options: SamplerConfig = replace(self.config.sampler, batch_rows=self.config.batch_rows)
        drawn = generator if generator is not None else torch.Generator()
        return sample(self.policy, prompts, 1, options, drawn, greedy=generator is None)


def make_answerer(config: AnswererConfig, reader: VlmPolicy | None) -> Answerer:
    """The rule, or the model that reads, which is frozen here unless it is trained."""
    if reader is None:
        return OracleAnswerer(config.min_frames)
    if not config.train:
        reader.eval().requires_grad_(False)
    return VlmAnswerer(config, reader)


def without_unreadable(
    tasks: Sequence[NeedleTask],
    features: Sequence[VideoFeatures],
    attempt: Callable[[Sequence[NeedleTask], Sequence[VideoFeatures]], ResultT],
    skip: Callable[[TaskError], None],
) -> ResultT | None:
    """What an attempt gives, repeated without each question whose picked frames cannot be read.

    Features may have been kept of a video that is gone or damaged since.
    """
    while tasks:
        try:
            return attempt(tasks, features)
        except TaskError as error:
            kept = [place for place, task in enumerate(tasks) if task.id != error.task_id]
            if len(kept) == len(tasks):
                raise
            skip(error)
            tasks, features = [tasks[place] for place in kept], [features[place] for place in kept]
    return None


def _asked(tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]]) -> list[tuple[VlmTask, list[Image.Image]]]:
    """Each row's question with the picked frames in the place of the video; a video is decoded once for all rows."""
    wanted: dict[int, set[int]] = {}
    for task, row in zip(tasks, picks, strict=True):
        wanted.setdefault(id(task), set()).update(row)
    pictures: dict[int, dict[int, Image.Image]] = {}
    for task in tasks:
        if id(task) not in pictures:
            try:
                pictures[id(task)] = task.video.pictures(sorted(wanted[id(task)]))
            except VideoError as error:
                raise TaskError(error.kind, task.id, f"its video cannot be used: {error}") from None
    return [
        (_with_images(task.task, len(row)), [pictures[id(task)][place] for place in row])
        for task, row in zip(tasks, picks, strict=True)
    ]


def _with_images(task: VlmTask, count: int) -> VlmTask:
    """The question with so many images where its video was."""

    def items(content: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for item in content:
            found += [{"type": "image"}] * count if item["type"] == "video" else [item]
        return found

    messages = [{**turn, "content": items(turn["content"])} for turn in task.messages]
    # the images themselves are given to the encoder; an empty text stands for each
    return replace(task, messages=messages, images=[""] * count, videos=[])


def correct_of(answers: Answers) -> Tensor:
    """(B,) float32, 1 for right answers and NaN for those that could not be judged."""
    return torch.tensor(answers.correct, dtype=torch.float32)
