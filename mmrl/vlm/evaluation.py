"""Held-out accuracy of a vision-language model: one greedy answer and n sampled ones a question, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from PIL import Image, ImageDraw

from mmrl.fields import rare
from mmrl.hub.video_sampling import Frames, frame_times
from mmrl.rewards import RewardConfig, RewardResult
from mmrl.rewards.loading import load_function
from mmrl.runs.run_log import metric_label
from mmrl.runs.samples import Outcome, SampleRecord
from mmrl.training.evaluation import Measure, Row, Trial, part_metric, unscored, with_interval
from mmrl.training.processes import make_generator, stream_seed
from mmrl.training.scoring import RewardErrors, describe_failure, failure_of
from mmrl.training.settings import EvaluationConfig
from mmrl.vlm.data.prompt import Prompt, token_lists
from mmrl.vlm.data.task import VlmTask, load_videos
from mmrl.vlm.engine.policy import VlmPolicy
from mmrl.vlm.engine.sampler import AnswerSampling, SamplerConfig, Samples, sample

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
    """How answers to held-out questions are sampled and scored, where training does neither."""

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


class Encode(Protocol):
    """Function such as `VlmRecipe.encode`, which tokenises questions and counts those that cannot be used."""

    def __call__(
        self, policy: VlmPolicy, tasks: Sequence[VlmTask], *, allow_none: bool = False
    ) -> tuple[list[VlmTask], list[Prompt]]:
        """Return the usable questions and their prompts; raise RunError where there are none and that is no option."""


class ScoreTexts(Protocol):
    """Function such as `VlmRecipe.score_texts`."""

    def __call__(
        self, tasks: Sequence[VlmTask], prompts: Sequence[str], texts: Sequence[str], tokens: Sequence[list[int]]
    ) -> RewardResult:
        """Score responses with all rewards."""


@dataclass
class AnswerMeasure(Measure[VlmTask]):
    """Greedy and sampled accuracy.

    The draws follow from (seed, split) alone, so evaluations of different steps and arms are paired. The metrics are
    accuracy/greedy with its Wilson interval, accuracy/sampled with a bootstrap interval over questions, both also for
    each value of the data columns in `evaluation.by`, the means of the other reward terms as terms/<term>/<protocol>,
    the mean response lengths of all, right and wrong answers, and the counts skipped and unscored.
    """

    policy: VlmPolicy
    encode: Encode
    score: ScoreTexts
    errors: RewardErrors
    """Logs the first failure of each kind."""
    accuracy_reward: str
    """Reward term whose value 1 counts as a right answer."""
    evaluation: VlmEvaluationConfig
    sampler: SamplerConfig
    """Longest response, stop strings and batches; the temperature is that of the evaluation."""
    seed: int
    split: str
    parts: Sequence[Mapping[str, str]]
    """Value of each question of the split in the columns that it is broken down by."""
    broken_down: Sequence[str] = ()
    """Reward terms beside the accuracies that are broken down by these columns too."""
    picture: Callable[[VlmTask, str, bool], Image.Image] | None = None
    """Draws a question's answer, given whether it is right, for the report; None where answers are words alone."""

    @property
    def batch_size(self) -> int:
        """Questions that are answered together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[VlmTask]], start: int) -> list[Row]:
        """Answer questions in both modes; those that cannot be encoded are left out."""
        usable, prompts = self.encode(self.policy, [trial.task for trial in batch], allow_none=True)
        if not prompts:
            return []
        index_of = {trial.task.id: trial.index for trial in batch}
        rows: list[Row] = [
            {"index": index_of[task.id], "repeat": 0, "task": task, "prompt": prompt.text, "scores": {}}
            for task, prompt in zip(usable, prompts, strict=True)
        ]
        for mode, count in self._modes():
            generator = make_generator(self.seed, "evaluate", self.split, start)
            draws = None if mode == "greedy" else generator
            drawn = sample(self.policy, prompts, count, self.sampling(), draws)
            self._score(rows, drawn, mode, count)
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[VlmTask]) -> dict[str, float]:
        """Accuracies with intervals, response lengths and counts; raises RunError where no question was usable."""
        if tasks and not rows:
            self.encode(self.policy, tasks)  # raises with the cause
        metrics = {"skipped": float(len(tasks) - len(rows))}
        for name in rows[0]["scores"] if rows else ():
            metrics |= self._mean(name, rows, name)
        for mode, _ in self._modes() if rows else ():
            lengths = [length for row in rows for length in row[f"{mode}/length"]]
            metrics[f"response/length_{mode}"] = float(np.mean(lengths))
            metrics |= self._lengths_by_outcome(rows, mode)
        metrics["unscored"] = float(sum(unscored([row["scores"][name]]) for row in rows for name in self._accuracies()))
        for column, value, part in self._parts_of(rows):
            metrics[part_metric("n", column, value)] = float(len(part))
            for name in (*self._accuracies(), *self._broken_down()):
                metrics |= self._mean(part_metric(name, column, value), part, name)
        return metrics

    def outcome(self, row: Row) -> Outcome:
        """The mean scores of a question's answers."""
        scores = {name: [value for value in values if value == value] for name, values in row["scores"].items()}
        means = {name: float(np.mean(values)) for name, values in scores.items() if values}
        return Outcome(row["task"].id, means, dict(self.parts[row["index"]]))

    def failure(self, rows: Sequence[Row]) -> str:
        """Why no answer could be scored; empty where one could."""
        return describe_failure(rows, self.split)

    def record(self, row: Row) -> SampleRecord:
        """The first answer to a question."""
        task: VlmTask = row["task"]
        return SampleRecord(
            id=task.id,
            prompt=row["prompt"],
            response=row["response"],
            answer=str(task.columns.get("answer", "")),
            images=task_images(task, self.policy.layout.patch_size),
            outputs=[] if self.picture is None else [self.picture(task, row["response"], row["correct"])],
            reward=row["reward"],
            terms=row["terms"],
            finish=row["finish"],
            correct=row["correct"],
        )

    def _modes(self) -> list[tuple[str, int]]:
        modes = [("greedy", int(self.evaluation.greedy)), ("sampled", self.evaluation.samples)]
        return [(mode, count) for mode, count in modes if count]

    def _accuracies(self) -> list[str]:
        return [f"accuracy/{mode}" for mode, _ in self._modes()]

    def _broken_down(self) -> list[str]:
        return [_term_metric(term, mode) for term in self.broken_down for mode, _ in self._modes()]

    def _parts_of(self, rows: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
        """Column, value and rows of each part."""
        values: dict[str, set[str]] = {}
        for parts in self.parts:
            for column, value in parts.items():
                values.setdefault(column, set()).add(value)
        for column, found in values.items():
            for value in sorted(found):
                yield column, value, [row for row in rows if self.parts[row["index"]].get(column) == value]

    def _mean(self, metric: str, rows: Sequence[Row], name: str) -> dict[str, float]:
        """Mean of the scores of some rows with its interval: Wilson's for shares with one answer a question."""
        scores = [row["scores"][name] for row in rows]
        values = {value for task in scores for value in task if value == value}
        once = all(sum(value == value for value in task) <= 1 for task in scores) and values <= {0.0, 1.0}
        seed = stream_seed(self.seed, "bootstrap", self.split)
        return with_interval(metric, scores, None if once else np.random.default_rng(seed))

    def _lengths_by_outcome(self, rows: Sequence[Row], mode: str) -> dict[str, float]:
        """Mean lengths of the right and of the wrong answers, where there are any."""
        scored = [
            pair for row in rows for pair in zip(row[f"{mode}/length"], row["scores"][f"accuracy/{mode}"], strict=True)
        ]
        found = {
            outcome: [length for length, score in scored if score == value]
            for outcome, value in (("right", 1.0), ("wrong", 0.0))
        }
        return {f"response/length_{mode}_{outcome}": float(np.mean(part)) for outcome, part in found.items() if part}

    def sampling(self) -> SamplerConfig:
        """How answers are drawn in evaluations."""
        return SamplerConfig(
            max_new_tokens=self.sampler.max_new_tokens,
            temperature=self.evaluation.temperature,
            stop=self.sampler.stop,
            batch_rows=self.sampler.batch_rows,
            lean=self.sampler.lean,
        )

    def _score(self, rows: list[Row], drawn: Samples, mode: str, count: int) -> None:
        """Add the scores and lengths of `count` answers to each row, and the first answer where there is none yet."""
        repeated = [row for row in rows for _ in range(count)]
        lengths = drawn.mask.sum(1).int().tolist()
        tokens = token_lists(drawn.response_ids, drawn.mask)
        result = self.score([row["task"] for row in repeated], [row["prompt"] for row in repeated], drawn.texts, tokens)
        self.errors.warn(result)
        failure = failure_of(result)
        for place, row in enumerate(rows):
            first, stop = place * count, (place + 1) * count
            row["scores"].update(self._scores(result.terms, mode, slice(first, stop)))
            row[f"{mode}/length"] = lengths[first:stop]
            row["failure"] = failure and row.get("failure", failure)
            if "response" not in row:
                row |= self._first_answer(drawn, result.total[first], result.terms, first)

    def right(self, terms: Mapping[str, Sequence[float]]) -> list[float]:
        """1 for each right answer, 0 for each wrong one, NaN where it could not be scored."""
        return [value if value != value else float(value == 1.0) for value in terms[self.accuracy_reward]]

    def _scores(self, terms: Mapping[str, Sequence[float]], mode: str, own: slice) -> dict[str, list[float]]:
        """Scores of the answers to one question by metric; the accuracy comes first."""
        right = self.right(terms)[own]
        others = {
            _term_metric(name, mode): list(values[own])
            for name, values in terms.items()
            if name != self.accuracy_reward
        }
        return {f"accuracy/{mode}": right, **others}

    def _first_answer(self, drawn: Samples, reward: float, terms: Any, place: int) -> Row:
        return {
            "response": drawn.texts[place],
            "finish": drawn.finish[place],
            "reward": reward,
            "terms": {name: values[place] for name, values in terms.items()},
            "correct": terms[self.accuracy_reward][place] == 1.0,
        }


FurtherMeasures = Callable[[AnswerMeasure], list[Measure[VlmTask]]]
"""Measures of a held-out split further to its answers."""


def _term_metric(term: str, mode: str) -> str:
    return f"terms/{metric_label(term)}/{mode}"
