"""Content of comparison.json, as dataclasses, and its summary as text.

A seed without a value is None. Means, differences and ratios are None if no seed has a value; interval ends are NaN if
only one has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmrl.comparison.experiment import BASELINE_FINAL


@dataclass
class SeedValues:
    """A metric of one arm by seed, with its mean and 95% interval."""

    values: dict[int, float | None]
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Number of seeds that have a value."""


@dataclass
class ArmResult(SeedValues):
    """One arm's compared metric on the seeds of the comparison."""

    chosen: dict[str, Any] | None = None
    """The swept parameter and its chosen value; None without a sweep."""
    secondary: dict[str, SeedValues] = field(default_factory=dict)
    """Additional metrics by name."""
    command: str = ""
    """Command of the arm's first run."""


@dataclass
class Difference:
    """Arm minus baseline, paired seed by seed, with a 95% interval."""

    per_seed: dict[int, float]
    missing_seeds: list[int]
    """Seeds on which one of the two has no value."""
    ties: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Number of pairs."""
    wins: int = 0
    """Number of pairs in which the arm is better than the baseline."""
    verdict: str = ""
    """One of `mmrl.runs.statistics.VERDICTS` by the experiment's margin; empty without one."""


@dataclass
class SweepRow:
    """One value of the swept parameter in one arm."""

    value: Any
    values: dict[int, float | None]
    mean: float | None
    start: float | None = None
    """Mean over the same seeds of the metric before training; None if it was not evaluated."""


@dataclass
class SweepArm:
    """All values tried for one arm."""

    rows: list[SweepRow]
    at_edge: bool
    """Whether the chosen value is the smallest or the largest one tried."""


@dataclass
class SweepResult:
    """Values tried and chosen by the sweep."""

    parameter: str
    seeds: list[int]
    overrides: dict[str, Any]
    metric: str
    chosen: dict[str, Any]
    """Value by arm; arms of which no run finished are absent."""
    arms: dict[str, SweepArm]


@dataclass
class Reach:
    """Cost of one arm until its curve reached the target."""

    needed: dict[int, float | None]
    """Cost by seed; an upper bound if the first evaluation already reaches the target, None if it is never reached."""
    spent: dict[int, float]
    """Cost of the whole run on seeds that never reach the target."""
    reached: int
    n: int
    """Seeds with a curve and a target."""
    never: list[int]
    at_first_evaluation: list[int]
    missing_seeds: list[int]


@dataclass
class CostRatio:
    """Geometric mean of baseline cost / arm cost over the seeds that both have, or bounds of it."""

    per_seed: dict[int, list[float]]
    """Lower and upper bound of the ratio; equal if both reached the target."""
    missing_seeds: list[int]
    never: list[int]
    """Seeds on which the arm never reaches the target."""
    baseline_never: list[int]
    ratio: float | None = None
    """NaN unless every ratio is known."""
    low: float | None = None
    high: float | None = None
    n: int = 0
    at_least: float = 0.0
    at_most: float | None = None


@dataclass
class CostResult:
    """One cost: each arm's, and the ratio of the baseline's cost to it."""

    weights: dict[str, float]
    """Weight of each evaluation counter in the cost."""
    arms: dict[str, Reach]
    ratios: dict[str, CostRatio]


@dataclass
class WorkResult:
    """Cost of each arm until it reached the target."""

    metric: str
    higher_is_better: bool
    target: str | int | float
    baseline_last: int
    baseline_share: float
    baseline_spends: str
    targets: dict[int, float | None]
    costs: dict[str, CostResult]


@dataclass
class EqualCostResult:
    """Each arm's value at equal cost."""

    metric: str
    cost: str
    value: str | int | float
    costs: dict[int, float | None]
    """Cost at which the curves are compared, by seed."""
    arms: dict[str, SeedValues]
    differences: dict[str, Difference]


@dataclass
class CollapseArm:
    """Fraction of its initial value that each run of an arm kept."""

    kept: dict[int, float | None]
    collapsed: list[int]
    share: float | None
    """Fraction of runs that collapsed."""
    n: int
    missing_seeds: list[int]


@dataclass
class CollapseResult:
    """Runs whose final value is below a fraction of their first value."""

    metric: str
    below: float
    arms: dict[str, CollapseArm]


@dataclass
class RunFailure:
    """A run that failed, or that finished without a requested number."""

    run: str
    reason: str


