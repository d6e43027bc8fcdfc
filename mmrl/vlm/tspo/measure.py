"""Held-out evaluation of picks: the share of the needle that they hold, and whether the answer is right.

Three strategies are measured on the same questions: the agent, evenly spaced frames, and the frames whose CLIP
embeddings are most like the question's. Where the needle is known, its own frames are answered from too: no strategy
can be expected to do better, and a model that fails there cannot read the picked frames.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mmrl.errors import RunError
from mmrl.hub.video_reading import VideoError
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial
from mmrl.vlm.data.task import TaskError
from mmrl.vlm.tspo.answerers import Answerer, without_unreadable
from mmrl.vlm.tspo.frame_policy import TspoPolicy, VideoFeatures
from mmrl.vlm.tspo.needle_tasks import NeedleTask
from mmrl.vlm.tspo.picking import METHODS, top_frames, uniform_frames
from mmrl.vlm.tspo.tspo_config import TspoEvaluationConfig

if TYPE_CHECKING:
    from PIL.Image import Image


CELL, BORDER, CAPTION, LINE = 84, 4, 14, 26
FEWEST_COLUMNS = 4
GROUND, INK, TRACK = (24, 26, 30), (235, 235, 235), (70, 74, 82)
INSIDE, OUTSIDE = (64, 190, 110), (200, 90, 80)
SHOWN = 32
"""Most frames that are shown; of more, evenly spread ones."""


def pick_strip(frames: Sequence[Image], picks: Sequence[int], needle: np.ndarray, seconds: Sequence[float]) -> Image:
    """Draw K picked frames in the order of time.

    `picks` are their rising indices among the T candidates, `needle` (T,) is True on frames of the needle, which are
    green on the line and have a green border, `seconds` (T) are the times of the candidates.
    """
    from PIL import Image as Images
    from PIL import ImageDraw

    shown = np.unique(np.linspace(0, len(picks) - 1, min(len(picks), SHOWN)).round().astype(int)).tolist()
    # about square, since reports show images side by side
    columns = max(FEWEST_COLUMNS, math.ceil(math.sqrt(len(shown) * (CELL + CAPTION) / CELL)))
    rows = -(-len(shown) // columns)
    width, height = CELL * columns, CELL + CAPTION
    strip = Images.new("RGB", (width, LINE + rows * height), GROUND)
    draw = ImageDraw.Draw(strip)
    _draw_line(draw, width, picks, needle)
    for cell, number in enumerate(shown):
        left, top = (cell % columns) * CELL, LINE + cell // columns * height
        colour = INSIDE if needle[picks[number]] else OUTSIDE if needle.any() else TRACK
        draw.rectangle((left + 1, top, left + CELL - 2, top + CELL - 1), fill=colour)
        inner = CELL - 2 * BORDER
        scale = inner / max(frames[number].size)
        frame = frames[number].resize(tuple(max(1, round(side * scale)) for side in frames[number].size))
        strip.paste(frame, (left + (CELL - frame.width) // 2, top + (CELL - frame.height) // 2))
        centre = (left + CELL // 2, top + CELL + CAPTION // 2)
        draw.text(centre, f"{seconds[picks[number]]:.1f} s", INK, anchor="mm")
    return strip


def picked_strip(task: NeedleTask, picks: Sequence[int]) -> list[Image]:
    """An image of the picked frames; empty if the video can no longer be read."""
    try:
        images = task.video.images(picks)
    except VideoError:
        return []
    return [pick_strip([images[pick] for pick in picks], picks, task.needle, task.video.seconds)]


def _draw_line(draw: object, width: int, picks: Sequence[int], needle: np.ndarray) -> None:
    scale = (width - 8) / len(needle)

    def span(first: float, stop: float, top: int, bottom: int, colour: tuple[int, int, int]) -> None:
        left = 4 + first * scale
        draw.rectangle((left, top, max(4 + stop * scale, left + 1), bottom), fill=colour)  # type: ignore[attr-defined]

    span(0, len(needle), 8, 16, TRACK)
    for frame in np.flatnonzero(needle).tolist():
        span(frame, frame + 1, 8, 16, INSIDE)
    for frame in picks:
        span(frame + 0.35, frame + 0.65, 3, 21, INK)


STRATEGIES = ("agent", "uniform", "clip_topk")
CEILING = "needle"


def needle_recall(needle: np.ndarray, picks: Sequence[int]) -> float:
    """Frames of the needle (T,) bool that were picked, over the most that K picks could hit; NaN without a needle."""
    most = min(int(needle.sum()), len(picks))
    return float(needle[list(picks)].sum()) / most if most else float("nan")


@dataclass
class PickMeasure(Measure[NeedleTask]):
    """Needle recall and accuracy of three strategies.

    The metrics are recall/<strategy> with a bootstrap interval, accuracy/<strategy> and accuracy/needle with Wilson's,
    and skipped.
    """

    policy: TspoPolicy
    encode: Callable[..., tuple[list[NeedleTask], list[VideoFeatures]]]
    """`TspoRecipe.encode`: returns the usable questions and their features."""
    answerer: Answerer
    evaluation: TspoEvaluationConfig
    count_of: Callable[[NeedleTask], int]
    """Frames that are picked for a question."""
    seed: int
    """Seed of the bootstrap."""
    skip: Callable[[TaskError], None]
    """Called with each question whose picked frames cannot be read."""

    @property
    def batch_size(self) -> int:
        """Questions that are answered together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[NeedleTask]], start: int) -> list[Row]:
        """Pick and answer with every strategy; questions whose video cannot be decoded are left out."""
        usable, features = self.encode([trial.task for trial in batch], allow_none=True)
        index_of = {id(trial.task): trial.index for trial in batch}
        rows = without_unreadable(usable, features, lambda some, own: self._rows(some, own, index_of), self.skip)
        return rows or []

    def _rows(
        self, usable: Sequence[NeedleTask], features: Sequence[VideoFeatures], index_of: Mapping[int, int]
    ) -> list[Row]:
        scores = self.policy.logits(features, 1.0).cpu()
        rows: list[Row] = [{"index": index_of[id(task)], "repeat": 0, "task": task, "scores": {}} for task in usable]
        for strategy in STRATEGIES:
            picks = [
                self._picks(strategy, task, own, scores[number, : len(own.frames)])
                for number, (task, own) in enumerate(zip(usable, features, strict=True))
            ]
            answers = self.answerer.answer(usable, picks, None)
            for row, chosen, text, correct in zip(rows, picks, answers.texts, answers.correct, strict=True):
                row["scores"][f"accuracy/{strategy}"] = [correct]
                row["scores"][f"recall/{strategy}"] = [needle_recall(row["task"].needle, chosen)]
                if strategy == "agent":
                    row |= {"picks": chosen, "response": text}
        # the ceiling: answers from as many frames of each needle as are picked
        known = [row for row in rows if row["task"].needle.any()]
        picks = [_of_needle(row["task"].needle, self.count_of(row["task"])) for row in known]
        right = self.answerer.answer([row["task"] for row in known], picks, None).correct if known else []
        for row, correct in zip(known, right, strict=True):
            row["scores"][f"accuracy/{CEILING}"] = [correct]
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[NeedleTask]) -> dict[str, float]:
        """Means with intervals; raises RunError if no question was usable."""
        if tasks and not rows:
            self.encode(tasks)  # raises with the cause
            raise RunError(f"the picked frames of none of {len(tasks)} held-out videos can be read")
        metrics = {"skipped": float(len(tasks) - len(rows))}
        for name in dict.fromkeys(name for row in rows for name in row["scores"]):
            values = [row["scores"].get(name, [float("nan")]) for row in rows]
            share = name.startswith("accuracy/")
            metrics |= with_interval(name, values, None if share else np.random.default_rng(self.seed))
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """Recall and accuracy of each strategy."""
        return Outcome(row["task"].id, {name: values[0] for name, values in row["scores"].items()})

    def record(self, row: Row) -> SampleRecord:
        """The frames that the agent picked, on a time line with the needle."""
        task, scores = row["task"], {name: values[0] for name, values in row["scores"].items()}
        return SampleRecord(
            id=task.id,
            prompt=task.query,
            response=row["response"],
            answer=task.answer,
            outputs=picked_strip(task, row["picks"]),
            terms=scores,
            finish=f"{len(row['picks'])} of {len(task.video)} frames",
            correct=scores["accuracy/agent"] == 1.0,
        )

    def _picks(self, strategy: str, task: NeedleTask, features: VideoFeatures, scores: Tensor) -> list[int]:
        count = min(self.count_of(task), len(features.frames))
        if strategy == "uniform":
            return uniform_frames(len(features.frames), count).tolist()
        if strategy == "clip_topk":
            similarity = torch.cosine_similarity(features.frames, features.text[None], dim=-1)
            return top_frames(similarity, count).tolist()
        return METHODS[self.evaluation.method](scores, count).tolist()


def _of_needle(needle: np.ndarray, count: int) -> list[int]:
    """Indices of at most `count` frames of a needle, evenly spaced."""
    frames = np.flatnonzero(needle)
    return frames[uniform_frames(len(frames), count).numpy()].tolist()  # type: ignore[no-any-return]
