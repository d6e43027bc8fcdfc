"""Options of the evaluation of answers, and the images of a task as reports show them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mmrl.fields import rare
from mmrl.hub.video_sampling import Frames, frame_times
from mmrl.rewards import RewardConfig
from mmrl.rewards.loading import load_function
from mmrl.training.evaluation import Measure
from mmrl.training.settings import EvaluationConfig
from mmrl.vlm.data.task import VlmTask, load_videos
from mmrl.vlm.engine.sampler import AnswerSampling

COLUMNS, ROWS = 4, 4
"""Frames of a strip, and strips of a video; of more frames some are shown, spread evenly."""
CELL, MARGIN, CAPTION = 112, 2, 16
"""Pixels: width of a frame with its margins, each margin, and height of its time."""
GROUND, INK = (24, 26, 30), (235, 235, 235)


def task_images(task: VlmTask, patch_size: int) -> list[Image.Image]:
    """Images of a task, then strips of its videos as sampled for patches of `patch_size` pixels."""
    strips = [strip for frames in load_videos(task, patch_size) for strip in frame_strips(frames)]
    return [*task.load_images(), *strips]


def frame_strips(frames: Frames) -> list[Image.Image]:
    """Lay out the frames of a video in strips of four, each frame with its time in seconds below."""
    pixels, times = frames[0], frame_times(frames)
    shown = np.unique(np.linspace(0, len(times) - 1, min(len(times), COLUMNS * ROWS)).round().astype(int)).tolist()
    cells = [_cell(pixels[number], times[number]) for number in shown]
    strips = []
    for first in range(0, len(cells), COLUMNS):
        part: Sequence[Image.Image] = cells[first : first + COLUMNS]
        strips.append(Image.new("RGB", (CELL * len(part), part[0].height), GROUND))
        for number, cell in enumerate(part):
            strips[-1].paste(cell, (number * CELL, 0))
    return strips


def _cell(pixels: object, time_s: float) -> Image.Image:
    """A frame (3, height, width) with its time."""
    frame = Image.fromarray(np.asarray(pixels).transpose(1, 2, 0).clip(0, 255).astype(np.uint8))
    scale = (CELL - 2 * MARGIN) / max(frame.size)
    width, height = (max(1, round(side * scale)) for side in frame.size)
    cell = Image.new("RGB", (CELL, height + 2 * MARGIN + CAPTION), GROUND)
    cell.paste(frame.resize((width, height)), ((CELL - width) // 2, MARGIN))
    ImageDraw.Draw(cell).text((CELL // 2, cell.height - CAPTION // 2), f"{time_s:.2f} s", INK, anchor="mm")
    return cell


FurtherMeasures = Callable[[Any], list[Measure[VlmTask]]]
"""Measures further to the answers of a held-out split, whose `AnswerMeasure` they are given."""


@dataclass
class VlmEvaluationConfig(EvaluationConfig):
    """Evaluation of answers: greedy and sampled, whole and by data column."""

    by: list[str] | None = rare(None)
    """Data columns, such as kind or hint, by whose values accuracy is shown too; empty: every column with 2 to 8 short
    values that several questions share; [] = none."""

    def check_further(self, splits: Collection[str], rewards: Sequence[object]) -> None:
        """Refuse further measures of unknown splits, or without rewards to score answers; raises ValueError."""

    def further_measures(self) -> FurtherMeasures:
        """The measures of a held-out split further to its answers; loads the models that they need."""
        return lambda answers: []


@dataclass
class AnswerScoring:
    """Sampling and scoring of answers to held-out questions, for recipes that do neither in training."""

    sampler: AnswerSampling = field(default_factory=AnswerSampling)
    """Lengths of the answers."""
    rewards: list[RewardConfig] = field(default_factory=list)
    """Reward terms that score the answers."""
    accuracy_reward: str = ""
    """Reward term whose value 1 counts as a right answer; empty = the last term."""


def scoring_evaluation(**options: Any) -> VlmEvaluationConfig:
    """`default_evaluation` with the options of `AnswerScoring`."""
    made: VlmEvaluationConfig = load_function("mmrl.vlm.critic.measures:ScoringEvaluationConfig")(**options)
    return made


def default_evaluation() -> VlmEvaluationConfig:
    """The options with all further measures; their room builds on this one, so it is found by name."""
    made: VlmEvaluationConfig = load_function("mmrl.vlm.critic.measures:CriticEvaluationConfig")()
    return made
