"""Metrics of grounding benchmarks by group, micro and macro, and their tables as JSON and Markdown."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.gui.benchmarks.benchmark_table import Benchmark
from mmrl.gui.grounding.answers import ParsedPoints
from mmrl.gui.grounding.coords import CoordinateSpace, Point
from mmrl.gui.grounding.samples import GroundingSample
from mmrl.runs.records import finite_or_none
from mmrl.runs.statistics import wilson_interval
from mmrl.training.evaluation import part_metric

LONGEST_TEXT = 200


@dataclass(frozen=True)
class Scored:
    """The score of one answer."""

    first: bool
    """Whether the first point is in the target, edges included: the usual accuracy."""
    any: bool
    """Whether any point is: InfiGUI-G1's exploration success."""
    wrong_format: bool
    """Whether no point could be read; such an answer is wrong and stays in every denominator."""
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
        """Low and high end."""
        return wilson_interval(self.hits, self.n)

    def metrics(self, name: str) -> dict[str, float]:
        """The fraction and the ends of its interval under a name."""
        low, high = self.interval
        return {name: self.value, f"{name}/low": low, f"{name}/high": high}


@dataclass(frozen=True)
class TableRow:
    """The samples with one value in each of some columns."""

    columns: tuple[str, ...]
    """Empty for all samples."""
    values: tuple[str, ...]
    first: Share
    any: Share
    wrong_format: Share
    answers: float
    """Mean number of points over the answers that have any; NaN if none has."""


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
        """The rows of some columns."""
        return [row for row in self.rows if row.columns == columns]


def score_answer(parsed: ParsedPoints, sample: GroundingSample, space: CoordinateSpace) -> Scored:
    """Compare an answer with its target.

    A point outside the image is a miss; nothing is clipped, which would reward answers at the border. A refusal, all
    coordinates negative, is right only where nothing is to be found.
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
    """Results of a benchmark by the columns of its tables."""
    keys: list[tuple[str, ...]] = [(), *((column,) for column in benchmark.columns), *benchmark.crosses]
    keys += [(column,) for column in benchmark.details]
    macro = mean_of_shares([row.first for row in _rows(benchmark.macro, scored)]) if benchmark.macro else None
    return Table(tuple(row for key in keys for row in _rows(key, scored)), macro)


def mean_of_shares(shares: Sequence[Share]) -> tuple[float, float, float]:
    """Plain mean of independent shares with its 95 % interval, from the shares' own intervals.

    Source: Zou and Donner 2008, "Construction of confidence limits about effect measures" (MOVER).
    """
    known = [share for share in shares if share.n]
    if not known:
        return math.nan, math.nan, math.nan
    mean = sum(share.value for share in known) / len(known)
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
    """Write `<split>.json` and `<split>.md` with everything that the numbers depend on, the `setting`."""
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
    text = json.dumps(finite_or_none(content), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_atomically(folder / f"{split}.json", text + "\n")
    path = folder / f"{split}.md"
    write_atomically(path, results_markdown(benchmark, table, setting))
    return path


def results_markdown(benchmark: Benchmark, table: Table, setting: Mapping[str, Any]) -> str:
    """The table as Markdown, with the setting if there is one; detailed columns are in the JSON only."""
    lines = [f"# {benchmark.title}", "", _summary(benchmark, table), ""]
    lines += ["| group | n | first point | 95 % | any point | unreadable | points |", "|---|---|---|---|---|---|---|"]
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
        cut = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}... (whole in the JSON)"
        lines.append(f"- {name}: {cut}")
    return "\n".join(lines) + "\n"


def _summary(benchmark: Benchmark, table: Table) -> str:
    low, high = table.all.first.interval
    parts = [f"First point in the target: {_percent(table.all.first.value)} % [{_percent(low)}, {_percent(high)}]"]
    if table.macro is not None:
        mean, low, high = table.macro
        cells = " x ".join(benchmark.macro)
        parts.append(f"mean over {cells}, as published: {_percent(mean)} % [{_percent(low)}, {_percent(high)}]")
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
