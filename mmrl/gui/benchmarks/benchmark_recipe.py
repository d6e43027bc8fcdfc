"""Evaluation of a vision-language model on published grounding benchmarks: `mmrl evaluate configs/gui/eval_....yaml`.

It trains nothing; `mmrl train` refuses it. The model is a folder, a hub id or the folder of a run, whose best
checkpoint is taken. Screens are resized once, by the rule of qwen-vl-utils, after a limit on visual tokens; the
question names the resized size; points are converted to pixels of the original screen and compared with the published
boxes. Answers are written as they come, so that a stopped evaluation continues with the remaining screens.

Source: InfiXAI/InfiGUI-G1 eval/eval.py (protocol: greedy, 1024 new tokens, 5600 visual tokens, first and any point).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields, choice, parts_of, rare
from mmrl.files import write_atomically
from mmrl.gui.benchmarks.benchmark_copies import BenchmarkConfig, load_benchmark
from mmrl.gui.benchmarks.benchmark_table import Benchmark, find_benchmark
from mmrl.gui.benchmarks.prompts import FROM_RUN, PRESETS, BenchmarkPrompt, PromptPreset, begin_answer, question
from mmrl.gui.grounding.answers import PARSERS, ParsedPoints, parse_answer, without_think
from mmrl.gui.grounding.coords import MAX_TOKENS, MIN_TOKENS, CoordinateSpace, Point, Resize
from mmrl.gui.grounding.samples import GroundingSample, Refusal, draw_answer
from mmrl.hub.images import image_pixels_option
from mmrl.runs.fingerprint import weights_digest
from mmrl.runs.records import Outcome, ResumableRows, SampleRecord, finite_or_none, short_digest
from mmrl.runs.statistics import wilson_interval
from mmrl.training.evaluation import Evaluation, Measure, Row, Trial, evaluate_tasks, part_metric
from mmrl.training.recipe import Step
from mmrl.training.settings import PRECISIONS
from mmrl.vlm.data.task import TaskError, VlmTask, with_start
from mmrl.vlm.engine.model_loading import limits_area
from mmrl.vlm.engine.vlm_policy import VlmPolicy, load_policy
from mmrl.vlm.engine.vlm_sampler import SamplerConfig, sample
from mmrl.vlm.model.model_config import ModelConfig

if TYPE_CHECKING:
    from PIL import Image

    from mmrl.vlm.data.prompt import Prompt


LONGEST_TEXT = 200


@dataclass(frozen=True)
class Scored:
    """The score of one response."""

    first: bool
    """Whether the first point is in the target, edges included: the usual accuracy."""
    any: bool
    """Whether any point is: InfiGUI-G1's exploration success."""
    wrong_format: bool
    """Whether no point could be read; such a response counts as incorrect and stays in every denominator."""
    points: tuple[Point, ...] = ()
    """Predicted points in pixels of the original image."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the sample in each column that results are broken down by."""


