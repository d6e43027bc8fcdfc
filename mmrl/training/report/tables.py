"""Tables of held-out numbers: shares, their parts by data column, and scores, with changes on the same tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.statistics import (
    SHARES,
    difference_interval,
    mean_interval,
    paired_difference,
    wilson_interval,
)
from mmrl.training.record.tracking import describe_metric
from mmrl.training.report.folder import (
    EvaluationPoint,
    RunFolder,
    estimate,
    evaluation_points,
    label,
    measured,
    plain,
)

Estimate = tuple[float, float, float]
Cell = dict[str, str]


def headline(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Accuracy or success of each split at both ends of each run."""
    tables = []
    for split in runs[-1].splits:
        points = evaluation_points(runs, split)
        protocols = measured([point.record for point in points], SHARES)
        if protocols:
            tables.append(
                {
                    "split": split,
                    "protocols": [label(name) for name in protocols],
                    "rows": [_headline_row(points, place, protocols) for place in range(len(points))],
                }
            )
    return tables


def headline_name(run: RunFolder) -> str:
    """Metric of the headline: accuracy or success."""
    names = measured(run.evaluations, SHARES)
    return names[0].partition("/")[0] if names else SHARES[0].partition("/")[0]


def part_tables(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The headline's first protocol over all tasks and by the values of each data column, and what else was scored.

    A split whose tasks neither differ in a column nor have other scores has no table.
    """
    tables = []
    for split in runs[-1].splits:
        points = [point for point in evaluation_points(runs, split) if point.outcomes]
        protocols = measured([point.record for point in points], SHARES)
        groups = _part_groups(points, protocols[0]) if protocols else []
        if groups:
            columns = [{"label": point.label, "step": point.record["step"]} for point in points]
            tables.append({"split": split, "protocol": label(protocols[0]), "columns": columns, "groups": groups})
    return tables


def score_tables(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Optimised scores, held-out rewards and what else moved, at both ends of each run."""
    tables = []
    for split in runs[-1].splits:
        points = evaluation_points(runs, split)
        names = measured([point.record for point in points], (*JUDGED, *UNJUDGED))
        if not any(name.startswith(JUDGED) for name in names):
            continue
        columns = [{"label": point.label, "step": point.record["step"], "count": point.count} for point in points]
        groups = [
            {"heading": heading, "rows": [_score_row(points, name) for name in names if name.startswith(prefixes)]}
            for heading, prefixes in SCORE_GROUPS
        ]
        tables.append({"split": split, "columns": columns, "groups": [group for group in groups if group["rows"]]})
    return tables


def _headline_row(points: Sequence[EvaluationPoint], place: int, protocols: Sequence[str]) -> dict[str, Any]:
    point = points[place]
    earlier = points[place - 1] if place else None
    cells = [_metric_cell(point, earlier, name, _percent) for name in protocols]
    return {"label": point.label, "step": point.record["step"], "count": point.count, "cells": cells}


def _score_row(points: Sequence[EvaluationPoint], name: str) -> dict[str, Any]:
    cells = []
    previous: EvaluationPoint | None = None
    for point in points:
        cell = _metric_cell(point, previous, name, plain)
        spread = math.nan if previous is None else previous.record.get(DIVERSITY, math.nan)
        if cell is not None and name == DIVERSITY and point.record[name] < (1 - DIVERSITY_LOSS) * spread:
            cell["tone"] = "bad"
        cells.append(cell)
        previous = point
    shown = name if name.startswith(UNJUDGED) else label(name)
    return {"label": shown, "definition": describe_metric(name) or "", "cells": cells}


def _part_groups(points: Sequence[EvaluationPoint], metric: str) -> list[dict[str, Any]]:
    outcomes = points[-1].outcomes.values()
    groups = []
    for column in dict.fromkeys(column for outcome in outcomes for column in outcome.parts):
        values = sorted({outcome.parts[column] for outcome in outcomes if column in outcome.parts})
        rows = [_part_row(points, metric, column, value) for value in values]
        if len(rows) > 1:
            groups.append({"heading": f"by {column}", "rows": rows})
    protocol = label(metric)
    terms = sorted(
        {name for outcome in outcomes for name in outcome.scores if name.endswith(f"/{protocol}")} - {metric}
    )
    if terms:
        names = {name: name.rpartition("/")[0].removeprefix("terms/") for name in terms}
        rows = [_part_row(points, name, "", "") | {"label": shown} for name, shown in names.items()]
        groups.append({"heading": "other scores", "rows": rows})
    everything = {"heading": "", "rows": [_part_row(points, metric, "", "") | {"label": "all"}]}
    return [everything, *groups] if groups else []


def _part_row(points: Sequence[EvaluationPoint], metric: str, column: str, value: str) -> dict[str, Any]:
    """A row over the tasks whose `column` has a value; over all tasks where there is no column."""
    cells = []
    before: dict[str, float] = {}
    for point in points:
        found = _scores(point.outcomes.values(), metric, column, value)
        cells.append(_paired_cell(found, before))
        before = found
    return {"label": value, "count": len(before), "cells": cells}


def _scores(outcomes: Iterable[Outcome], metric: str, column: str = "", value: str = "") -> dict[str, float]:
    return {
        outcome.id: outcome.scores[metric]
        for outcome in outcomes
        if metric in outcome.scores and (not column or outcome.parts.get(column) == value)
    }


def _paired_cell(found: Mapping[str, float], before: Mapping[str, float]) -> Cell | None:
    if not found:
        return None
    values = list(found.values())
    show = _percent if min(values) >= 0 and max(values) <= 1 else plain
    cell = _cell(_estimate_of(values), show)
    change = _paired_change(found, before)
    return cell if change is None else cell | _change(change, show)


def _estimate_of(values: Sequence[float]) -> Estimate:
    if set(values) <= {0.0, 1.0}:
        return (sum(values) / len(values), *wilson_interval(sum(values), len(values)))
    mean, low, high = mean_interval(values)[:3]
    if min(values) >= 0 and max(values) <= 1:  # of shares; NaN bounds stay
        low, high = (low if math.isnan(low) else max(low, 0.0)), (high if math.isnan(high) else min(high, 1.0))
    return mean, low, high


def _paired_change(found: Mapping[str, float], before: Mapping[str, float]) -> Estimate | None:
    """Change over the tasks with its interval, where both evaluations scored the same tasks."""
    if not found or set(found) != set(before):
        return None
    return paired_difference(list(found.values()), [before[task] for task in found])[:3]


def _metric_cell(
    point: EvaluationPoint, earlier: EvaluationPoint | None, name: str, show: Callable[..., str]
) -> Cell | None:
    value = estimate(point.record, name)
    if math.isnan(value[0]):
        return None
    cell = _cell(value, show)
    before = (math.nan,) * 3 if earlier is None else estimate(earlier.record, name)
    if earlier is None or math.isnan(before[0]):
        return cell
    paired = _paired_change(_scores(point.outcomes.values(), name), _scores(earlier.outcomes.values(), name))
    return cell | _change(paired or difference_interval(value, before), show)


def _cell(value: Estimate, show: Callable[..., str]) -> Cell:
    number, low, high = value
    unit = " %" if show is _percent else ""
    return {"value": show(number) + unit, "interval": "" if math.isnan(low) else f"[{show(low)}, {show(high)}]"}


def _change(change: Estimate, show: Callable[..., str]) -> Cell:
    value, low, high = change
    return {
        "change": show(value, "+"),
        "change_interval": "" if math.isnan(low) else f"[{show(low, '+')}, {show(high, '+')}]",
        "tone": "good" if low > 0 else "bad" if high < 0 else "",
    }


def _percent(value: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}"


JUDGED = ("score/", "heldout/")
UNJUDGED = ("diversity/", "distance/")
SCORE_GROUPS = (
    ("optimised", ("score/",)),
    ("not optimised, held out", ("heldout/",)),
    ("what else moved", UNJUDGED),
)
DIVERSITY = "diversity/latent"
DIVERSITY_LOSS = 0.3
"""Share of the diversity that may go before the report points at it."""
