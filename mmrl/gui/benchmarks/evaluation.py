"""Greedy answers of a model to a grounding benchmark, scored, drawn and written, sharded and resumable."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmrl.fields import bounded, choice
from mmrl.gui.answers import PARSERS, parse_answer
from mmrl.gui.benchmarks.layout import Benchmark
from mmrl.gui.benchmarks.metrics import Scored, score_answer, tabulate
from mmrl.gui.benchmarks.prompts import PromptPreset, begin_answer
from mmrl.gui.benchmarks.results import metrics_of, results_markdown, write_results
from mmrl.gui.pictures import draw_answer
from mmrl.gui.samples import GroundingSample, Refusal
from mmrl.training.loop.evaluation import Measure, Row, Trial
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.resumable import ResumableRows, short_digest
from mmrl.training.record.samples import SampleRecord
from mmrl.vlm.sampler import sample
from mmrl.vlm.task import TaskError, VlmTask

if TYPE_CHECKING:
    from PIL import Image

    from mmrl.vlm.payload import Prompt
    from mmrl.vlm.policy import VlmPolicy
    from mmrl.vlm.sampling import SamplerConfig

LOGGER = logging.getLogger("mmrl")
ENOUGH_POINTS = 20
MUCH_OUTSIDE = 0.3
"""Share of first points outside their screens that is warned of."""


@dataclass
class GroundingEvaluationOptions:
    """How answers are drawn, read and shown."""

    batch_tasks: int = bounded(8, at_least=1)
    """Screens answered together."""
    parser: str = choice("robust", tuple(PARSERS))
    """How points are read: robust takes every format of `mmrl.gui.answers`, reference only InfiGUI-G1's."""
    records: int = bounded(24, at_least=0)
    """Samples shown in the report, the first ones."""
    pictures: int = bounded(8, at_least=0)
    """First hits and first misses written as PNG files, that many of each."""


@dataclass(frozen=True)
class GroundingTask:
    """A sample and the question that the model is asked."""

    sample: GroundingSample
    task: VlmTask