@dataclass(frozen=True)
class Share:
    """A fraction of samples with its 95% interval (Wilson)."""

    hits: float
    n: int

    @property
    def value(self) -> float:
        """The fraction; NaN without samples."""
        return self.hits / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper end."""
        return wilson_interval(self.hits, self.n)

    def metrics(self, name: str) -> dict[str, float]:
        """The fraction and the ends of its interval, keyed by a name."""
        low, high = self.interval
        return {name: self.value, f"{name}/low": low, f"{name}/high": high}


@dataclass(frozen=True)
class TableRow:
    """The samples that share one value in each of the given columns."""

    columns: tuple[str, ...]
    """Empty for all samples."""
    values: tuple[str, ...]
    first: Share
    any: Share
    wrong_format: Share
    answers: float
    """Mean number of points over the responses that have any; NaN if none has."""


@dataclass(frozen=True)
class Table:
    """Results of a benchmark."""

    rows: tuple[TableRow, ...]
    """All samples first, then each column, each pair of columns, and the detailed columns."""
    macro: tuple[float, float, float] | None
    """Unweighted mean over the cells of the published average, with its interval; None if samples are averaged."""

    @property
    def all(self) -> TableRow:
        """All samples."""
        return self.rows[0]

    def cells(self, *columns: str) -> list[TableRow]:
        """The rows of the given columns."""
        return [row for row in self.rows if row.columns == columns]


def score_answer(parsed: ParsedPoints, sample: GroundingSample, space: CoordinateSpace) -> Scored:
    """Compare a response with its target.

    A point outside the image is a miss; nothing is clipped, which would reward answers at the border. A refusal, all
    coordinates negative, is right only if nothing is to be found.
    """
    groups = sample.meta.get("groups", {})
    # The parser `reference` accepts items that are not pairs of numbers.
    numbers = (number for point in parsed.points for number in point)
    numeric = all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers)
    try:
        points = [sample.to_original(p, space) for p in parsed.points] if parsed.ok and numeric else []
    except OverflowError:  # an integer beyond the largest float
        points = []
    if not points:
        return Scored(first=False, any=False, wrong_format=True, groups=groups)
    hits = [sample.target.contains(point) for point in points]
    return Scored(hits[0], any(hits), False, tuple(points), groups)


def tabulate(benchmark: Benchmark, scored: Sequence[Scored]) -> Table:
    """Results of a benchmark, by the columns of its tables."""
    keys: list[tuple[str, ...]] = [(), *((column,) for column in benchmark.columns), *benchmark.crosses]
    keys += [(column,) for column in benchmark.details]
    # published averages give each cell the same weight
    macro = mean_of_shares([row.first for row in _rows(benchmark.macro, scored)]) if benchmark.macro else None
    return Table(tuple(row for key in keys for row in _rows(key, scored)), macro)


def mean_of_shares(shares: Sequence[Share]) -> tuple[float, float, float]:
    """Plain mean of independent fractions with its 95% interval, from the fractions' own intervals.

    Source: Zou and Donner 2008, "Construction of confidence limits about effect measures" (MOVER).
    """
    # an empty cell has no accuracy, and would make the mean NaN
    known = [share for share in shares if share.n]
    if not known:
        return math.nan, math.nan, math.nan
    mean = sum(share.value for share in known) / len(known)
    # the squared distances to the lower ends add up, as variances would
    below = math.sqrt(sum((share.value - share.interval[0]) ** 2 for share in known)) / len(known)
    above = math.sqrt(sum((share.interval[1] - share.value) ** 2 for share in known)) / len(known)
    return mean, max(mean - below, 0.0), min(mean + above, 1.0)


def metrics_of(benchmark: Benchmark, table: Table) -> dict[str, float]:
    """A table as metrics of an evaluation: all samples, and each value of the main columns."""
    found = table.all.first.metrics("accuracy/first") | table.all.any.metrics("accuracy/any")
    if table.macro is not None:
        found |= dict(zip(("accuracy/macro", "accuracy/macro/low", "accuracy/macro/high"), table.macro, strict=True))
    found |= {"answers/mean": table.all.answers, "answers/wrong_format": table.all.wrong_format.value}
    for column in benchmark.columns:
        for row in table.cells(column):
            found[part_metric("n", column, row.values[0])] = float(row.first.n)
            found |= row.first.metrics(part_metric("accuracy/first", column, row.values[0]))
    return found


def write_results(folder: Path, split: str, benchmark: Benchmark, table: Table, setting: Mapping[str, Any]) -> Path:
    """Write `<split>.json` and `<split>.md`, including `setting`: everything that the numbers depend on."""
    macro = None
    if table.macro is not None:
        macro = {"over": list(benchmark.macro), **dict(zip(("mean", "low", "high"), table.macro, strict=True))}
    content = {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "source": benchmark.source,
        "samples": table.all.first.n,
        "published_samples": benchmark.size,
        "macro": macro,
        "table": [_as_json(row) for row in table.rows],
        "setting": dict(setting),
    }
    # NaN is no JSON; finite_or_none has turned it into null
    text = json.dumps(finite_or_none(content), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(folder / f"{split}.json", text + "\n")
    path = folder / f"{split}.md"
    write_atomically(path, results_markdown(benchmark, table, setting))
    return path


def results_markdown(benchmark: Benchmark, table: Table, setting: Mapping[str, Any]) -> str:
    """The table as Markdown, with the setting if there is one; detailed columns are in the JSON only."""
    lines = [f"# {benchmark.title}", "", _summary(benchmark, table), ""]
    lines += ["| group | n | first point | 95% | any point | unreadable | points |", "|---|---|---|---|---|---|---|"]
    shown = {(), *((column,) for column in benchmark.columns), *benchmark.crosses}
    for row in table.rows:
        if row.columns in shown:
            name = " / ".join(row.values) if row.columns else "all"
            low, high = row.first.interval
            answers = "–" if math.isnan(row.answers) else f"{row.answers:.2f}"
            shares = f"{_percent(row.first.value)} | {_percent(low)} to {_percent(high)} | {_percent(row.any.value)}"
            shares += f" | {_percent(row.wrong_format.value)}"
            lines.append("| {} | {} | {} | {} |".format(name.replace("|", "\\|"), row.first.n, shares, answers))
    if setting:
        lines += ["", "Setting:", ""]
    for name, value in setting.items():
        text = " ".join(str(value).split())
        cut = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... (complete in the JSON)"
        lines.append(f"- {name}: {cut}")
    return "\n".join(lines) + "\n"


def _summary(benchmark: Benchmark, table: Table) -> str:
    low, high = table.all.first.interval
    parts = [f"First point in the target: {_percent(table.all.first.value)}% [{_percent(low)}, {_percent(high)}]"]
    if table.macro is not None:
        mean, low, high = table.macro
        cells = " x ".join(benchmark.macro)
        parts.append(f"mean over {cells}, as published: {_percent(mean)}% [{_percent(low)}, {_percent(high)}]")
    count = f"{table.all.first.n} samples"
    if benchmark.size is not None and benchmark.size != table.all.first.n:
        count += f" of {benchmark.size}: not comparable with published numbers"
    return f"{'; '.join(parts)}; {count}."


def _as_json(row: TableRow) -> dict[str, Any]:
    low, high = row.first.interval
    return {
        "group": dict(zip(row.columns, row.values, strict=True)),
        "n": row.first.n,
        "first": row.first.value,
        "low": low,
        "high": high,
        "any": row.any.value,
        "wrong_format": row.wrong_format.value,
        "answers": row.answers,
    }


def _rows(columns: tuple[str, ...], scored: Sequence[Scored]) -> list[TableRow]:
    """A row for each combination of values, in the order of first appearance; a sample may have several values."""
    parts: dict[tuple[str, ...], list[Scored]] = {} if columns else {(): list(scored)}
    for entry in scored if columns else ():
        # a sample with several values counts in each of their cells
        for values in itertools.product(*(entry.groups.get(column, ()) for column in columns)):
            parts.setdefault(values, []).append(entry)
    rows = []
    for values, part in parts.items():
        counts = [len(entry.points) for entry in part if entry.points]
        rows.append(
            TableRow(
                columns=columns,
                values=values,
                first=Share(sum(entry.first for entry in part), len(part)),
                any=Share(sum(entry.any for entry in part), len(part)),
                wrong_format=Share(sum(entry.wrong_format for entry in part), len(part)),
                answers=sum(counts) / len(counts) if counts else math.nan,
            )
        )
    return rows


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f}"


LOGGER = logging.getLogger("mmrl")
VISUAL_TOKENS = 5600
NEW_TOKENS = 1024
ENOUGH_POINTS = 20
MUCH_OUTSIDE = 0.3
"""A warning is logged if the fraction of first points outside their screens exceeds this."""


@dataclass
class GroundingEvaluationOptions:
    """Batching, parsing and display of responses."""

    batch_tasks: int = rare(bounded(8, at_least=1))
    """Number of screens per batch."""
    parser: str = rare(choice("robust", tuple(PARSERS), or_function=True))
    """Parser for points: robust accepts every format in `mmrl.gui.grounding.answers`, reference only InfiGUI-G1's."""
    records: int = rare(bounded(24, at_least=0))
    """Number of samples shown in the report (the first ones)."""
    images: int = rare(bounded(8, at_least=0))
    """Number of hits and of misses to write as PNG files (the first ones)."""


