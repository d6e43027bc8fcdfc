"""Tables of the report: totals, headline, measurements by data column, scores; readable names of metrics."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.report.folder import EvaluationPoint, RunFolder, estimate, evaluation_points, plain, read_run
from mmrl.runs.metrics import DIVERSITY, STAGES, STAGES_BETWEEN, label, measured
from mmrl.runs.records import Outcome
from mmrl.runs.statistics import (
    HEADLINES,
    SHARES,
    difference_interval,
    mean_interval,
    paired_difference,
    wilson_interval,
)
from mmrl.runs.tracking import TOOL_ERRORS, estimate_text

NAMES = {
    "policy/kl_ref": "from the reference",
    "policy/kl_old": "from the sampling policy",
    "policy/clip_fraction_low": "by the lower bound",
    "policy/clip_fraction_high": "by the upper bound",
    "policy/kl_coef": "KL coefficient",
    "reward/zero_variance_groups": "groups with equal rewards",
    "update/zero_advantage_groups": "groups without an advantage",
    "reward/std": "standard deviation",
    "reward/std_within_groups": "standard deviation within groups",
    "response/length_max": "maximum",
    "response/length_mean": "mean",
    "response/finished_fraction": "finished",
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "memory/peak_mb": "peak memory",
    "memory/worker_mb": "largest environment process",
    "tokens/per_second": "decisions",
    "loss/nll": "negative log-likelihood",
}
"""Metric to its name in a legend, if the last part of its own name is not informative."""
FAMILIES = {
    "sim": "simulators",
    "optim": "optimiser",
    "data": "data",
    "time": "seconds",
    "rollers": "rollout workers",
    "replay": "replay buffer",
    "update": "groups of the update",
}
ABBREVIATIONS = {"kl": "KL", "lr": "learning rate", "std": "standard deviation", "logp": "log-probability"}
UNITS = {
    "nats": r".*\bnats\b",
    "decisions": r".*\b(length|in decisions|decisions in an? \w+)\b",
    "decisions per second": r".*(over its seconds|decisions of the step per second)",
    "steps": r"Mean (number of )?control steps",
}
"""Unit to a pattern for the definitions of such metrics."""


def readable_name(metric: str, among: Sequence[str] = ()) -> str:
    """A metric's name in words, without its family if all metrics on the chart share it."""
    if metric in NAMES:
        return NAMES[metric]
    family, _, rest = metric.partition("/")
    shared = all(name.partition("/")[0] == family for name in among)
    parts = [rest] if rest and shared else [FAMILIES.get(family, family), rest]
    words = " ".join(filter(None, parts)).replace("/", ", ").replace("pass_at_", "pass@").split("_")
    return " ".join(ABBREVIATIONS.get(word, word) for word in words)


def unit_of(sentence: str) -> str:
    """Unit stated in a metric's definition; empty if there is none."""
    return next((unit for unit, pattern in UNITS.items() if re.match(pattern, sentence)), "")


Row = tuple[str, str, str]
DECISIONS = "choices of the policy, each with its own log-probability"
ENDS = ("first", "last")
LOSSES = (
    ("samples that could not be scored", "reward/errors", False, "excluded from the update"),
    ("rows skipped", "data/skipped", True, "rows that could not be used"),
    (
        "optimiser steps skipped",
        "optim/skipped",
        True,
        "loss or gradient not finite; batches saved in failures/",
    ),
    ("optimiser steps that overflowed", "optim/overflows", True, "in fp16; the loss scale was reduced"),
    ("episodes that overflowed", "env/overflow", True, "a turn did not fit in the model's context"),
    ("episodes of failed environments", "env/failed", True, "excluded from their groups"),
    ("failed checkpoints", "checkpoint/failed", True, "e.g. because the disk was full"),
)
LATEST = 5
"""Steps at the start and at the end of a run whose mean is shown."""
EPISODES = (
    ("successful episodes", "episode/success"),
    ("return", "episode/return"),
    ("turns per episode", "episode/turns"),
    ("calls per response", "episode/calls"),
    ("invalid responses", "episode/unreadable"),
    ("refused actions per response", "episode/refused"),
    ("responses cut off", "episode/cut"),
)
Estimate = tuple[float, float, float]
Cell = dict[str, str]