@dataclass
class Comparison:
    """Content of comparison.json."""

    status: str
    """running, done or failed."""
    command: str
    """Command that made it."""
    name: str
    budget: str
    metric: str
    higher_is_better: bool
    baseline: str
    seeds: list[int]
    sweep: SweepResult | None
    arms: dict[str, ArmResult]
    differences: dict[str, Difference]
    work: WorkResult | None
    at: EqualCostResult | None
    collapse: CollapseResult | None
    failures: list[RunFailure] = field(default_factory=list)
    margin: float | None = None
    """Smallest difference of the metric that matters."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as saved; sections that the experiment does not have are empty."""
        content = dataclasses.asdict(self)
        return {key: {} if value is None and key != "margin" else value for key, value in content.items()}


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield lines on means, paired differences, work, values at equal cost, collapsed runs and failures."""
    for arm, entry in comparison.arms.items():
        if entry.n:
            yield f"{arm}: mean {comparison.metric} {entry.mean:.4f} over {entry.n} seeds"
    yield from _difference_lines(comparison.differences, comparison.baseline)
    if comparison.work is not None:
        yield from _work_lines(comparison.work, comparison.baseline)
    if comparison.at is not None:
        yield from _equal_cost_lines(comparison.at, comparison.baseline)
    if comparison.collapse is not None:
        yield from _collapse_lines(comparison.collapse)
    if comparison.failures:
        yield failure_text(comparison.failures)


def failure_text(failures: Sequence[RunFailure]) -> str:
    """Number of failed runs, and the first reason."""
    if not failures:
        return "nothing has run yet"
    return f"{len(failures)} run(s) failed; the first one is {failures[0].run}: {failures[0].reason}"


def _difference_lines(differences: Mapping[str, Difference], baseline: str) -> Iterator[str]:
    for arm, found in differences.items():
        pair = f"{arm} - {baseline}"
        if found.n:
            interval = "" if found.n < 2 else f", 95% [{found.low:+.4f}, {found.high:+.4f}]"
            verdict = f": {found.verdict}" if found.verdict else ""
            yield f"{pair}: {found.mean:+.4f}{interval}, {found.wins} wins in {found.n} pairs{verdict}"
        if found.missing_seeds:
            yield f"{pair}: no pair for seeds {_listed(found.missing_seeds)}"


def _work_lines(work: WorkResult, baseline: str) -> Iterator[str]:
    """Table of how many times less than the baseline each arm needs, one row a cost and arm."""
    whole = f", for {baseline} the cost of its whole run" if work.baseline_spends == "all" else ""
    yield f"cost to reach {work.metric} = {_target_text(work, baseline)}{whole}, geometric mean of the ratios:"
    rows = [("cost", "arm", f"{baseline} / arm", "95%", "reached by arm", f"by {baseline}")]
    rows += [
        (
            cost,
            arm,
            *_ratio_text(ratio),
            f"{ratio.n - len(ratio.never)} of {ratio.n}",
            f"{ratio.n - len(ratio.baseline_never)} of {ratio.n}",
        )
        for cost, table in work.costs.items()
        for arm, ratio in table.ratios.items()
    ]
    yield from _aligned(rows)
    for cost, table in work.costs.items():
        for arm, ratio in table.ratios.items():
            if ratio.missing_seeds:
                yield f"  {cost}, {arm}: no pair for seeds {_listed(ratio.missing_seeds)}"
        for arm, reach in table.arms.items():
            if reach.at_first_evaluation:
                seeds = _listed(reach.at_first_evaluation)
                yield f"  {cost}, {arm}: the first evaluation already reaches the target for seeds {seeds}"


def _target_text(work: WorkResult, baseline: str) -> str:
    if work.target != BASELINE_FINAL:
        return f"{work.target:g}"
    last = "final value" if work.baseline_last == 1 else f"mean of the last {work.baseline_last} evaluations"
    share = "" if work.baseline_share == 1 else f"{100 * work.baseline_share:g}% of "
    return f"{share}{baseline}'s {last} at each seed"


def _ratio_text(ratio: CostRatio) -> tuple[str, str]:
    """Ratio and interval, or the bound that is left by seeds on which the target is not reached."""
    if ratio.ratio is not None and math.isfinite(ratio.ratio):
        return f"{ratio.ratio:.3g}x", "" if ratio.n < 2 else f"[{ratio.low:.3g}, {ratio.high:.3g}]"
    if ratio.at_least > 0:
        return f"at least {ratio.at_least:.3g}x", ""
    if ratio.at_most is not None and math.isfinite(ratio.at_most):
        return f"at most {ratio.at_most:.3g}x", ""
    return "unknown", ""


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {line.rstrip()}"


def _equal_cost_lines(at: EqualCostResult, baseline: str) -> Iterator[str]:
    where = f"{at.value:g}" if not isinstance(at.value, str) else "spent by every arm, per seed"
    yield f"{at.metric} at equal {at.cost} ({where}):"
    for arm, entry in at.arms.items():
        mean = "no value" if entry.mean is None else f"mean {entry.mean:.4f} over {entry.n} seeds"
        yield f"  {arm}: {mean}"
    for line in _difference_lines(at.differences, baseline):
        yield f"  {line}"


def _collapse_lines(collapse: CollapseResult) -> Iterator[str]:
    yield f"runs whose final {collapse.metric} is below {collapse.below:g} of the first:"
    for arm, entry in collapse.arms.items():
        unknown = f"; unknown for seeds {_listed(entry.missing_seeds)}" if entry.missing_seeds else ""
        yield f"  {arm}: {len(entry.collapsed)} of {entry.n}{unknown}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