@dataclass
class BenchmarkCompute:
    """Precision and devices of the evaluation."""

    mixed_precision: str = choice("none", PRECISIONS)
    """Autocast: none or bf16."""
    threads: int = bounded(0, at_least=0)
    """CPU threads for torch; 0 leaves the number unchanged."""


@dataclass
class GreedyConfig:
    """Greedy decoding of responses."""

    max_new_tokens: int = bounded(NEW_TOKENS, at_least=1)
    """Maximum response length in tokens."""
    stop: list[str] = rare(field(default_factory=list))
    """Stop strings: a response ends with the token that completes one of them."""


@dataclass
class GroundingEvaluationConfig:
    """A model, its prompt, and the benchmarks."""

    recipe: str = ""
    """Name of the recipe: grounding_eval."""
    output_dir: str = "runs/grounding-eval"
    """Folder for responses, tables and images; existing responses are reused."""
    seed: int = 0
    """Seed for any random numbers in a model's code; decoding is greedy."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """Model; `path` may also be a run folder. `min_pixels` and `max_pixels` bound the resized screen. Default: 4 and
    16384 tokens."""
    visual_tokens: int = rare(bounded(VISUAL_TOKENS, at_least=0))
    """Larger screens are first scaled to this many visual tokens, as in InfiGUI-G1's evaluation; 0 disables it."""
    prompt: BenchmarkPrompt = field(default_factory=BenchmarkPrompt)
    """Prompt for the model."""
    eval_data: dict[str, BenchmarkConfig] = field(default_factory=dict)
    """Benchmarks, each under a name of your choice."""
    sampler: GreedyConfig = field(default_factory=GreedyConfig)
    """Maximum response length and stop strings."""
    evaluation: GroundingEvaluationOptions = field(default_factory=GroundingEvaluationOptions)
    """Batches, parser, images."""
    max_image_pixels: int = rare(image_pixels_option())
    """Maximum screen size in pixels, checked from the file header before decoding."""
    trainer: BenchmarkCompute = field(default_factory=BenchmarkCompute)
    """Precision and threads, under the same names as in training runs."""

    def validate(self) -> None:
        """Check the fields, and that there is a benchmark to evaluate; raises ValueError or UserError."""
        check_fields(self)
        if not self.eval_data:
            raise ValueError("eval_data is empty; add a benchmark: eval_data: {name: {benchmark: ..., path: ...}}")
        for data in self.eval_data.values():
            find_benchmark(data.benchmark)
        for part in parts_of(self):
            if hasattr(part, "validate"):
                part.validate()


