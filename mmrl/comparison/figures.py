"""Figures of a comparison: comparison.png, and work.png if the experiment has costs.

Differences come first, in points; conditions without an order are rows without connecting lines, and labels are next to
what they name.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrl.comparison.curves import evaluations, logged_steps, number, read_curves
from mmrl.comparison.evidence import UNITS
from mmrl.comparison.experiment import ExperimentConfig, FigureConfig
from mmrl.comparison.plans import RunPlan, is_finished
from mmrl.comparison.results import ArmResult, Comparison, Difference
from mmrl.comparison.summary import plan_comparison
from mmrl.report.charts import INK, MARKERS, colour_cycle, draw_legend, save_png, shown_text, style_axes
from mmrl.runs.statistics import SHARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#8a929b"
"""Arms that a claim is not about."""
WIDE = 9.2
"""Width in inches at which a page shows the figure, so that its text keeps its size."""
TITLE: dict[str, Any] = {"fontsize": 10, "color": INK, "loc": "left"}
TITLE_LENGTH = 36
"""Maximum number of characters in a line of a title, so that it ends before the next panel's begins."""
FAR = 3.0
"""Other arms share the claim's axis if they lie within this many widths of it."""
LABEL_GAP = 0.08
"""Gap between the names at the ends of two curves, as a fraction of the panel's height."""

LOGGED = {"episode/success": "successful training episodes, %", "reward/mean": "mean reward of the training samples"}
"""Metrics of the training steps that show the learning if the evaluations are too few for a curve, and their titles."""

Line = tuple[Sequence[float], Sequence[float]]
"""Positions and values of one run."""


class Band(NamedTuple):
    """Mean and range of several runs over their steps or costs."""

    places: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int

    @classmethod
    def of(cls, runs: Sequence[Line]) -> Band:
        """The band where all runs have values; the mean of joined lines bends where any of them does."""
        pairs = [(np.asarray(places, dtype=float), np.asarray(values, dtype=float)) for places, values in runs]
        known = [(places[np.isfinite(values)], values[np.isfinite(values)]) for places, values in pairs]
        known = [(places, values) for places, values in known if places.size]
        if not known:
            nothing = np.empty(0)
            return cls(nothing, nothing, nothing, nothing, 0)
        start, end = max(places[0] for places, _ in known), min(places[-1] for places, _ in known)
        grid = np.unique(np.concatenate([places for places, _ in known]))
        grid = grid[(grid >= start) & (grid <= end)]
        values = np.array([np.interp(grid, *run) for run in known])
        return cls(grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0), len(known))


def draw(experiment: ExperimentConfig, folder: Path, comparison: Comparison) -> None:
    """Write the figures into the output folder."""
    plans = plan_comparison(experiment, folder)
    curves, title = learning_curves(experiment, folder)
    save_png(comparison_figure(comparison, curves, supported(experiment, comparison), title), folder / "comparison.png")
    work = comparison.work
    if work is not None:
        found = read_curves(experiment, plans)
        by_cost = {
            cost: {
                experiment.figure.labels.get(arm, arm): [(run.costs[cost], run.values) for run in runs.values()]
                for arm, runs in found.items()
            }
            for cost in work.costs
        }
        targets = [target for target in work.targets.values() if target is not None]
        save_png(work_figure(experiment.name, work.metric, by_cost, targets), folder / "work.png")


def supported(experiment: ExperimentConfig, comparison: Comparison) -> FigureConfig:
    """The figure's settings, without the claim if these runs do not show the stored findings."""
    look, evidence = experiment.figure, experiment.evidence
    if evidence is None:
        return look
    shown = [
        found.low <= UNITS[found.unit][0] * _number(comparison.differences[found.arm].mean) <= found.high
        for found in evidence.findings
        if (found.metric or experiment.metric) == experiment.metric
        and (found.against or experiment.baseline) == comparison.baseline
        and found.arm in comparison.differences
    ]
    return look if shown and all(shown) else dataclasses.replace(look, claim="")


