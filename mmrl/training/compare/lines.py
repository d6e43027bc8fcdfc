"""A comparison as lines of text, for the console."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mmrl.training.compare.experiment import BASELINE_FINAL
from mmrl.training.compare.results import (
    CollapseResult,
    Comparison,
    Difference,
    EqualCostResult,
    Failure,
    Ratio,
    WorkResult,
)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the means, the paired differences, the work, values at equal cost, collapsed runs and failures."""
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


def failure_text(failures: Sequence[Failure]) -> str:
    """How many runs failed, and the first reason."""
    if not failures:
        return "nothing has run yet"
    return f"{len(failures)} run(s) failed, the first is {failures[0].run}: {failures[0].reason}"


def _difference_lines(differences: Mapping[str, Difference], baseline: str) -> Iterator[str]:
    for arm, found in differences.items():
        pair = f"{arm} - {baseline}"
        if found.n:
            interval = "" if found.n < 2 else f", 95 % [{found.low:+.4f}, {found.high:+.4f}]"
            yield f"{pair}: {found.mean:+.4f}{interval}, {found.wins} wins in {found.n} pairs"
        if found.missing_seeds:
            yield f"{pair}: no pair for seeds {_listed(found.missing_seeds)}"


def _work_lines(work: WorkResult, baseline: str) -> Iterator[str]:
    """Table of how many times less than the baseline each arm needs, one row a cost and arm."""
    whole = f", {baseline}'s being that of its whole run" if work.baseline_spends == "all" else ""
    yield f"cost to reach {work.metric} = {_target_text(work, baseline)}{whole}, geometric mean of the ratios:"
    rows = [("cost", "arm", f"{baseline} / arm", "95 %", "reached by arm", f"by {baseline}")]
    rows += [
        (cost, arm, *_ratio_text(ratio), _share(ratio.n, ratio.never), _share(ratio.n, ratio.baseline_never))
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
                yield f"  {cost}, {arm}: the first evaluation has the target already at seeds {seeds}"


def _target_text(work: WorkResult, baseline: str) -> str:
    if work.target != BASELINE_FINAL:
        return f"{work.target:g}"
    last = "final value" if work.baseline_last == 1 else f"mean of the last {work.baseline_last} evaluations"
    share = "" if work.baseline_share == 1 else f"{100 * work.baseline_share:g} % of "
    return f"{share}{baseline}'s {last} at each seed"


def _ratio_text(ratio: Ratio) -> tuple[str, str]:
    """Ratio and interval, or the bound that is left by seeds on which the target is not reached."""
    if ratio.ratio is not None and math.isfinite(ratio.ratio):
        return f"{ratio.ratio:.3g}x", "" if ratio.n < 2 else f"[{ratio.low:.3g}, {ratio.high:.3g}]"
    if ratio.at_least > 0:
        return f"at least {ratio.at_least:.3g}x", ""
    if ratio.at_most is not None and math.isfinite(ratio.at_most):
        return f"at most {ratio.at_most:.3g}x", ""
    return "unknown", ""


def _share(n: int, never: Sequence[int]) -> str:
    return f"{n - len(never)} of {n}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {line.rstrip()}"


def _equal_cost_lines(at: EqualCostResult, baseline: str) -> Iterator[str]:
    where = f"{at.value:g}" if not isinstance(at.value, str) else "what every arm has spent at each seed"
    yield f"{at.metric} at equal {at.cost} ({where}):"
    for arm, entry in at.arms.items():
        mean = "no value" if entry.mean is None else f"mean {entry.mean:.4f} over {entry.n} seeds"
        yield f"  {arm}: {mean}"
    for line in _difference_lines(at.differences, baseline):
        yield f"  {line}"


def _collapse_lines(collapse: CollapseResult) -> Iterator[str]:
    yield f"runs that end with less than {collapse.below:g} of their first {collapse.metric}:"
    for arm, entry in collapse.arms.items():
        unknown = f"; unknown for seeds {_listed(entry.missing_seeds)}" if entry.missing_seeds else ""
        yield f"  {arm}: {len(entry.collapsed)} of {entry.n}{unknown}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