@dataclass(frozen=True)
class GroundingTask:
    """A sample and its question."""

    sample: GroundingSample
    task: VlmTask


class GroundingEvaluation:
    """The recipe of `mmrl evaluate`."""

    def __init__(self, config: GroundingEvaluationConfig) -> None:
        self.config = config
        # before the model is loaded: a missing file should not cost minutes
        samples = {name: load_benchmark(data) for name, data in config.eval_data.items()}
        self.preset = config.prompt.resolved(config.model.path)
        self.policy: VlmPolicy = load_policy(config.model)
        self.policy.check_response_length(config.sampler.max_new_tokens)
        self.policy.check_reads_media("grounding benchmarks show screens")
        self.resize = self._make_resize()
        trained = self.policy.family.points
        # no file tells a model that was tuned to another space from its base, so its user has to say it
        if trained and trained != self.preset.space and not config.prompt.space and config.prompt.preset != FROM_RUN:
            presets = ", ".join([*(name for name, preset in PRESETS.items() if preset.space == trained), FROM_RUN])
            raise UserError(
                f"prompt.preset={config.prompt.preset} reads points as {self.preset.space}, but models of type "
                f"{self.policy.network.config.model_type} were trained to write {trained} (presets: {presets}); if "
                "this one was tuned to another space, set prompt.space"
            )
        self.eval_tasks = {name: self._tasks(found) for name, found in samples.items()}

    def evaluate(self, policy: VlmPolicy, split: str, accelerator: Accelerator, step: Step) -> Evaluation:
        """Run a benchmark and write its results."""
        measures, records = self.measures(policy, split, step), self.config.evaluation.records
        return evaluate_tasks(measures, self.eval_tasks[split], records, accelerator)

    def measures(self, policy: VlmPolicy, split: str, step: Step) -> list[GroundingMeasure]:
        """Accuracy on a benchmark."""
        config, tasks = self.config, self.eval_tasks[split]
        measure = GroundingMeasure(
            policy=policy,
            benchmark=find_benchmark(config.eval_data[split].benchmark),
            tasks=tasks,
            preset=self.preset,
            options=config.evaluation,
            sampler=SamplerConfig(max_new_tokens=config.sampler.max_new_tokens, stop=config.sampler.stop),
            split=split,
            run_dir=Path(config.output_dir),
            setting=self._setting(split),
        )
        return [measure]

    # the model is only evaluated, so there are no training weights to swap
    evaluating = staticmethod(nullcontext)

    def close(self) -> None:
        """Do nothing: nothing is left open."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A training run's state does not change an evaluation."""

    def _tasks(self, samples: list[GroundingSample]) -> list[GroundingTask]:
        # over the whole benchmark: the prompt must not reveal which screens lack their target
        asks_refusals = any(isinstance(entry.target, Refusal) for entry in samples)
        found = []
        for entry in samples:
            try:
                fitted = entry.fitted(self.resize)
            except ValueError as error:
                raise UserError(f"{entry.meta['place']}: {error}") from None
            task = question(fitted, self.preset, asks_refusals, self.config.max_image_pixels)
            found.append(GroundingTask(fitted, task))
        return found

    def _make_resize(self) -> Resize:
        """The one resize, and a processor that leaves its result as it is where it bounds areas."""
        layout, model = self.policy.layout, self.config.model
        factor = layout.patch_size * layout.merge_size
        shrink_to = self.config.visual_tokens * factor**2 or None
        low, high = model.min_pixels or MIN_TOKENS * factor**2, model.max_pixels or MAX_TOKENS * factor**2
        images = self.policy.processor.image_processor
        if limits_area(images):
            # the processor would otherwise resize what has been resized here already
            images.size = {"shortest_edge": low, "longest_edge": high}
        return Resize(factor, low, high, shrink_to)

    def _setting(self, split: str) -> dict[str, Any]:
        """Everything that a number depends on, for the reader of the results."""
        import transformers

        config, preset = self.config, self.preset
        return {
            "model": config.model.path,
            "dtype": config.model.dtype,
            "mixed_precision": config.trainer.mixed_precision,
            "prompt": config.prompt.preset,
            "system": preset.system,
            "user": preset.user,
            "prefix": preset.prefix,
            "coordinate_space": str(preset.space),
            "visual_tokens": config.visual_tokens,
            "min_pixels": self.resize.min_pixels,
            "max_pixels": self.resize.max_pixels,
            "factor": self.resize.factor,
            "max_new_tokens": config.sampler.max_new_tokens,
            "stop": list(config.sampler.stop),
            "decoding": "greedy",
            "parser": config.evaluation.parser,
            "suspicious_boxes": sum(bool(entry.sample.meta["suspicious"]) for entry in self.eval_tasks[split]),
            "language": config.eval_data[split].language,
            "transformers": transformers.__version__,
        }


