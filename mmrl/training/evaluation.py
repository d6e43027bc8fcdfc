"""Evaluation on held-out tasks: one driver for all domains, which supply only their measures.

The driver distributes the trials over the processes, runs them in batches, here or in workers, merges the rows in the
order of the tasks, and turns them into metrics with intervals, broken down by data columns, and samples. Where a
measure keeps its rows on disk, an interrupted evaluation continues with the remaining whole batches, so that it ends
as it would have without the interruption.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import Accelerator

from mmrl.runs.records import Outcome, ResumableRows, SampleRecord, load_record, mean_outcomes, store_record
from mmrl.runs.run_log import metric_label
from mmrl.runs.statistics import with_interval
from mmrl.runs.tracking import progress
from mmrl.training.processes import merge_lists, shard, stream_seed

MOST_VALUES = 8
"""Columns with more values than this are not used for breakdowns unless requested."""
LONGEST_VALUE = 40
NOT_PARTS = ("answer", "solution", "ground_truth", "completion", "chosen", "rejected", "completion_lengths")
"""Columns that contain an answer instead of the kind of question."""
LOGGER = logging.getLogger("mmrl")
TaskT = TypeVar("TaskT")
Key = tuple[int, int]
"""Index and repeat of a trial."""
Row = dict[str, Any]
"""Outcome of one trial, with the keys "index" and "repeat" of the trial and those that its measure needs."""


def parts_of_tasks(
    columns: Sequence[Mapping[str, Any]], by: Sequence[str] | None, answers: Collection[str] = NOT_PARTS
) -> list[dict[str, str]]:
    """Value of each task in the columns by which the evaluation is broken down: `by`, else all but `answers`."""
    # in the order of the first row, so that tables keep the columns' order
    names = list(dict.fromkeys(name for task in columns for name in task))
    missing = [name for name in by or () if name not in names]
    if missing and columns:
        raise ValueError(f"evaluation.by contains '{missing[0]}'; columns of the data: {', '.join(names) or 'none'}")
    kinds = [name for name in names if name not in answers and _is_part(name, columns)]
    chosen = kinds if by is None else list(by)
    # a task without the column is in no part
    return [{name: str(task[name]) for name in chosen if task.get(name) is not None} for task in columns]


def part_metric(metric: str, column: str, value: str) -> str:
    """Name of a metric over the tasks with one value of a column, such as accuracy/greedy/hint=wrong."""
    return f"{metric}/{metric_label(column)}={metric_label(value)}"


def _is_part(name: str, columns: Sequence[Mapping[str, Any]]) -> bool:
    values = [task[name] for task in columns if task.get(name) is not None]
    # long texts and numbers are no kinds of question
    if not all(isinstance(value, str | bool) and len(str(value)) <= LONGEST_VALUE for value in values):
        return False
    if all(task.get(name) == task.get("answer") for task in columns):  # such as the column of data.answer_key
        return False
    different = len(set(values))
    # at least two tasks a value on average, or the parts say nothing
    return 2 <= different <= MOST_VALUES and len(values) >= 2 * different


@dataclass
class Evaluation:
    """Result of one evaluation of one split."""

    metrics: dict[str, float]
    """Names such as accuracy/greedy with /low and /high interval ends, and `n`."""
    records: list[SampleRecord] = field(default_factory=list)
    """A few rollouts for the report, the same tasks at every evaluation."""
    failure: str = ""
    """Reason why none of the samples could be scored; empty if any could."""
    outcomes: list[Outcome] = field(default_factory=list)
    """Scores of each task, for paired comparisons."""
    entries: list[Row] = field(default_factory=list)
    """Episodes and responses as rows of `mmrl.runs.ledger`, without their split."""


@dataclass(frozen=True)
class Trial(Generic[TaskT]):
    """One of the repeats of a task."""

    index: int
    """Number of the task in its split."""
    repeat: int
    task: TaskT

    @property
    def key(self) -> Key:
        """Index and repeat, which identify the trial."""
        return self.index, self.repeat


class Measure(ABC, Generic[TaskT]):
    """A domain's sampling and scoring of held-out tasks under one protocol, and its metrics of the outcomes."""

    repeats: int = 1
    """Trials of each task."""
    unit: str = "tasks"
    """Name of the trials in messages."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Number of trials run together."""

    @abstractmethod
    def run(self, batch: Sequence[Trial[TaskT]], start: int) -> list[Row]:
        """Sample and score trials, without gradient.

        Args:
            batch: at most `batch_size` trials.
            start: place of the first one among the trials of this process.

        Returns:
            A row for each trial; trials that cannot be run are left out.
        """

    @abstractmethod
    def metrics(self, rows: Sequence[Row], tasks: Sequence[TaskT]) -> dict[str, float]:
        """Metrics from the rows of all processes.

        Args:
            rows: in the order of the tasks.
            tasks: all tasks of the split.

        Returns:
            Metrics by name; `n`, the number of tasks with a row, is added by the driver.
        """

    @abstractmethod
    def record(self, row: Row) -> SampleRecord:
        """A row as a sample for the report."""

    def take(self, rows: Sequence[Row]) -> None:
        """Remove from a batch's rows what only this process keeps, such as videos; batches come in order."""

    def failure(self, rows: Sequence[Row]) -> str:
        """Reason why none of the samples could be scored; empty if any could."""
        return ""

    def outcome(self, row: Row) -> Outcome | None:
        """Scores of a trial, for paired comparisons with other evaluations of its task; None stores nothing."""
        return None

    def about(self) -> Row:
        """Settings of the measure that affect its numbers, for the ledger's protocol.

        `suite`, `version`, `horizon` and `replan` are also columns of its rows. `decodings` has the number of answers
        to a trial by decoding, `bootstrap` the seed of intervals.
        """
        return {}

    def entries(self, row: Row) -> list[Row]:
        """Rows of the ledger that a row represents: one for an episode, one for each answer to a question."""
        found = self.outcome(row)
        return [{"decoding": ""} | ({} if found is None else {"state": found.id, **_scores(found)})]

    def saved_rows(self, tasks: Sequence[TaskT], processes: int) -> ResumableRows | None:
        """File of finished rows, from which an interrupted evaluation continues; None if there is none.

        A row with a true "failed" counts as not run; its batch is run again. Samples for the report are kept with their
        rows, under "record".
        """
        return None

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Report and write additional results; called in the first process once all rows are available.

        Args:
            rows: of all processes.
            saved: what `saved_rows` returned.
        """


def held_out_tasks(config: Any, load: Callable[[Any, str], Sequence[TaskT]]) -> dict[str, Sequence[TaskT]]:
    """Tasks of each split of `eval_data`, up to `evaluation.max_tasks`; `load` gets the data and its key."""
    # 0 means all
    limit = config.evaluation.max_tasks or None
    return {name: load(data, f"eval_data.{name}")[:limit] for name, data in config.eval_data.items()}


class EpisodeMeasure(Measure[TaskT]):
    """Success over episodes under one protocol for choosing actions.

    A row is an episode with its "success". An episode without a result is "failed": it is counted, its `outcome` is
    None, and it is excluded from all other numbers.
    """

    unit = "episodes"
    protocol: str
    """greedy or sampled, with additions of a domain package; the last part of the metrics' names."""
    seed: int
    split: str

    @abstractmethod
    def state_of(self, row: Row) -> str:
        """Name of the initial state; repeats of the same state are not independent."""

    @abstractmethod
    def columns(self, row: Row) -> Row:
        """Columns of the ledger that only the domain package knows: task, seed, return, length, ending, output."""

    def entries(self, row: Row) -> list[Row]:
        """The episode; `success` is None if it came to no result."""
        found = self.outcome(row)
        # no outcome: the episode has no result
        success = None if found is None else row["success"]
        known = {"decoding": self.protocol, "state": self.state_of(row), "success": success, **self.columns(row)}
        return [known if found is None else known | _scores(found)]

    @property
    def greedy(self) -> bool:
        """Whether actions are deterministic, so that an initial state needs only one episode."""
        return self.protocol.startswith("greedy")

    def seed_of(self, *trial: int | str) -> int:
        """Seed of an episode, the same at every step."""
        # without the step, so that evaluations of different steps run the same episodes
        return stream_seed(self.seed, "evaluate", self.split, *trial)

    def success_rates(self, rows: Sequence[Row], column: str, fewest: int = 1) -> dict[str, float]:
        """success/<protocol> with its interval, also for each value of columns with at least `fewest` values.

        The interval is Wilson's for greedy episodes, and a bootstrap over initial states for sampled ones.
        """
        name = f"success/{self.protocol}"
        parts = {name: rows}
        # in the order of rows, which is that of the tasks
        values = dict.fromkeys(row[column] for row in rows)
        for value in values if len(values) >= fewest else ():
            parts[f"{name}/{metric_label(value)}"] = [row for row in rows if row[column] == value]
        rates: dict[str, float] = {}
        for metric, part in parts.items():
            by_state: dict[str, list[float]] = {}
            for row in (row for row in part if not row["failed"]):
                by_state.setdefault(self.state_of(row), []).append(float(row["success"]))
            # resampled with the same seed at every step, so that intervals differ by outcomes alone
            rng = None if self.greedy else np.random.default_rng(self.seed)
            rates |= with_interval(metric, list(by_state.values()), rng)
        return rates