def stored_figure(experiment: ExperimentConfig) -> Figure:
    """The figure of a comparison whose runs no longer exist, from the numbers of its page in `figure.stored`."""
    look, stored = experiment.figure, experiment.figure.stored
    if stored is None:
        raise ValueError(f"{experiment.name} has no numbers in `figure.stored`")
    unit, baseline = stored.unit or look.unit, stored.baseline or experiment.baseline
    _, factor = _axis(unit)
    arms, differences = {}, {}
    first = stored.arms[baseline]
    for name, arm in stored.arms.items():
        arms[name] = ArmResult({place: value / factor for place, value in enumerate(arm.seeds)}, arm.value / factor)
        if arm.difference:
            *mean, low, high = (end / factor for end in arm.difference)
            paired = zip(arm.seeds, first.seeds, strict=False) if len(arm.seeds) == len(experiment.seeds) else ()
            pairs = {place: (value - other) / factor for place, (value, other) in enumerate(paired)}
            middle = mean[0] if mean else (arm.value - first.value) / factor
            differences[name] = Difference(pairs, [], 0, middle, low, high)
    seeds, better = experiment.seeds, experiment.higher_is_better
    head = ("done", "", experiment.name, experiment.budget, unit, better, baseline, seeds, None)
    comparison = Comparison(*head, arms, differences, None, None, None)
    curves = {}
    for name, arm in stored.arms.items():
        if arm.curve:
            places, mean, low, high = np.array(arm.curve).T
            curves[name] = Band(places, mean, low, high, stored.curve_seeds or len(seeds))
    return comparison_figure(comparison, curves, dataclasses.replace(look, unit=unit), stored.curves_title)


def learning_curves(experiment: ExperimentConfig, folder: Path) -> tuple[dict[str, Band], str]:
    """The curve of each arm in the unit of the figure, and their title.

    They show the compared metric over the evaluations. Two evaluations, the start and the end, are no curve: then what
    the training steps log is shown, with the title of `LOGGED`.
    """
    plans = {
        arm: [plan for plan in by_seed.values() if is_finished(plan)]
        for arm, by_seed in plan_comparison(experiment, folder).items()
    }
    unit, factor = _axis(experiment.metric, experiment.figure.unit)
    runs = {arm: [_evaluated(experiment, plan) for plan in own] for arm, own in plans.items()}
    if any(len(steps) > 2 for own in runs.values() for steps, _ in own):
        return _bands(runs, factor), f"{unit}: mean and range of seeds"
    for name, title in LOGGED.items():
        trained = {arm: [_logged(plan, name) for plan in own if plan.reads == "end"] for arm, own in plans.items()}
        if any(steps for own in trained.values() for steps, _ in own):
            return _bands(trained, _axis(name, title)[1]), f"{title}: mean and range of seeds"
    return {}, ""


def _bands(runs: Mapping[str, Sequence[Line]], factor: float) -> dict[str, Band]:
    scaled = {arm: [(steps, [factor * value for value in run]) for steps, run in own] for arm, own in runs.items()}
    bands = {arm: Band.of([run for run in own if len(run[0]) > 2]) for arm, own in scaled.items()}
    return {arm: band for arm, band in bands.items() if band.seeds}


def _evaluated(experiment: ExperimentConfig, plan: RunPlan) -> Line:
    """The metric over a run's evaluations; of an arm that reads the start, the one point that it has."""
    records = evaluations(experiment, plan)[: 1 if plan.reads == "start" else None]
    return [record["step"] for record in records], [number(record, experiment.metric) for record in records]


def _logged(plan: RunPlan, name: str) -> Line:
    """A metric over a run's training steps."""
    rows = [row for row in logged_steps(plan) if isinstance(row.get(name), int | float)]
    return [row["step"] for row in rows], [row[name] for row in rows]