@dataclass
class GroundingMeasure(Measure[GroundingTask]):
    """Accuracy of the first point, of any point, and unreadable answers, by the columns of the benchmark's tables.

    A sample that cannot be asked, such as a screen of unusable shape, is wrong, not left out: a benchmark is evaluated
    whole or its number is another one.
    """

    policy: VlmPolicy
    benchmark: Benchmark
    tasks: Sequence[GroundingTask]
    """All samples of the split, which rows name by index."""
    preset: PromptPreset
    options: GroundingEvaluationOptions
    sampler: SamplerConfig
    split: str
    run_dir: Path
    setting: Mapping[str, Any]
    """What the numbers depend on; written with them."""

    unit = "screens"
    shows_progress = True

    @property
    def batch_size(self) -> int:
        """Screens that are answered together."""
        return self.options.batch_tasks

    def run(self, batch: Sequence[Trial[GroundingTask]], start: int) -> list[Row]:
        """Ask about some screens and read the answers."""
        prompts: dict[int, Prompt] = {}
        errors: dict[int, str] = {}
        prefix = self.policy.processor.tokenizer.encode(self.preset.prefix, add_special_tokens=False)
        for trial in batch:
            try:
                prompts[trial.index] = begin_answer(self.policy.encode(trial.task.task), prefix)
            except TaskError as error:
                LOGGER.warning("%s cannot be asked and counts as wrong: %s", trial.task.task.id, error)
                errors[trial.index] = f"{error.kind}: {error.message}"
        texts, finish, lengths = self._answer(list(prompts.values()))
        answers = dict(zip(prompts, zip(texts, finish, lengths, strict=True), strict=True))
        return [self._row(trial, answers.get(trial.index), errors.get(trial.index, "")) for trial in batch]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[GroundingTask]) -> dict[str, float]:
        """Accuracies with intervals, also by group; mean number of points, unreadable and unusable samples."""
        found = metrics_of(self.benchmark, tabulate(self.benchmark, [self._scored(row) for row in rows]))
        found["answers/outside"] = self._outside(rows)
        lengths = [row["length"] for row in rows if not row["unusable"]]
        found["response/length_greedy"] = sum(lengths) / len(lengths) if lengths else float("nan")
        return found | {"answers/unusable": float(sum(bool(row["unusable"]) for row in rows))}

    def record(self, row: Row) -> SampleRecord:
        """A screen with the target and the predicted points drawn in."""
        entry = self.tasks[row["index"]]
        return SampleRecord(
            id=f"{self.split} {entry.task.id}",
            prompt=entry.sample.instruction,
            response=row["response"],
            answer=str(entry.sample.target),
            outputs=[picture] if (picture := self._picture(row)) is not None else [],
            reward=float(row["first"]),
            terms={"any": float(row["any"]), "points": float(len(row["points"]))},
            finish=row["error"] or row["finish"],
            correct=row["first"],
        )

    def outcome(self, row: Row) -> Outcome:
        """Whether the first point and any point hit."""
        groups = self.tasks[row["index"]].sample.meta.get("groups", {})
        parts = {name: groups[name][0] for name in self.benchmark.columns if len(groups.get(name, ())) == 1}
        scores = {"accuracy/first": float(row["first"]), "accuracy/any": float(row["any"])}
        return Outcome(self.tasks[row["index"]].task.id, scores, parts)

    def saved_rows(self, tasks: Sequence[GroundingTask], processes: int) -> ResumableRows:
        """The answers of these weights to these questions under these settings."""
        asked = [[entry.task.messages, entry.task.image_wh, str(entry.sample.target)] for entry in tasks]
        conditions = {
            **{name: value for name, value in self.setting.items() if name != "model"},
            "questions": short_digest(json.dumps(asked).encode()),
            "weights": _weights_digest(self.policy),
            "options": {"parser": self.options.parser, "batch_tasks": self.options.batch_tasks},
            "processes": processes,
        }
        return ResumableRows(self.run_dir / "answers", self.split, conditions)

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Write the tables and the first hits and misses as pictures."""
        table = tabulate(self.benchmark, [self._scored(row) for row in rows])
        path = write_results(self.run_dir / "results", self.split, self.benchmark, table, self.setting)
        LOGGER.info("%s", results_markdown(self.benchmark, table, {}).rstrip())
        LOGGER.info("results: %s", path)
        if self.options.pictures:
            self._write_pictures(rows)

    def _answer(self, prompts: Sequence[Prompt]) -> tuple[list[str], list[str], list[int]]:
        if not prompts:
            return [], [], []
        drawn = sample(self.policy, prompts, 1, self.sampler, torch.Generator(), greedy=True)
        texts = [self.preset.prefix + text for text in drawn.texts]
        return texts, drawn.finish, drawn.mask.sum(1).int().tolist()

    def _row(self, trial: Trial[GroundingTask], answer: tuple[str, str, int] | None, unusable: str) -> Row:
        text, finish, length = answer or ("", "", 0)
        parsed = parse_answer(text, self.options.parser, no_think="<think>" not in text)
        scored = score_answer(parsed, trial.task.sample, self.preset.space)
        return {
            "index": trial.index,
            "repeat": trial.repeat,
            "id": trial.task.task.id,
            "instruction": trial.task.sample.instruction,
            "response": text,
            "finish": finish,
            "length": length,
            "error": "unusable" if unusable else parsed.error,
            "unusable": unusable,
            "points": [list(point) for point in scored.points],
            "first": scored.first,
            "any": scored.any,
            "wrong_format": scored.wrong_format,
        }

    def _scored(self, row: Row) -> Scored:
        points = tuple((x, y) for x, y in row["points"])
        groups = self.tasks[row["index"]].sample.meta.get("groups", {})
        return Scored(bool(row["first"]), bool(row["any"]), bool(row["wrong_format"]), points, groups)

    def _picture(self, row: Row) -> Image.Image | None:
        sample = self.tasks[row["index"]].sample
        try:
            image = sample.load_image()
        except (TaskError, ValueError):
            return None
        points = [(x, y) for x, y in row["points"] if x is not None and y is not None]
        return draw_answer(image, sample.target, points, bool(row["first"]))

    def _write_pictures(self, rows: Sequence[Row]) -> None:
        folder = self.run_dir / "pictures" / self.split
        for kind, hit in (("hit", True), ("miss", False)):
            shown = [row for row in rows if bool(row["first"]) is hit and not self._is_refusal(row)]
            for number, row in enumerate(shown[: self.options.pictures], start=1):
                picture = self._picture(row)
                if picture is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    picture.save(folder / f"{kind}-{number:02d}.png")

    def _outside(self, rows: Sequence[Row]) -> float:
        """Share of first points outside their screens, refusals left out; a large one tells a wrong space."""
        points = [(row["points"][0], self.tasks[row["index"]].sample.original_wh) for row in rows if row["points"]]
        points = [(point, size) for point, size in points if not Refusal().contains(point)]
        outside = sum(not (0 <= x <= width and 0 <= y <= height) for (x, y), (width, height) in points)
        share = outside / len(points) if points else float("nan")
        if len(points) >= ENOUGH_POINTS and share > MUCH_OUTSIDE:
            LOGGER.warning(
                "%s: %.0f %% of the first points are outside their screens; does the model write %s (prompt.space)?",
                self.split,
                100 * share,
                self.preset.space,
            )
        return share

    def _is_refusal(self, row: Row) -> bool:
        return isinstance(self.tasks[row["index"]].sample.target, Refusal)


def _weights_digest(policy: VlmPolicy) -> str:
    from mmrl.training.record.fingerprint import content_digest

    return content_digest(sorted(policy.state_dict().items()))