Batch = tuple[int, Sequence[Trial[Any]]]
"""Index of the first trial among those of this process, and the trials that are run together."""
Elsewhere = Callable[[int, Sequence[Batch]], Iterator[Sequence[Row]]]
"""Runs batches of a measure, given by its number, in workers; returns the rows of each batch, in order."""


def evaluate_tasks(
    measures: Sequence[Measure[TaskT]],
    tasks: Sequence[TaskT],
    records: int,
    accelerator: Accelerator,
    elsewhere: Elsewhere | None = None,
) -> Evaluation:
    """Evaluate held-out tasks under one or several protocols.

    Args:
        measures: one for each protocol; the first supplies `n` and the samples.
        tasks: held-out tasks.
        records: samples to keep, those of the first rows.
        accelerator: processes to share the work with.
        elsewhere: workers that run this process's batches; None runs them here.

    Returns:
        The metrics of all measures, the same on every process, and the samples.
    """
    metrics: dict[str, float] = {}
    samples: list[SampleRecord] = []
    failure = ""
    outcomes: list[Outcome] = []
    entries: list[Row] = []
    for number, measure in enumerate(measures):
        saved = measure.saved_rows(tasks, accelerator.num_processes)
        # samples of the first measure only: the others answer the same questions
        wanted = 0 if number else records
        run = functools.partial(_here, measure) if elsewhere is None else functools.partial(elsewhere, number)
        rows, taken = _run_all(measure, tasks, saved, wanted, accelerator, run)
        # of the first measure, which is the main result
        metrics = metrics or {"n": float(len({row["index"] for row in rows}))}
        metrics |= measure.metrics(rows, tasks)
        failure = failure or measure.failure(rows)
        samples += [_sample(measure, row, saved, taken) for row in rows[:wanted]]
        outcomes += [outcome for row in rows if (outcome := measure.outcome(row)) is not None]
        entries += ledger_rows(number, measure, rows)
    # repeats and protocols of a task are one outcome, for comparisons over tasks
    return Evaluation(metrics, samples, failure, mean_outcomes(outcomes), entries)