def comparison_figure(
    comparison: Comparison,
    curves: Mapping[str, Band],
    figure: FigureConfig | None = None,
    curves_title: str = "",
) -> Figure:
    """Views of arms on shared seeds: paired differences, values, and learning curves if there are any."""
    from matplotlib.figure import Figure

    look = figure or FigureConfig()
    unit, factor = _axis(comparison.metric, look.unit)
    values = {
        arm: {seed: factor * value for seed, value in entry.values.items() if value is not None}
        for arm, entry in comparison.arms.items()
    }
    names = {arm: shown_text(look.labels.get(arm, arm.replace("_", " "))) for arm in values}
    colours = dict(zip(values, colour_cycle(), strict=False))
    if look.highlight:
        colours = {arm: colour if arm in look.highlight else GREY for arm, colour in colours.items()}
    rows = 2 if curves else 1
    height = 1.1 + 0.5 * len(values)
    canvas = Figure(figsize=(WIDE, height + 3.4 * (rows - 1)), layout="constrained", facecolor="white")
    grid = canvas.add_gridspec(rows, 2, height_ratios=[height, 3.4][:rows])
    pairs, points = (canvas.add_subplot(grid[0, place]) for place in (0, 1))
    scaled = {arm: _scaled(found, factor) for arm, found in comparison.differences.items()}
    _draw_differences(pairs, list(values), scaled, colours, look.highlight)
    title = f"difference from {names[comparison.baseline]}{' in points' if factor != 1 else ''}"
    pairs.set_title(textwrap.fill(title, TITLE_LENGTH), **TITLE)
    told = {arm: _said(scaled[arm], factor) if arm in scaled else "" for arm in values}
    told[comparison.baseline] = "baseline"
    _name_rows(pairs, [f"{names[arm]}\n{told[arm]}" for arm in values])
    means = {arm: factor * _number(entry.mean) for arm, entry in comparison.arms.items()}
    _draw_values(points, values, means, colours, factor)
    points.set_title(textwrap.fill(shown_text(unit), TITLE_LENGTH), **TITLE)
    _name_rows(points, [""] * len(values))
    if rows == 2:
        bands = canvas.add_subplot(grid[1, :])
        _draw_bands(bands, curves, names, colours)
        bands.set_title(shown_text(curves_title), **TITLE)
    canvas.suptitle(shown_text(look.claim or comparison.name.replace("_", " ")), fontsize=11, wrap=True)
    return canvas


def _axis(metric: str, unit: str = "") -> tuple[str, float]:
    """The name of an axis, and the factor of its values: shares, and what a given unit says, are in per cent."""
    shown = unit or (f"{metric.replace('/', ', ')}, %" if metric.startswith(SHARES) else metric)
    return shown, 100.0 if "%" in shown else 1.0


