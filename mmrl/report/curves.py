"""Curves of a run: groups of metrics in one figure each; those that never changed are left out."""

from __future__ import annotations

import base64
import fnmatch
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmrl.recipes import all_recipes, metric_tables
from mmrl.report.charts import Chart, Series, interval_chart, line_chart, panel_chart, stacked_chart
from mmrl.report.folder import RunFolder, estimate
from mmrl.report.report_tables import JUDGED, UNJUDGED, readable_name, unit_of
from mmrl.runs.metrics import STAGES, STAGES_BETWEEN, label, measured


def curves(run: RunFolder) -> list[dict[str, Any]]:
    """Figures of a run: accuracy and scores first, then training metrics by subject."""
    # one value alone is a constant, and is listed as such
    names = {name for name in _charted(run) if not name.startswith("time/") and len(_finite_values(run, name)) > 1}
    charts = _accuracy_charts(run) + _score_charts(run)
    for title, chosen in subjects(sorted(names)):
        charts += _by_kind(run, chart_title(title, run.recipe), chosen)
    charts += _time_charts(run)
    for chart in charts:
        chart["definitions"] = [(name, run.describe(name) or "A metric of this recipe.") for name in chart["metrics"]]
    return charts


def subjects(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Titles of figures with their metrics: the subjects of `CHARTS`, then those left over by family."""
    left = list(names)
    for title, patterns in CHARTS.items():
        chosen = [name for pattern in patterns for name in left if _fits(name, pattern)]
        # each metric is drawn once, in the first figure that asks for it
        left = [name for name in left if name not in chosen]
        yield title, chosen
    for family in dict.fromkeys(name.partition("/")[0] for name in left):
        yield family, [name for name in left if name.partition("/")[0] == family]


def chart_title(subject: str, recipe: str = "") -> str:
    """Title of a subject in the words of a recipe's package; without one, in words that fit every package."""
    if subject not in CHARTS:
        return readable_name(subject).capitalize()
    tables = metric_tables(recipe, "TITLES") if recipe in all_recipes() else []
    return next((table[subject] for table in reversed(tables) if subject in table), subject)


def _fits(name: str, pattern: str) -> bool:
    """Whether a metric belongs to a pattern; one that another pattern names exactly belongs to that alone."""
    return name == pattern or (name not in EXACT and fnmatch.fnmatchcase(name, pattern))


def by_kind(names: Sequence[str], describe: Callable[[str], str | None]) -> dict[str, list[str]]:
    """Metrics by kind of number, inferred from the beginning of their definitions."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        sentence = describe(name) or ""
        # by the beginning of its definition: metrics have no declared kind
        kind = next((kind for kind, beginning in KINDS.items() if re.match(beginning, sentence)), "values")
        kinds.setdefault(kind, []).append(name)
    return kinds


def constants(run: RunFolder) -> list[tuple[str, str]]:
    """Name and value of training metrics that are not drawn because they never changed, except those that are 0.

    A reward of 0 is news and is named.
    """
    found = []
    for name in sorted(_charted(run)):
        values = _finite_values(run, name)
        if len(values) == 1 and not name.startswith("time/") and (values != {0.0} or name.startswith("reward/")):
            found.append((name, f"{values.pop():.4g}"))
    return found


def _charted(run: RunFolder) -> set[str]:
    names = {
        name
        for record in run.metrics
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {name for name in names if name not in ("step", "time") and not name.startswith(UNCHARTED)}


def _finite_values(run: RunFolder, name: str) -> set[float]:
    return {record[name] for record in run.metrics if math.isfinite(record.get(name, math.nan))}


def _by_kind(run: RunFolder, title: str, names: Sequence[str]) -> list[dict[str, Any]]:
    """One figure for each kind of number among some metrics; the kind is named if there are several."""
    kinds = by_kind(names, run.describe)
    # a schedule is drawn as it is: a moving average would show rates that were never used
    smooth = not set(names) & SCHEDULED
    charts = []
    for kind, chosen in kinds.items():
        units = {unit_of(run.describe(name)) for name in chosen}
        unit = UNITS.get(kind) or (units.pop() if len(units) == 1 else "")
        series = _series(run, chosen)
        chart = line_chart(series, unit=unit, log_scale=title in LOGARITHMIC, smooth=smooth)
        charts.append(_figure(title if len(kinds) == 1 else f"{title}, {kind}", chosen, chart, series, unit))
    return charts


def _time_charts(run: RunFolder) -> list[dict[str, Any]]:
    names = {name for name in _charted(run) if name.startswith("time/") and _finite_values(run, name) - {0.0}}
    names -= {"time/step"}
    stages = [name for stage in (*STAGES, *STAGES_BETWEEN) if (name := f"time/{stage}") in names]
    parts = sorted(names - set(stages))
    if len(run.metrics) < 2:
        return []
    charts = []
    if stages:
        series = _series(run, stages)
        charts.append(_figure("Seconds by stage", stages, stacked_chart(series), series, "s"))
        charts[-1]["caption"] = "Consecutive stages, stacked from bottom to top in the order of their names."
    if parts:
        series = _series(run, parts)
        charts.append(_figure("Seconds of parts of stages", parts, line_chart(series, unit="s"), series, "s"))
    return charts


def _accuracy_charts(run: RunFolder) -> list[dict[str, Any]]:
    """Fractions of each split and of its parts, all on one scale."""
    asked: list[tuple[str, list[dict[str, Any]], dict[str, str]]] = []
    for split in run.splits:
        records = run.of_split(split)
        protocols = run.shares(records)
        if len(records) < 2 or not protocols:
            continue
        title = f"{protocols[0].partition('/')[0].capitalize()} on {split}"
        asked.append((title, records, {name: readable_name(name) for name in protocols}))
        asked += _part_charts(title, records, protocols[0])
    ends = [estimate(record, name) for _, records, names in asked for record in records for name in names]
    # one scale for all splits, so that they can be compared by eye
    known = [end for each in ends for end in each if math.isfinite(end)]
    limits = (math.floor(20 * min(known)) / 20, math.ceil(20 * max(known)) / 20) if known else (0.0, 1.0)
    margin = 0.03 * (limits[1] - limits[0]) or 0.05
    return [_shares(*each, (limits[0] - margin, limits[1] + margin)) for each in asked]


def _part_charts(
    title: str, records: list[dict[str, Any]], metric: str
) -> list[tuple[str, list[dict[str, Any]], dict[str, str]]]:
    """The first protocol by the values of each data column."""
    parts: dict[str, dict[str, str]] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        column, _, value = name.removeprefix(f"{metric}/").partition("=")
        if name.startswith(f"{metric}/") and value and not name.endswith(("/low", "/high")):
            parts.setdefault(column, {})[name] = value
    return [(f"{title} by {column}, {readable_name(metric)}", records, names) for column, names in parts.items()]


def _shares(
    title: str, records: Sequence[Mapping[str, Any]], names: Mapping[str, str], limits: tuple[float, float]
) -> dict[str, Any]:
    """Shares with their intervals over steps: metric to its label in the legend."""
    steps = [record["step"] for record in records]
    series: Any = {
        shown: (steps, *zip(*(estimate(record, name) for record in records), strict=True))
        for name, shown in names.items()
    }
    return _figure(title, list(names), interval_chart(series, limits), series, "%")


def _score_charts(run: RunFolder) -> list[dict[str, Any]]:
    charts = []
    for split in run.splits:
        records = run.of_split(split)
        scores, others = (measured(records, prefixes) for prefixes in (JUDGED, UNJUDGED))
        title, steps = f"Scores and held-out rewards on {split}", [record["step"] for record in records]
        costs = {axis: positions for axis in COSTS if len(set(positions := _cost(records, axis))) > 1} if scores else {}
        for axis, positions in costs.items():
            charts.append(_panels(f"{title} by {axis}", scores, records, positions, axis))
        if len(records) > 1 and scores and not costs:
            charts.append(_panels(title, scores, records, steps))
        if len(records) > 1 and others:
            charts.append(_panels(f"Diversity and distance on {split}", others, records, steps))
    return charts


def _cost(records: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    parts = COSTS[axis]
    costs = [sum(weight * float(record.get(name, math.nan)) for name, weight in parts.items()) for record in records]
    return costs if all(map(math.isfinite, costs)) else []


def _panels(
    title: str,
    names: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    positions: Sequence[float],
    axis: str = "step",
) -> dict[str, Any]:
    series = {
        _panel_label(name): (positions, *zip(*(estimate(record, name) for record in records), strict=True))
        for name in names
    }
    chart = panel_chart(series, axis)  # type: ignore[arg-type]
    return {**_figure(title, names, chart, series, axis=axis), "caption": AXIS_CAPTIONS.get(axis, "")}


def _panel_label(name: str) -> str:
    family = FAMILIES.get(name.partition("/")[0])
    return f"{label(name)} ({family})" if family else name.replace("/", " ")


def _series(run: RunFolder, names: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    """Readable name to steps and values; the metric's whole name where two read alike."""
    steps = [record["step"] for record in run.metrics]
    shown = [readable_name(name, among=names) for name in names]
    return {
        label if shown.count(label) == 1 else name: (steps, [record.get(name, math.nan) for record in run.metrics])
        for name, label in zip(names, shown, strict=True)
    }


def _figure(
    title: str, names: Sequence[str], chart: Chart, series: Series | Any, unit: str = "", axis: str = "step"
) -> dict[str, Any]:
    return {
        "title": title,
        "image": "data:image/svg+xml;base64," + base64.b64encode(chart.svg).decode("ascii"),
        "metrics": names,
        "alt": _alternative(f"{title} over steps" if axis == "step" else title, series, unit),
        "values": _values(chart, series, unit, axis),
    }


def _alternative(title: str, series: Mapping[str, Sequence[Sequence[float]]], unit: str) -> str:
    """Alternative text of a chart: the first and last value of each curve."""
    moves = []
    for shown, (_, values, *_ends) in list(series.items())[:SPOKEN]:
        known = [value for value in values if math.isfinite(value)]
        if known:
            moves.append(f"{shown} from {_spoken(known[0], unit)} to {_spoken(known[-1], unit)}".strip())
    more = f" and {len(series) - SPOKEN} more" if len(series) > SPOKEN else ""
    return f"{title}: {', '.join(moves)}{more}" if moves else title


def _spoken(value: float, unit: str) -> str:
    return f"{100 * value:.3g}%" if unit == "%" else f"{value:.4g} {unit}".strip()


def _values(chart: Chart, series: Mapping[str, Sequence[Sequence[float]]], unit: str, axis: str) -> str:
    """Values of a chart as JSON for the page's script: at most `HOVERED` positions of each curve."""
    factor = 100 if unit == "%" else 1
    curves = []
    for shown, (positions, values, *_ends) in series.items():
        stride = -(-len(positions) // HOVERED)
        # counted from the end, so that the last point is among them
        kept = zip(positions[::-stride][::-1], values[::-stride][::-1], strict=True)  # the last one among them
        points = [[at, float(f"{factor * value:.4g}")] for at, value in kept if math.isfinite(value)]
        curves.append([shown, points])
    return json.dumps({"box": chart.box, "limits": chart.limits, "unit": unit, "axis": axis, "curves": curves})


SPOKEN = 8
"""Maximum number of curves described in a chart's alternative text."""
HOVERED = 120
"""Maximum number of positions of a curve whose values are stored in the page."""
UNCHARTED = (
    "reward/errors",
    "samples/total",
    "tokens/total",
    "data/epoch",
    "data/skipped",
    "optim/skipped",
    "optim/overflows",
    "optim/without_gradient",
    "checkpoint/failed",
    "cost/forward_rows",
    "cost/train_rows",
)
FAMILIES = {"score": "optimised", "heldout": "not optimised"}
COSTS: dict[str, dict[str, float]] = {
    "images": {"cost/samples": 1},
    "seconds": {"cost/seconds": 1},
    "model evaluations": {"cost/forward_rows": 1, "cost/train_rows": 3},
}
AXIS_CAPTIONS = {
    "images": "Images sampled for training so far.",
    "seconds": "Seconds of training so far, excluding evaluation.",
    "model evaluations": (
        "Forward-pass equivalents of the denoiser in training so far: rows without gradient + 3 × rows with "
        "gradient, since a row with gradient costs a forward pass plus a backward pass, which takes about two "
        "forward passes."
    ),
}
SCHEDULED = {"optim/lr", "policy/kl_coef", "papo/gamma"}
"""Metrics set by a schedule: drawn without smoothing because a moving average would show values that were never
used."""
KINDS = {
    "seconds": r"Seconds\b",
    "shares": r"(Mean s|S)hare\b|(Mean f|F)raction\b",
    "correlations": r"Spearman\b|Correlation\b",
    "megabytes": r".*\b10\^6 bytes",
    "counts": (
        r"(Mean number of|Mean (turns|control steps|answers|responses|actions|predictions) of|Longest|Mean length"
        r"|Maximum (number|length|response length)|Number of|Length"
        r"|Actions|Answers|Checkpoints|Decisions|Environments|Episodes|Groups|Initial states|Moments|Optimiser"
        r"|Pairs|Predictions|Responses|Rows|Samples|Screens|Simulations|Steps|Stored|Tasks|Those of them|Training"
        r"|Trajectories|Updates|Videos)\b"
    ),
}
"""Kind of number to a pattern for the beginning of such metrics' definitions; the first match counts."""
UNITS = {"seconds": "s", "shares": "%", "megabytes": "MB"}
"""Kind of number to the unit on its axis."""
CHARTS: dict[str, tuple[str, ...]] = {
    "Reward": ("reward/mean", "reward/std", "reward/std_within_groups"),
    "Reward terms": ("reward/*",),
    "Divergence from the reference and the sampling policy": ("policy/kl_ref", "policy/kl_old"),
    "Entropy": ("policy/entropy",),
    "Loss terms": ("loss/*",),
    "Implicit rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "Log-probabilities of the two sides": ("logps/chosen", "logps/rejected"),
    "Correctly ordered pairs": ("rewards/accuracies", "logps/accuracies"),
    "Importance ratio": ("policy/ratio_mean", "policy/ratio_max"),
    "Groups without a learning signal": ("reward/zero_variance_groups", "update/zero_advantage_groups"),
    "Finished responses": ("response/finished_fraction",),
    "Clipped decisions": ("policy/clip_fraction_low", "policy/clip_fraction_high"),
    "Decisions per sample": ("response/length_mean", "response/length_max"),
    "Gradient norm": ("optim/grad_norm",),
    "Learning rate": ("optim/lr",),
    "Coefficients": ("policy/kl_coef", "papo/gamma"),
    "PAPO": ("papo/*",),
    "APO": ("apo/*",),
    "Questions made easier or harder": ("augment/hinted", "augment/noised"),
    "Decisions per second": ("tokens/per_second",),
    "Peak memory": ("memory/peak_mb",),
}
EXACT = {pattern for patterns in CHARTS.values() for pattern in patterns if "*" not in pattern}
LOGARITHMIC = {"Gradient norm"}
