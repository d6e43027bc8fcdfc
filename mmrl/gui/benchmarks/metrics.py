"""Metrics of grounding: first point in the target, any point in it, unreadable answers; by group, micro and macro."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmrl.gui.answers import ParsedAnswer
from mmrl.gui.benchmarks.layout import Benchmark
from mmrl.gui.coords import CoordinateSpace, Point
from mmrl.gui.samples import GroundingSample
from mmrl.training.record.statistics import wilson_interval


@dataclass(frozen=True)
class Scored:
    """What one answer scored."""

    first: bool
    """Whether the first point is in the target, edges included: the usual accuracy."""
    any: bool
    """Whether any point is: what InfiGUI-G1 calls exploration success."""
    wrong_format: bool
    """Whether no point could be read; such an answer is wrong and stays in every denominator."""
    points: tuple[Point, ...] = ()
    """Predicted points in pixels of the original image."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Values of the sample in each column that results are broken down by."""


@dataclass(frozen=True)
class Share:
    """A share of samples with its 95 % interval (Wilson)."""

    hits: float
    n: int

    @property
    def value(self) -> float:
        """The share; NaN without samples."""
        return self.hits / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Low and high end."""
        return wilson_interval(self.hits, self.n)


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
    """Mean number of points over the answers that have any; NaN where none has."""


@dataclass(frozen=True)
class Table:
    """Results of a benchmark."""

    rows: tuple[TableRow, ...]
    """All samples first, then each column, each pair of columns, and the detailed columns."""
    macro: tuple[float, float, float] | None
    """Plain mean over the cells that the published average is taken over, with its interval; None where published
    averages are over samples."""

    @property
    def all(self) -> TableRow:
        """All samples."""
        return self.rows[0]

    def cells(self, *columns: str) -> list[TableRow]:
        """The rows of some columns."""
        return [row for row in self.rows if row.columns == columns]


def score_answer(parsed: ParsedAnswer, sample: GroundingSample, space: CoordinateSpace) -> Scored:
    """Compare an answer with its target.

    A point outside the image is a miss; nothing is clipped, which would reward answers at the border. A refusal, all
    coordinates negative, is right only where nothing is to be found.
    """
    groups = sample.meta.get("groups", {})
    points = _points(parsed, sample, space) if parsed.ok else None
    if not points:
        return Scored(first=False, any=False, wrong_format=True, groups=groups)
    hits = [sample.target.contains(point) for point in points]
    return Scored(hits[0], any(hits), False, tuple(points), groups)


def tabulate(benchmark: Benchmark, scored: Sequence[Scored]) -> Table:
    """Results of a benchmark by the columns of its tables."""
    keys: list[tuple[str, ...]] = [(), *((column,) for column in benchmark.columns), *benchmark.crosses]
    keys += [(column,) for column in benchmark.details]
    rows = [row for key in keys for row in _rows(key, scored)]
    macro = None
    if benchmark.macro:
        cells = [row.first for row in _rows(benchmark.macro, scored)]
        macro = mean_of_shares(cells)
    return Table(tuple(rows), macro)


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


def _points(parsed: ParsedAnswer, sample: GroundingSample, space: CoordinateSpace) -> list[Point] | None:
    """Points in pixels of the original image; None where one is no pair of numbers, which `reference` lets pass."""
    for point in parsed.points:
        if any(isinstance(number, bool) or not isinstance(number, int | float) for number in point):
            return None
    try:
        return [sample.to_original(point, space) for point in parsed.points]
    except OverflowError:  # a whole number beyond the largest float
        return None


def _rows(columns: tuple[str, ...], scored: Sequence[Scored]) -> list[TableRow]:
    """A row for each combination of values, in the order of first appearance; a sample may have several values."""
    parts: dict[tuple[str, ...], list[Scored]] = {} if columns else {(): list(scored)}
    for entry in scored if columns else ():
        for values in itertools.product(*(entry.groups.get(column, ()) for column in columns)):
            parts.setdefault(values, []).append(entry)
    return [_row(columns, values, part) for values, part in parts.items()]


def _row(columns: tuple[str, ...], values: tuple[str, ...], part: Sequence[Scored]) -> TableRow:
    counts = [len(entry.points) for entry in part if entry.points]
    return TableRow(
        columns=columns,
        values=values,
        first=Share(sum(entry.first for entry in part), len(part)),
        any=Share(sum(entry.any for entry in part), len(part)),
        wrong_format=Share(sum(entry.wrong_format for entry in part), len(part)),
        answers=sum(counts) / len(counts) if counts else math.nan,
    )
