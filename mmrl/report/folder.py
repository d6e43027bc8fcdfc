"""A run folder as read by the report, and the evaluations compared in its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import LARGEST_YAML, read_json_object, read_text, read_yaml
from mmrl.recipes import shown_name
from mmrl.runs.metrics import measured
from mmrl.runs.records import Outcome, read_outcomes
from mmrl.runs.statistics import SHARES
from mmrl.runs.tracking import describe_metric, metric_definitions, read_evaluations, read_metrics

EVALUATED = "evaluate"
"""Tag of evaluations appended by `mmrl evaluate`."""
COUNTED = ("step", "tag", "split", "cost/")
"""Keys of an evaluation that are not measurements."""
NUMBERS = ("layouts", "limit", "max_tasks", "seeds")
"""Options of a set of tasks that say how many of them there are."""
RESULT_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("status", "recipe", "objective", "objective_formula", "model_kind", "host", "device"), str),
    **dict.fromkeys(
        ("steps", "optimiser_steps", "optimiser_steps_without_gradient", "samples", "tokens", "seconds", "processes"),
        (int, float),
    ),
    **dict.fromkeys(("versions", "data", "best_checkpoint"), dict),
}
"""Fields of result.json shown in the report, and their types; values of other types are ignored."""


@dataclass(frozen=True)
class RunFolder:
    """Content of a run folder; missing parts are empty."""

    folder: Path
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        """Name, recipe and objective."""
        parts = [self.name, shown_name(self.recipe, self.objective), self.objective]
        return " · ".join(dict.fromkeys(str(part) for part in parts if part))

    def describe(self, metric: str) -> str:
        """Sentence that defines a metric of the run; empty if there is none."""
        return describe_metric(metric, metric_definitions(self.recipe)) or ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The resolved configuration; empty if it cannot be read."""
        try:
            found = read_yaml(self.folder / "config.yaml", errors="replace")
        except (OSError, UserError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def recipe(self) -> str:
        """The recipe's name, even if the run has not finished; empty if unknown."""
        found = self.result.get("recipe") or self.settings.get("recipe")
        return found if isinstance(found, str) else ""

    @property
    def objective(self) -> str:
        """The objective's name, even if the run has not finished; empty if unknown."""
        block = self.settings.get("objective")
        found = self.result.get("objective") or (block.get("preset") if isinstance(block, dict) else None)
        return found if isinstance(found, str) else ""

    def text(self, name: str) -> str:
        """Content of one of its files; empty if it is missing or too large to show."""
        try:
            return read_text(self.folder / name, LARGEST_YAML, errors="replace")
        except (OSError, UserError):
            return ""

    @property
    def splits(self) -> list[str]:
        """Evaluated splits, the headline split first."""
        return list(dict.fromkeys(record.get("split", "") for record in self.evaluations))

    @property
    def seen(self) -> list[str]:
        """Splits with tasks of the training, as the configuration says or because it repeats that of the training."""
        sets, data, screens = (self.settings.get(name) for name in ("eval_data", "data", "grounding"))
        listed = screens.get("seen") if isinstance(screens, dict) else None
        found = []
        for split in self.splits:
            own = sets.get(split) if isinstance(sets, dict) else None
            own = own if isinstance(own, dict) else {}
            rest = {name: value for name, value in own.items() if name not in NUMBERS}
            same = isinstance(data, dict) and bool(own) and all(data.get(name) == rest[name] for name in rest)
            if same or own.get("seen") or split in (listed or ()):
                found.append(split)
        return found

    @property
    def only_evaluated(self) -> bool:
        """Whether nothing was trained: `mmrl evaluate` of a model."""
        tags = {record.get("tag") for record in self.evaluations}
        return not self.metrics and tags == {EVALUATED}

    def shares(self, records: Sequence[Mapping[str, Any]]) -> list[str]:
        """Accuracies or success rates among the metrics of records, with `checkpoint.best_metric` first."""
        block = self.settings.get("checkpoint")
        best = block.get("best_metric") if isinstance(block, dict) else None
        return sorted(measured(records, SHARES), key=lambda name: name != best)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        """Evaluations of one split, ordered by step."""
        return [record for record in self.evaluations if record.get("split", "") == split]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation of a chain of runs, such as the one before the second run."""

    label: str
    split: str
    record: dict[str, Any]
    folder: Path

    @cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """Scores of each task; empty if the run did not store any."""
        return read_outcomes(self.folder, int(self.record["step"]), self.split)

    @property
    def count(self) -> str:
        """Number of tasks."""
        return f"{self.record['n']:.0f}" if math.isfinite(self.record.get("n", math.nan)) else "–"


def read_run(folder: Path) -> RunFolder:
    """Read all existing files of a run folder."""
    rows = read_evaluations(folder)
    # `mmrl evaluate` appends to the same file later, possibly at an older step: not a point of the curve
    evaluations = [record for record in rows if record.get("tag") != EVALUATED]
    if not evaluations:  # a model that was only evaluated: the newest numbers of each split
        evaluations = list({record.get("split", ""): record for record in rows}.values())
    run = RunFolder(folder, {}, read_metrics(folder), evaluations)
    try:
        result = read_json_object(folder / "result.json")
    except UserError:  # the run has not ended, or the file is damaged
        return run
    sound = {name: result[name] for name, kind in RESULT_TYPES.items() if isinstance(result.get(name), kind)}
    return replace(run, result=sound)


def evaluation_points(runs: Sequence[RunFolder], split: str) -> list[EvaluationPoint]:
    """First and last evaluation of each run of a chain."""
    points: list[EvaluationPoint] = []
    for run in runs:
        ends = _ends(run, split, several=len(runs) > 1)
        again = len(ends) > 1 and bool(points) and _repeats(ends[0].record, points[-1].record)
        points += ends[1:] if again else ends
    return points


def repeated_end(earlier: RunFolder, run: RunFolder) -> dict[str, Any] | None:
    """Last evaluation of an earlier run, if a run's first one only measured the same model again."""
    for split in run.splits:
        before, records = earlier.of_split(split), run.of_split(split)
        if before and len(records) > 1 and _repeats(records[0], before[-1]):
            return before[-1]
    return None


def estimate(record: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    """Value, low and high end of a metric; NaN if missing."""
    value, low, high = (float(record.get(key, math.nan)) for key in (name, f"{name}/low", f"{name}/high"))
    return value, low, high


def plain(value: float, sign: str = "") -> str:
    """Three decimals, or an exponent for smaller numbers."""
    return f"{value:{sign}.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:{sign}.1e}"


def _ends(run: RunFolder, split: str, several: bool) -> list[EvaluationPoint]:
    records = run.of_split(split)
    if not records:
        return []
    ends = [("before", records[0]), ("after", records[-1])]
    if len(records) == 1:
        # without its tag, as of earlier releases: by its step
        ends = [("after" if records[0]["step"] else "before", records[0])]
    training = run.name if several else "training"
    if run.only_evaluated:
        return [EvaluationPoint("evaluated", split, records[-1], run.folder)]
    # a run without an evaluation at its start has no score before training
    if ends[0][0] == "before" and records[0]["step"]:
        ends[0] = (f"step {records[0]['step']:,} of", records[0])
    return [EvaluationPoint(f"{when} {training}", split, record, run.folder) for when, record in ends]


def _repeats(record: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    found, before = (
        {name: value for name, value in each.items() if not name.startswith(COUNTED) and value == value}
        for each in (record, earlier)
    )
    shared = set(found) & set(before)
    return any(name not in ("n", "skipped", "unscored") for name in shared) and all(
        found[name] == before[name] for name in shared
    )