def work_figure(
    title: str,
    metric: str,
    curves: Mapping[str, Mapping[str, Sequence[Line]]],
    targets: Sequence[float] = (),
) -> Figure:
    """A metric over its cost, with one panel per cost, one colour per arm, and the mean target as a dashed line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    metric, factor = _axis(metric)
    figure = Figure(figsize=(4.6 * len(curves), 4.2), layout="constrained", facecolor="white")
    panels = np.atleast_1d(figure.subplots(1, len(curves), sharey=True))
    for axes, (cost, arms) in zip(panels, curves.items(), strict=True):
        style_axes(axes)
        for (arm, runs), colour in zip(arms.items(), colour_cycle(), strict=False):
            scaled = [(costs, [factor * value for value in values]) for costs, values in runs]
            band = Band.of(scaled)
            if band.seeds:
                _draw_band(axes, band, colour, label=f"{shown_text(arm)} ({len(runs)} seeds)")
        if targets:
            axes.axhline(factor * float(np.mean(targets)), color=INK, linewidth=1, linestyle="--", label="target, mean")
        axes.set_xlabel(shown_text(cost), color=INK)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel(shown_text(metric), color=INK)
    if panels[0].get_legend_handles_labels()[0]:
        draw_legend(panels[0])
    figure.suptitle(f"{shown_text(title.replace('_', ' '))}: mean and range of seeds")
    return figure


def _scaled(found: Difference, factor: float) -> Difference:
    """A difference in the units of the figure."""
    mean, low, high = (None if end is None else factor * end for end in (found.mean, found.low, found.high))
    per_seed = {seed: factor * value for seed, value in found.per_seed.items()}
    return dataclasses.replace(found, per_seed=per_seed, mean=mean, low=low, high=high)


def _said(found: Difference, factor: float) -> str:
    """A mean difference with its interval in figures."""
    if found.mean is None:
        return "–"
    low, high = _number(found.low), _number(found.high)
    shown = f"+{_style((found.mean, low, high), factor)}"
    interval = "" if math.isnan(low) else f" ({low:{shown}} to {high:{shown}})"
    return f"{found.mean:{shown}}{interval}"


def _style(numbers: Iterable[float], factor: float) -> str:
    """Format of numbers shown together: one decimal of a percentage, three of a score below 1."""
    largest = max((abs(number) for number in numbers if math.isfinite(number)), default=0.0)
    return ".1f" if factor != 1 else ".3f" if 0.01 <= largest < 1 else ".3g"


def _draw_differences(
    axes: Axes,
    arms: Sequence[str],
    differences: Mapping[str, Difference],
    colours: Mapping[str, str],
    highlight: Sequence[str],
) -> None:
    """A row an arm: each seed, and the mean with its interval.

    The axis is that of the arms that the claim is about; a control far away from them is an arrow at the edge.
    """
    style_axes(axes)
    axes.axvline(0, color=INK, linewidth=1)
    claimed = [differences[arm] for arm in highlight if arm in differences] or list(differences.values())
    known, everything = _reach(claimed), _reach(list(differences.values()))
    if max(everything) - min(everything) <= FAR * (max(known) - min(known)):
        known = everything
    margin = 0.08 * (max(known) - min(known)) or 1.0
    left, right = min(known) - margin, max(known) + margin
    axes.set_xlim(left, right)
    for row, arm in enumerate(arms):
        found = differences.get(arm)
        if found is None or found.mean is None:
            continue
        if not left <= found.mean <= right:
            edge = left if found.mean < left else right
            axes.plot([edge], [row], marker="<" if edge == left else ">", color=colours[arm], clip_on=False)
            continue
        pairs = list(found.per_seed.values())
        axes.scatter(pairs, [row + 0.22] * len(pairs), color=colours[arm], s=14, alpha=0.55, linewidths=0)
        ends = np.nan_to_num([[found.mean - _number(found.low)], [_number(found.high) - found.mean]])
        look: dict[str, Any] = {"marker": "D", "markersize": 5, "capsize": 4, "linewidth": 2}
        axes.errorbar([found.mean], [row], xerr=ends, color=colours[arm], **look)


def _reach(shown: Sequence[Difference]) -> list[float]:
    """All numbers that the panel of differences has to show: zero, each seed and the ends of the intervals."""
    found = [value for row in shown for value in (*row.per_seed.values(), row.low, row.high) if value]
    return [0.0, *(value for value in found if math.isfinite(value))]


def _draw_values(
    axes: Axes,
    values: Mapping[str, Mapping[int, float]],
    means: Mapping[str, float],
    colours: Mapping[str, str],
    factor: float,
) -> None:
    """A row an arm: each seed as a dot, the mean as a stroke with its number; no line joins arms."""
    style_axes(axes)
    axes.margins(x=0.08)
    for row, (arm, by_seed) in enumerate(values.items()):
        finished = list(by_seed.values())
        axes.scatter(finished, [row] * len(finished), color=colours[arm], s=20, alpha=0.55, linewidths=0)
        mean = means[arm]
        if math.isfinite(mean):
            shown = f"{mean:{_style(means.values(), factor)}}"
            axes.vlines(mean, row - 0.25, row + 0.25, color=colours[arm], linewidth=2.5)
            axes.annotate(shown, (mean, row - 0.27), ha="center", va="bottom", fontsize=8, color=INK)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Names of the rows, the first at the top."""
    from matplotlib.ticker import AutoLocator

    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.65)
    axes.xaxis.set_major_locator(AutoLocator())
    axes.grid(visible=False, axis="y")


def _draw_bands(axes: Axes, curves: Mapping[str, Band], names: Mapping[str, str], colours: Mapping[str, str]) -> None:
    style_axes(axes)
    ends = []
    for place, (arm, band) in enumerate(curves.items()):
        _draw_band(axes, band, colours[arm], marker=MARKERS[place % len(MARKERS)], markersize=4)
        ends.append((float(band.mean[-1]), f"{names[arm]} ({band.seeds} seeds)", colours[arm]))
    axes.set_xlabel("step", color=INK)
    _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """The name of each curve next to its end, moved apart if names would overlap."""
    low, high = axes.get_ylim()
    at = -math.inf
    for value, name, colour in sorted(ends):
        at = max((value - low) / (high - low), at + LABEL_GAP)
        place: dict[str, Any] = {"xycoords": "axes fraction", "va": "center", "annotation_clip": False}
        axes.annotate(name, (1.01, at), color=colour, fontsize=9, **place)


def _draw_band(axes: Axes, band: Band, colour: str, **look: Any) -> None:
    axes.plot(band.places, band.mean, color=colour, linewidth=2, **look)
    axes.fill_between(band.places, band.low, band.high, color=colour, alpha=0.15, linewidth=0)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