@dataclass
class GroundingMeasure(Measure[GroundingTask]):
    """Accuracy of the first point and of any point, and unreadable responses, by the columns of the benchmark's tables.

    A sample that cannot be asked, such as a screen of unusable shape, counts as wrong: numbers of a benchmark are
    comparable only when it is evaluated whole.
    """

    policy: VlmPolicy
    benchmark: Benchmark
    tasks: Sequence[GroundingTask]
    """All samples of the split; rows refer to them by index."""
    preset: PromptPreset
    options: GroundingEvaluationOptions
    sampler: SamplerConfig
    split: str
    run_dir: Path
    setting: Mapping[str, Any]
    """Everything that the numbers depend on; written with them."""

    unit = "screens"

    @property
    def batch_size(self) -> int:
        """Number of screens per batch."""
        return self.options.batch_tasks

    def run(self, batch: Sequence[Trial[GroundingTask]], start: int) -> list[Row]:
        """Ask about some screens and read the responses."""
        # by index, as some of the batch may have no prompt
        prompts: dict[int, Prompt] = {}
        errors: dict[int, str] = {}
        for trial in batch:
            try:
                asked = self.policy.encode(trial.task.task)
                prompts[trial.index] = begin_answer(asked, self.preset.prefix, self.policy.turns)
            except TaskError as error:
                LOGGER.warning("%s cannot be asked and counts as incorrect: %s", trial.task.task.id, error)
                errors[trial.index] = f"{error.kind}: {error.message}"
        answers = dict(zip(prompts, self._answer(list(prompts.values())), strict=True))
        return [self._row(trial, answers.get(trial.index), errors.get(trial.index, "")) for trial in batch]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[GroundingTask]) -> dict[str, float]:
        """Accuracies with intervals, also by group; mean number of points, unreadable and unusable samples."""
        found = metrics_of(self.benchmark, tabulate(self.benchmark, [self._scored(row) for row in rows]))
        found["answers/outside"] = self._outside(rows)
        # samples that were not asked have no length
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
            outputs=[image] if (image := self._image(row)) is not None else [],
            reward=float(row["first"]),
            terms={"any": float(row["any"]), "points": float(len(row["points"]))},
            finish=row["error"] or row["finish"],
            correct=row["first"],
        )

    def outcome(self, row: Row) -> Outcome:
        """Whether the first point and any point hit."""
        groups = self._sample(row).meta.get("groups", {})
        # samples with several values in a column have no single cell
        parts = {name: groups[name][0] for name in self.benchmark.columns if len(groups.get(name, ())) == 1}
        scores = {"accuracy/first": float(row["first"]), "accuracy/any": float(row["any"])}
        return Outcome(self.tasks[row["index"]].task.id, scores, parts)

    def about(self) -> Row:
        """The benchmark, how it is asked and how responses are read."""
        # what differs between models is left out: the question is the same for all
        asked = {name: value for name, value in self.setting.items() if name not in ("model", "dtype", "transformers")}
        return {
            "suite": self.benchmark.name,
            "version": self.benchmark.source,
            "horizon": self.sampler.max_new_tokens,
            "decodings": {"greedy": 1},
            "asked": asked,
        }

    def entries(self, row: Row) -> list[Row]:
        """The response to a screen; a screen that cannot be asked counts as incorrect."""
        found = self.outcome(row)
        return [
            {
                "decoding": "greedy",
                "task": self.benchmark.name,
                "state": found.id,
                "success": bool(row["first"]),
                "return": float(row["first"]),
                "length": row["length"],
                "ending": row["error"] or row["finish"],
                "output": short_digest(row["response"].encode()),
                "scores": found.scores,
                "parts": found.parts,
            }
        ]

    def saved_rows(self, tasks: Sequence[GroundingTask], processes: int) -> ResumableRows:
        """The responses of these weights to these questions under these settings."""
        asked = [[entry.task.messages, entry.task.image_wh, str(entry.sample.target)] for entry in tasks]
        conditions = {
            **{name: value for name, value in self.setting.items() if name != "model"},
            "questions": short_digest(json.dumps(asked).encode()),
            "weights": weights_digest(self.policy)[:16],
            # batches of other sizes may round differently, and so answer differently
            "options": {"parser": self.options.parser, "batch_tasks": self.options.batch_tasks},
            "processes": processes,
        }
        return ResumableRows(self.run_dir / "answers", self.split, conditions)

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Write the tables, and the first hits and misses as images."""
        table = tabulate(self.benchmark, [self._scored(row) for row in rows])
        path = write_results(self.run_dir / "results", self.split, self.benchmark, table, self.setting)
        LOGGER.info("%s", results_markdown(self.benchmark, table, {}).rstrip())
        LOGGER.info("results: %s", path)
        folder = self.run_dir / "images" / self.split
        for kind, hit in (("hit", True), ("miss", False)):
            shown = [row for row in rows if bool(row["first"]) is hit]
            shown = [row for row in shown if not isinstance(self._sample(row).target, Refusal)]
            for number, row in enumerate(shown[: self.options.images], start=1):
                image = self._image(row)
                if image is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    image.save(folder / f"{kind}-{number:02d}.png")

    def _answer(self, prompts: Sequence[Prompt]) -> list[tuple[str, str, int]]:
        """Text, reason of its end and number of tokens of each greedy answer."""
        if not prompts:
            return []
        drawn = sample(self.policy, prompts, 1, self.sampler, None)
        # the prefix was given, not generated, but it is a part of the answer
        texts = [with_start(self.preset.prefix, text) for text in drawn.texts]
        return list(zip(texts, drawn.finish, drawn.mask.sum(1).int().tolist(), strict=True))

    def _row(self, trial: Trial[GroundingTask], answer: tuple[str, str, int] | None, unusable: str) -> Row:
        text, finish, length = answer or ("", "", 0)
        # a model that thinks may name points in its thoughts
        parsed = parse_answer(text, self.options.parser, no_think=without_think(text))
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

    def _sample(self, row: Row) -> GroundingSample:
        return self.tasks[row["index"]].sample

    def _scored(self, row: Row) -> Scored:
        points = tuple((x, y) for x, y in row["points"])
        groups = self._sample(row).meta.get("groups", {})
        return Scored(bool(row["first"]), bool(row["any"]), bool(row["wrong_format"]), points, groups)

    def _image(self, row: Row) -> Image.Image | None:
        """The screen with target and points drawn on it; None if it cannot be read."""
        try:
            image = self._sample(row).load_image()
        except (TaskError, ValueError):
            return None
        # records store infinite numbers as null
        points = [(x, y) for x, y in row["points"] if x is not None and y is not None]
        return draw_answer(image, self._sample(row).target, points, bool(row["first"]))

    def _outside(self, rows: Sequence[Row]) -> float:
        """Fraction of first points outside their screens, without refusals; a large one usually means a wrong space."""
        points = [(row["points"][0], self._sample(row).original_wh) for row in rows if row["points"]]
        points = [(point, size) for point, size in points if not Refusal().contains(point)]
        # edges count as inside, as in `Box.contains`
        outside = sum(not (0 <= x <= width and 0 <= y <= height) for (x, y), (width, height) in points)
        share = outside / len(points) if points else float("nan")
        if len(points) >= ENOUGH_POINTS and share > MUCH_OUTSIDE:
            LOGGER.warning(
                "%s: %.0f%% of the first points are outside their screens; does the model write %s (prompt.space)?",
                self.split,
                100 * share,
                self.preset.space,
            )
        return share