def ledger_rows(number: int, measure: Measure[Any], rows: Sequence[Row]) -> list[Row]:
    """Rows of the ledger for the rows of one of the measures of a split."""
    return [
        {"measure": number, "index": row["index"], "repeat": row["repeat"], "answer": 0, **entry}
        for row in rows
        for entry in measure.entries(row)
    ]


def batch_of(measure: Measure[TaskT], tasks: Sequence[TaskT], key: Key, processes: int) -> Batch:
    """The batch in which a trial was run, and its position among those of its process."""
    # the trials of that process, as `shard` deals them
    mine = all_trials(measure, tasks)[(key[0] * measure.repeats + key[1]) % processes :: processes]
    return next(batch for batch in _cut(mine, measure.batch_size) if any(trial.key == key for trial in batch[1]))


def all_trials(measure: Measure[TaskT], tasks: Sequence[TaskT]) -> list[Trial[TaskT]]:
    """The trials of a measure, in order."""
    return [Trial(index, repeat, task) for index, task in enumerate(tasks) for repeat in range(measure.repeats)]


def _scores(outcome: Outcome) -> Row:
    return {"scores": outcome.scores, "parts": outcome.parts}


def mean_scores(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Means of the scores of a task by name, ignoring samples that could not be scored (NaN)."""
    known = {name: [value for value in values if value == value] for name, values in scores.items()}
    return {name: float(np.mean(values)) for name, values in known.items() if values}


def unscored(values: Sequence[Sequence[float]]) -> int:
    """Number of samples that could not be scored: those whose score is NaN."""
    return sum(value != value for task in values for value in task)


def _run_all(
    measure: Measure[TaskT],
    tasks: Sequence[TaskT],
    saved: ResumableRows | None,
    records: int,
    accelerator: Accelerator,
    run: Callable[[Sequence[Batch]], Iterator[Sequence[Row]]],
) -> tuple[list[Row], set[Key]]:
    """Rows of all processes and those of an earlier evaluation that was interrupted, with the keys of the latter."""
    trials = all_trials(measure, tasks)
    known = {} if saved is None else _known(saved, accelerator)
    batches = list(_cut(shard(trials, accelerator), measure.batch_size))
    # only whole batches: numbers may depend on what is computed together
    left = [(start, batch) for start, batch in batches if not all(trial.key in known for trial in batch)]
    # of all processes: a batch that one repeats is repeated for all
    again = set(merge_lists([trial.key for _, batch in left for trial in batch], accelerator))
    taken = ({trial.key for trial in trials} & known.keys()) - again
    if saved is not None and taken:
        LOGGER.info("%d of %d %s were read from %s", len(taken), len(trials), measure.unit, saved.path)
    shown = {trial.key for trial in trials[:records]}
    rows = [
        *(known[key] for key in taken),
        *merge_lists(_run_mine(measure, left, saved, shown, accelerator, run), accelerator),
    ]
    # in the order of tasks, whichever process had them
    rows.sort(key=lambda row: (row["index"], row["repeat"]))
    if accelerator.is_main_process:
        if saved is not None:
            # one file from those of all processes
            saved.write(rows)
        measure.finish(rows, saved)
    return rows, taken


def _known(saved: ResumableRows, accelerator: Accelerator) -> dict[Key, Row]:
    """Rows of an earlier evaluation by index and repeat, the same ones on every process."""
    # read by one process, since the files may not be on the disks of the others
    rows = merge_lists(saved.read() if accelerator.is_main_process else [], accelerator)
    return {(row["index"], row["repeat"]): row for row in rows if _counts(row)}


def _counts(row: Row) -> bool:
    return not row.get("failed") and all(type(row.get(name)) is int for name in ("index", "repeat"))


def _here(measure: Measure[Any], batches: Sequence[Batch]) -> Iterator[Sequence[Row]]:
    for start, batch in batches:
        # measures sample and score; nothing of it is trained
        with torch.no_grad():
            rows = measure.run(batch, start)
        yield rows


def _run_mine(
    measure: Measure[TaskT],
    left: Sequence[Batch],
    saved: ResumableRows | None,
    shown: Collection[Key],
    accelerator: Accelerator,
    run: Callable[[Sequence[Batch]], Iterator[Sequence[Row]]],
) -> list[Row]:
    """Run batches; with the rows that are kept, the samples of those that the report shows are kept."""
    log = None if saved is None else saved.appender(accelerator.process_index, accelerator.num_processes)
    found: list[Row] = []
    for rows in _with_progress(run(left), left, measure.unit) if accelerator.is_main_process else run(left):
        # before rows are written: what only this process needs is taken out of them
        measure.take(rows)
        found += rows
        for row in rows:
            if saved is not None and log is not None:
                # an image cannot be made again from a stored row
                if (row["index"], row["repeat"]) in shown:
                    row["record"] = store_record(saved.images, measure.record(row))
                log.append(saved.saved(row))
    if log is not None:
        log.close()
    return found


def _sample(measure: Measure[TaskT], row: Row, saved: ResumableRows | None, taken: Collection[Key]) -> SampleRecord:
    """A row as a sample; one that was taken over comes with the sample that was kept with it."""
    if saved is not None and (row["index"], row["repeat"]) in taken and isinstance(row.get("record"), dict):
        return load_record(saved.images, row["record"])
    return measure.record(row)


def _cut(trials: Sequence[Trial[TaskT]], size: int) -> Iterator[Batch]:
    return ((start, trials[start : start + size]) for start in range(0, len(trials), size))


def _with_progress(found: Iterator[Sequence[Row]], batches: Sequence[Batch], unit: str) -> Iterator[Sequence[Row]]:
    """The rows of batches as they come."""
    if len(batches) <= 1:
        yield from found
        return
    with progress(f"evaluation, {unit}", sum(len(batch) for _, batch in batches)) as advance:
        for (_, batch), rows in zip(batches, found, strict=True):
            advance(len(batch))
            yield rows