def derived_numbers(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    """Rows of the report's table."""
    rows: list[Row] = []
    for derive in (_rewards, _episodes, _amounts, _speed, _losses):
        rows += derive(metrics, result)
    return rows


def stage_shares(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fraction of the run's time by stage, largest first."""
    seconds = {stage: _total(metrics, f"time/{stage}") for stage in (*STAGES, *STAGES_BETWEEN)}
    between = sum(seconds[stage] for stage in STAGES_BETWEEN)
    # rounding of stages may exceed the steps' own seconds
    total = max(_total(metrics, "time/step") + between, sum(seconds.values()))
    if total <= 0:
        return {}
    seconds["other"] = total - sum(seconds.values())
    # smaller shares would be shown as 0.0%
    shares = {stage: value / total for stage, value in seconds.items() if value / total >= 0.0005}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _rewards(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    steps, values = _finite(metrics, "reward/mean")
    if not values:
        return []
    window = max(1, min(10, len(values) // 5))
    start, end = float(np.mean(values[:window])), float(np.mean(values[-window:]))
    best = int(np.argmax(values))
    first, last = (f"{end} step" if window == 1 else f"mean of the {end} {window} steps" for end in ENDS)
    rows = [
        ("reward at the start", _show(start), first),
        ("reward at the end", _show(end), f"{last}, {end - start:+.3g} compared with the start"),
        ("best reward", _show(values[best]), f"step {steps[best]:g}"),
    ]
    flat = _finite(metrics, "reward/zero_variance_groups")[1]
    if flat:
        share = f"{100 * float(np.mean(flat)):.1f}%"
        rows.append(("groups with equal rewards", share, "mean over steps; group-relative advantages are 0"))
    return rows


def _episodes(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    """What an agent's episodes were like at the end; nothing for other runs."""
    if not any("episode/unreadable" in record for record in metrics):
        return []
    rows: list[Row] = []
    for title, name in EPISODES:
        values = _finite(metrics, name)[1]
        if values:
            start, end = (float(np.mean(part)) for part in (values[:LATEST], values[-LATEST:]))
            rows.append(
                (title, _show(end), f"mean of the last {min(LATEST, len(values))} steps, {_show(start)} at first")
            )
    kinds = sorted({name for record in metrics for name in record if TOOL_ERRORS in name})
    # a step without the metric had no such error
    means = {name.partition(TOOL_ERRORS)[2]: _total(metrics[-LATEST:], name) / len(metrics[-LATEST:]) for name in kinds}
    if means:
        remark = ", ".join(f"{kind} {_show(mean)}" for kind, mean in means.items())
        rows.append(("tool errors per response", _show(sum(means.values())), remark))
    median, slow = (_finite(metrics, f"time/env_step_p{q}")[1] for q in (50, 90))
    if median and slow:
        remark = f"median, mean over steps; 90th percentile {float(np.mean(slow)):.2g} s"
        rows.append(("environment step", f"{float(np.mean(median)):.2g} s", remark))
    return rows


def _amounts(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    steps = result.get("steps") or (metrics[-1]["step"] if metrics else None)
    if steps is not None:
        optimiser = result.get("optimiser_steps")
        remark = "" if optimiser is None else f"{optimiser:,} optimiser steps"
        if waited := result.get("optimiser_steps_without_gradient"):
            remark += f", {waited:,} more skipped because no group had a gradient"
        rows.append(("steps", f"{steps:,}", remark))
    amounts = [result.get(key) or _last(metrics, f"{key}/total") for key in ("samples", "tokens")]
    # a sample with a single decision, such as an image that is classified, is not called one
    shown = amounts[:1] if amounts[0] == amounts[1] else amounts
    for amount, (title, remark) in zip(shown, (("samples", ""), ("decisions", DECISIONS)), strict=False):
        if amount is not None:
            rows.append((title, f"{amount:,.0f}", remark))
    epochs = _finite(metrics, "data/epoch")[1]
    if epochs:
        rows.append(("epochs", _show(epochs[-1]), ""))
    return rows


def _speed(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    seconds = _total(metrics, "time/step")
    if seconds <= 0:
        return []
    rows = [("time in steps", duration(seconds), f"{seconds / len(metrics):.3g} s per step")]
    tokens = _last(metrics, "tokens/total")
    if tokens is not None:
        each = "samples" if tokens == _last(metrics, "samples/total") else "decisions"
        rows.append((f"{each} per second", f"{tokens / seconds:,.0f}", "excluding evaluation and checkpoints"))
    shares = [f"{stage} {100 * share:.1f}%" for stage, share in stage_shares(metrics).items()]
    if shares:
        rows.append(("time by stage", shares[0], ", ".join(shares[1:])))
    return rows


def _losses(metrics: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for title, name, cumulative, remark in LOSSES:
        values = _finite(metrics, name)[1]
        if values:
            # some metrics count since the start of the run, others each step
            count = max(values) if cumulative else sum(values)
            rows.append((title, f"{count:,.0f}", remark if count else ""))
    return rows


def _finite(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    pairs = [(record["step"], record[name]) for record in metrics if math.isfinite(record.get(name, math.nan))]
    return [step for step, _ in pairs], [value for _, value in pairs]


def _last(metrics: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return next(iter(_finite(metrics, name)[1][-1:]), None)


def _total(metrics: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(sum(_finite(metrics, name)[1]))


def duration(seconds: float) -> str:
    """Seconds, minutes or hours in words."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def _show(value: float) -> str:
    return f"{value:.4g}"


def headline(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Accuracy or success rate of each split at the start and end of each run."""
    tables = []
    for split in runs[-1].splits:
        points = evaluation_points(runs, split)
        protocols = runs[-1].shares([point.record for point in points])
        if protocols:
            tables.append(
                {
                    "split": split,
                    "protocols": [readable_name(name) for name in protocols],
                    "rows": [_headline_row(points, index, protocols) for index in range(len(points))],
                }
            )
    return tables


def headline_name(run: RunFolder) -> str:
    """Metric of the headline: accuracy or success."""
    names = run.shares(run.evaluations)
    return names[0].partition("/")[0] if names else SHARES[0].partition("/")[0]


def part_tables(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The first metric of the headline over all tasks and by data column, followed by other scores.

    A split whose tasks neither differ in a column nor have other scores has no table: its headline says the same.
    """
    return [table for table in _split_tables(runs) if len(table["groups"]) > 1]


def _split_tables(runs: Sequence[RunFolder], metric: str = "") -> list[dict[str, Any]]:
    """`part_tables` of every evaluated split."""
    tables = []
    for split in runs[-1].splits:
        points = [point for point in evaluation_points(runs, split) if point.outcomes]
        records = [point.record for point in points]
        protocols = measured(records, (metric,)) if metric else runs[-1].shares(records)
        if protocols:
            groups = _part_groups(points, protocols[0])
            columns = [{"label": point.label, "step": point.record["step"]} for point in points]
            tables.append({"split": split, "protocol": label(protocols[0]), "columns": columns, "groups": groups})
    return tables


def part_lines(folders: Sequence[Path], metric: str = "") -> list[str]:
    """Accuracy or success of each split, overall and by data column; by default its first protocol."""
    lines = []
    for table in _split_tables([read_run(folder) for folder in folders], metric):
        rows = [("", "tasks", *(column["label"] for column in table["columns"]), "change, 95% interval")]
        for group in table["groups"]:
            rows += [(group["heading"],)] if group["heading"] else []
            indent = "  " if group["heading"] else ""
            rows += [_row(indent + row["label"], row) for row in group["rows"]]
        lines += [f"{table['split']}, {table['protocol']}", *_aligned(rows)]
    return lines


def evaluation_lines(metrics: Mapping[str, float]) -> list[str]:
    """Table of the results of `mmrl evaluate`, from numbers by split/name: a row for each split and group of tasks."""
    by_split: dict[str, dict[str, float]] = {}
    for key, value in metrics.items():
        split, _, name = key.partition("/")
        by_split.setdefault(split, {})[name] = value
    lines = []
    for split, found in by_split.items():
        # measured() leaves out the parts of tasks, which become rows
        protocols = measured([found], HEADLINES)
        if not protocols:
            continue
        first = protocols[0]
        parts = [name.removeprefix(f"{first}/") for name in found if _is_part(name, first)]
        rows: list[tuple[str, ...]] = [(split, *(readable_name(name) for name in protocols))]
        for shown, suffix in (("all tasks", ""), *((part, f"/{part}") for part in parts)):
            cells = (f"{name}{suffix}" for name in protocols)
            rows.append((shown, *(estimate_text(name, found) if name in found else "–" for name in cells)))
        lines += _aligned(rows)
    return lines


def _is_part(name: str, metric: str) -> bool:
    return name.startswith(f"{metric}/") and not name.endswith(("/low", "/high"))


def _row(label: str, row: dict[str, Any]) -> tuple[str, ...]:
    last = row["cells"][-1] or {}
    change = f"{last['change']} {last['change_interval']}" if "change" in last else ""
    return label, str(row["count"]), *("–" if cell is None else cell["value"] for cell in row["cells"]), change


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align cells in columns; a row of one cell is a heading and widens only the first column."""
    columns = max(map(len, rows))
    widths = [max(len(row[index]) for row in rows if len(row) > index) for index in range(columns)]
    return [
        "  "
        + "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False))]
        ).rstrip()
        for row in rows
    ]


def score_tables(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Optimised scores, held-out rewards, diversity and distance at the start and end of each run."""
    tables = []
    for split in runs[-1].splits:
        points = evaluation_points(runs, split)
        names = measured([point.record for point in points], (*JUDGED, *UNJUDGED))
        # distances alone say nothing about quality
        if not any(name.startswith(JUDGED) for name in names):
            continue
        columns = [{"label": point.label, "step": point.record["step"], "count": point.count} for point in points]
        groups = [
            {
                "heading": heading,
                "rows": [_score_row(points, name, runs[-1]) for name in names if name.startswith(prefixes)],
            }
            for heading, prefixes in SCORE_GROUPS
        ]
        tables.append({"split": split, "columns": columns, "groups": [group for group in groups if group["rows"]]})
    return tables


def _headline_row(points: Sequence[EvaluationPoint], index: int, protocols: Sequence[str]) -> dict[str, Any]:
    point = points[index]
    earlier = points[index - 1] if index else None
    cells = [_metric_cell(point, earlier, name, _percent) for name in protocols]
    return {"label": point.label, "step": point.record["step"], "count": point.count, "cells": cells}


def _score_row(points: Sequence[EvaluationPoint], name: str, run: RunFolder) -> dict[str, Any]:
    cells = []
    previous: EvaluationPoint | None = None
    for point in points:
        cell = _metric_cell(point, previous, name, plain)
        spread = math.nan if previous is None else previous.record.get(DIVERSITY, math.nan)
        # a loss of diversity is no success, even if the score rose
        if cell is not None and name == DIVERSITY and point.record[name] < (1 - DIVERSITY_LOSS) * spread:
            cell["tone"] = "bad"
        cells.append(cell)
        previous = point
    shown = name if name.startswith(UNJUDGED) else label(name)
    return {"label": shown, "definition": run.describe(name), "cells": cells}


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
    return [{"heading": "", "rows": [_part_row(points, metric, "", "") | {"label": "all"}]}, *groups]


def _part_row(points: Sequence[EvaluationPoint], metric: str, column: str, value: str) -> dict[str, Any]:
    """A row over the tasks whose `column` has a value; over all tasks if there is no column."""
    cells = []
    before: dict[str, float] = {}
    scores = [_scores(point.outcomes.values(), metric, column, value) for point in points]
    # shares in per cent, other scores as they are; one unit for the row
    show = _percent if all(0 <= score <= 1 for found in scores for score in found.values()) else plain
    for point, found in zip(points, scores, strict=True):
        cells.append(_paired_cell(found, before, None if column else _recorded(point.record, metric), show))
        before = found
    return {"label": value, "count": len(before), "cells": cells}


def _scores(outcomes: Iterable[Outcome], metric: str, column: str = "", value: str = "") -> dict[str, float]:
    return {
        outcome.id: outcome.scores[metric]
        for outcome in outcomes
        if metric in outcome.scores and (not column or outcome.parts.get(column) == value)
    }


def _recorded(record: Mapping[str, Any], metric: str) -> Estimate | None:
    """The interval that the evaluation computed, so that one number has one interval on the page."""
    ends = [record.get(key) for key in (metric, f"{metric}/low", f"{metric}/high")]
    return None if None in ends else (float(ends[0]), float(ends[1]), float(ends[2]))  # type: ignore[arg-type]


def _paired_cell(
    found: Mapping[str, float], before: Mapping[str, float], known: Estimate | None, show: Callable[..., str]
) -> Cell | None:
    if not found:
        return None
    cell = _cell(known or _estimate_of(list(found.values())), show)
    change = _paired_change(found, before)
    return cell if change is None else cell | _change(change, show)


def _estimate_of(values: Sequence[float]) -> Estimate:
    # right or wrong answers are a proportion
    if set(values) <= {0.0, 1.0}:
        return (sum(values) / len(values), *wilson_interval(sum(values), len(values)))
    mean, low, high = mean_interval(values)[:3]
    if min(values) >= 0 and max(values) <= 1:  # of shares; NaN bounds stay
        low, high = (low if math.isnan(low) else max(low, 0.0)), (high if math.isnan(high) else min(high, 1.0))
    return mean, low, high


def _paired_change(found: Mapping[str, float], before: Mapping[str, float]) -> Estimate | None:
    """Change over the tasks with its interval, where both evaluations scored the same tasks."""
    # a paired interval needs the same tasks on both sides
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
    # paired if the tasks' own scores were kept, else as two independent estimates
    paired = _paired_change(_scores(point.outcomes.values(), name), _scores(earlier.outcomes.values(), name))
    return cell | _change(paired or difference_interval(value, before), show)


def _cell(value: Estimate, show: Callable[..., str]) -> Cell:
    number, low, high = value
    unit = "%" if show is _percent else ""
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
    ("other changes", UNJUDGED),
)
DIVERSITY_LOSS = 0.3
"""Fraction of the diversity that may be lost before the report mentions it."""
