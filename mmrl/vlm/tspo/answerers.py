"""Answerers: they answer a question from the picked frames, and judge the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.hub.video_reading import VideoError
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.training.recipe import NoUsableTasksError
from mmrl.vlm.data.prompt import Prompt, token_lists
from mmrl.vlm.data.task import TaskError, VlmTask, check_columns, score_texts
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.engine.vlm_sampler import Samples, sample
from mmrl.vlm.tspo.frame_policy import VideoFeatures
from mmrl.vlm.tspo.needle_tasks import NeedleTask
from mmrl.vlm.tspo.tspo_config import AnswererConfig

ResultT = TypeVar("ResultT")


@dataclass
class Answers:
    """Answers of B rows."""

    texts: list[str]
    correct: list[float]
    """1 for correct, 0 for incorrect, NaN if a row could not be judged."""
    prompts: list[Prompt] = field(default_factory=list)
    """The prompt of each row; empty without a model."""
    samples: Samples | None = None
    """The model's samples; None without one."""
    result: RewardResult | None = None
    """Rewards of the answers; None without a reward function."""


class Answerer(Protocol):
    """Answers questions from picked frames."""

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """Reject questions that it cannot answer; raises UserError."""

    def answer(self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], draws: Tensor | None) -> Answers:
        """Answer B questions with uniform draws (B, max_new_tokens); greedily without them."""

    def close(self) -> None:
        """Free worker processes."""


class OracleAnswerer:
    """Correct if at least this many frames of the needle are picked; a rule instead of a model, for experiments."""

    def __init__(self, min_frames: int) -> None:
        self.min_frames = min_frames

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """Every question needs a needle."""
        without = next((task.id for task in tasks if not task.needle.any()), None)
        if without is not None:
            raise UserError(
                f"{key}: {without} has no needle, which answerer.kind=oracle needs; use answerer.kind=vlm, or rows "
                "with a needle"
            )

    def answer(
        self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], draws: Tensor | None = None
    ) -> Answers:
        """See `Answerer`."""
        found = [
            sum(bool(task.needle[frame]) for frame in row) >= min(self.min_frames, int(task.needle.sum()))
            for task, row in zip(tasks, picks, strict=True)
        ]
        texts = [task.answer if right else "?" for task, right in zip(tasks, found, strict=True)]
        return Answers(texts, [float(right) for right in found])

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class VlmAnswerer:
    """A vision-language model that reads the picked frames in chronological order."""

    def __init__(self, config: AnswererConfig, policy: VlmPolicy) -> None:
        self.config = config
        self.policy = policy
        policy.check_response_length(config.sampler.max_new_tokens)
        policy.check_reads_media("answerer.model is shown frames")
        self.rewards = RewardSum([replace(config.reward, weight=1.0)])

    def check(self, tasks: Sequence[NeedleTask], key: str) -> None:
        """Check that the reward function finds its columns, and answers that it can read."""
        check_columns(self.rewards, {key: [task.task for task in tasks]})

    def answer(self, tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]], draws: Tensor | None) -> Answers:
        """See `Answerer`."""
        questions = _asked(tasks, picks)
        prompts = [self.policy.encode(task) for task in questions]
        config = replace(self.config.sampler, batch_rows=self.config.batch_rows)
        samples = sample(self.policy, prompts, 1, config, draws)
        tokens = token_lists(samples.response_ids, samples.mask)
        result = score_texts(self.rewards, TrainerState(), questions, samples.texts, tokens)
        return Answers(samples.texts, list(result.total), prompts, samples, result)

    def close(self) -> None:
        """Stop the reward workers."""
        self.rewards.close()


def make_answerer(config: AnswererConfig, reader: VlmPolicy | None) -> Answerer:
    """The rule, or the model that reads the frames; the model is frozen here unless it is trained."""
    if reader is None:
        return OracleAnswerer(config.min_frames)
    if not config.train:
        reader.eval().requires_grad_(False)
    return VlmAnswerer(config, reader)


def without_unanswerable(
    tasks: Sequence[NeedleTask],
    features: Sequence[VideoFeatures],
    attempt: Callable[[Sequence[NeedleTask], Sequence[VideoFeatures]], ResultT],
    skip: Callable[[TaskError], None],
) -> ResultT:
    """The result of an attempt, repeated without questions that cannot be answered from their picked frames.

    Features may be kept of a video that is gone or damaged since, and the frames may be more than the model can read.
    """
    total = len(tasks)
    last: TaskError | None = None
    while tasks:
        try:
            return attempt(tasks, features)
        except TaskError as error:
            kept = [n for n, task in enumerate(tasks) if task.id != error.place]
            if len(kept) == len(tasks):
                raise
            skip(error)
            last = error
            tasks, features = [tasks[n] for n in kept], [features[n] for n in kept]
    raise NoUsableTasksError(f"none of {total} questions could be answered from picked frames; the last one: {last}")


def _asked(tasks: Sequence[NeedleTask], picks: Sequence[Sequence[int]]) -> list[VlmTask]:
    """Each row's question with the picked frames instead of the video; each video is decoded once for all rows."""
    wanted: dict[int, set[int]] = {}
    for task, row in zip(tasks, picks, strict=True):
        wanted.setdefault(id(task), set()).update(row)
    images: dict[int, dict[int, Image.Image]] = {}
    for task in tasks:
        if id(task) not in images:
            try:
                images[id(task)] = task.video.images(sorted(wanted[id(task)]))
            except VideoError as error:
                raise TaskError(error.kind, task.id, f"its video cannot be used: {error}") from None
    return [
        _with_images(task.task, [images[id(task)][frame] for frame in row])
        for task, row in zip(tasks, picks, strict=True)
    ]


def _with_images(task: VlmTask, images: Sequence[Image.Image]) -> VlmTask:
    """The question with images instead of its video."""
    items = {"video": [{"type": "image"}] * len(images)}
    messages = [
        {**turn, "content": [new for item in turn["content"] for new in items.get(item["type"], [item])]}
        for turn in task.messages
    ]
    return replace(task, messages=messages, images=list(images), videos=[])
