"""Figures of a comparison: comparison.png, and work.png where the experiment has costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.compare.curves import evaluations, read_curves
from mmrl.compare.experiment import ExperimentConfig
from mmrl.compare.plans import RunPlan, is_finished
from mmrl.compare.results import Comparison, Difference
from mmrl.compare.summary import plan_comparison
from mmrl.report.charts import INK, colour_cycle, draw_legend, save_png, style_axes
from mmrl.runs.statistics import SHARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHARACTERS_BESIDE = 60
"""Characters of the names of columns that fit side by side below a panel."""

Line = tuple[Sequence[float], Sequence[float]]
"""Positions and values of one run."""


def draw(experiment: ExperimentConfig, folder: Path, comparison: Comparison) -> None:
    """Write the figures into the output folder."""
    plans = plan_comparison(experiment, folder)
    curves = {
        arm: [_curve(experiment, plan) for plan in by_seed.values() if is_finished(plan)]
        for arm, by_seed in plans.items()
    }
    save_png(comparison_figure(comparison, curves), folder / "comparison.png")
    work = comparison.work
    if work is not None:
        found = read_curves(experiment, plans)
        by_cost = {
            cost: {arm: [(run.costs[cost], run.values) for run in runs.values()] for arm, runs in found.items()}
            for cost in work.costs
        }
        targets = [target for target in work.targets.values() if target is not None]
        save_png(work_figure(experiment.name, work.metric, by_cost, targets), folder / "work.png")


def _curve(experiment: ExperimentConfig, plan: RunPlan) -> Line:
    """The metric over a run's evaluations; of an arm that reads the start, the one point that it has."""
    records = evaluations(experiment, plan)[: 1 if plan.reads == "start" else None]
    return [record["step"] for record in records], [record.get(experiment.metric, math.nan) for record in records]


def comparison_figure(comparison: Comparison, curves: Mapping[str, Sequence[Line]]) -> Figure:
    """Three views of arms on shared seeds: values seed by seed, paired differences, curves over steps."""
    from matplotlib.figure import Figure

    metric, factor = _axis(comparison.metric)
    values = {
        arm: {seed: factor * value for seed, value in entry.values.items() if value is not None}
        for arm, entry in comparison.arms.items()
    }
    # two evaluations are the start and the end, which the first panel shows
    curves = {
        arm: [(steps, [factor * value for value in run]) for steps, run in runs if len(steps) > 2]
        for arm, runs in curves.items()
    }
    panels = 3 if any(curves.values()) else 2
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained", facecolor="white")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for panel in axes:
        style_axes(panel)
    colours = dict(zip(values, colour_cycle(), strict=False))
    _draw_pairs(axes[0], values, metric, colours)
    _draw_differences(axes[1], comparison.differences, comparison.baseline, colours, factor)
    if panels == 3:
        _draw_bands(axes[2], curves, metric, colours)
    figure.suptitle(comparison.name.replace("_", " "))
    return figure


def _axis(metric: str) -> tuple[str, float]:
    """A metric's name on an axis, and the factor of its values: shares are in per cent."""
    return (f"{metric.replace('/', ', ')}, %", 100.0) if metric.startswith(SHARES) else (metric, 1.0)


def work_figure(
    title: str,
    metric: str,
    curves: Mapping[str, Mapping[str, Sequence[Line]]],
    targets: Sequence[float] = (),
) -> Figure:
    """A metric over its cost, one panel a cost and one colour an arm, with the mean target as a dashed line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    metric, factor = _axis(metric)
    figure = Figure(figsize=(4.6 * len(curves), 4.2), layout="constrained", facecolor="white")
    panels = np.atleast_1d(figure.subplots(1, len(curves), sharey=True))
    for axes, (cost, arms) in zip(panels, curves.items(), strict=True):
        style_axes(axes)
        for (arm, runs), colour in zip(arms.items(), colour_cycle(), strict=False):
            scaled = [(costs, [factor * value for value in values]) for costs, values in runs]
            _draw_cost_band(axes, scaled, arm, colour)
        if targets:
            axes.axhline(factor * float(np.mean(targets)), color=INK, linewidth=1, linestyle="--", label="target, mean")
        axes.set_xlabel(cost, color=INK)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    panels[0].set_ylabel(metric, color=INK)
    if panels[0].get_legend_handles_labels()[0]:
        draw_legend(panels[0])
    figure.suptitle(f"{title.replace('_', ' ')}: mean and range of seeds")
    return figure


def _draw_pairs(axes: Axes, values: Mapping[str, Mapping[int, float]], metric: str, colours: Mapping[str, str]) -> None:
    arms = list(values)
    for seed in sorted({seed for by_seed in values.values() for seed in by_seed}):
        points = [(index, values[arm][seed]) for index, arm in enumerate(arms) if seed in values[arm]]
        axes.plot(*zip(*points, strict=True), color=INK, alpha=0.4, linewidth=1, zorder=1)
    for index, arm in enumerate(arms):
        finished = list(values[arm].values())
        axes.scatter([index] * len(finished), finished, color=colours[arm], s=26, zorder=2)
        if finished:
            mean = float(np.mean(finished))
            axes.hlines(mean, index - 0.22, index + 0.22, color=colours[arm], linewidth=2.5, zorder=3)
    _name_columns(axes, arms)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_title("each seed, and the mean", fontsize=10, color=INK)
    axes.set_ylabel(metric, color=INK)


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    """Names below the columns, slanted where they would run into each other."""
    longest = max((len(line) for name in names for line in name.split("\n")), default=0)
    if len(names) * longest <= CHARACTERS_BESIDE:
        axes.set_xticks(range(len(names)), names)
    else:
        flat = [name.replace("\n", " ") for name in names]
        axes.set_xticks(range(len(names)), flat, rotation=30, ha="right", rotation_mode="anchor")


def _draw_differences(
    axes: Axes, differences: Mapping[str, Difference], baseline: str, colours: Mapping[str, str], factor: float
) -> None:
    axes.axhline(0, color=INK, linewidth=1)
    for index, (arm, found) in enumerate(differences.items()):
        pairs = [factor * value for value in found.per_seed.values()]
        spread = np.linspace(-0.08, 0.08, len(pairs)) if len(pairs) > 1 else np.zeros(len(pairs))
        axes.scatter(index - 0.18 + spread, pairs, color=colours[arm], s=20, alpha=0.55)
        if found.mean is not None:
            ends = [[found.mean - _number(found.low)], [_number(found.high) - found.mean]]
            reach = factor * np.nan_to_num(np.array(ends))
            look: dict[str, Any] = {"marker": "D", "capsize": 5, "linewidth": 2}
            axes.errorbar([index + 0.12], [factor * found.mean], yerr=reach, color=colours[arm], **look)
    _name_columns(axes, [f"{arm}\n− {baseline}" for arm in differences])
    axes.set_xlim(-0.5, max(len(differences), 1) - 0.5)
    unit = " in points" if factor != 1 else ""
    axes.set_title(f"paired differences{unit}, mean with 95 % interval", fontsize=10, color=INK)


def _draw_bands(
    axes: Axes,
    curves: Mapping[str, Sequence[Line]],
    metric: str,
    colours: Mapping[str, str],
) -> None:
    for arm, runs in curves.items():
        by_step: dict[float, list[float]] = {}
        for steps, values in runs:
            for step, value in zip(steps, values, strict=True):
                if math.isfinite(value):
                    by_step.setdefault(step, []).append(value)
        if not by_step:
            continue
        steps = sorted(by_step)
        means = [float(np.mean(by_step[step])) for step in steps]
        label = f"{arm} ({len(runs)} seeds)"
        axes.plot(steps, means, "o-", color=colours[arm], linewidth=2, markersize=4, label=label)
        lows, highs = ([pick(by_step[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, lows, highs, color=colours[arm], alpha=0.15, linewidth=0)
    axes.set_xlabel("step", color=INK)
    axes.set_title(f"{metric}: mean and range of seeds", fontsize=10, color=INK)
    draw_legend(axes)


def _draw_cost_band(axes: Axes, runs: Sequence[Line], label: str, colour: str) -> None:
    """Mean and range over the costs that all seeds have; the mean of joined lines bends where any of them does."""
    pairs = [(np.asarray(costs, dtype=float), np.asarray(values, dtype=float)) for costs, values in runs]
    known = [(costs[np.isfinite(values)], values[np.isfinite(values)]) for costs, values in pairs]
    known = [(costs, values) for costs, values in known if costs.size]
    if not known:
        return
    start, end = max(costs[0] for costs, _ in known), min(costs[-1] for costs, _ in known)
    grid = np.unique(np.concatenate([costs for costs, _ in known]))
    grid = grid[(grid >= start) & (grid <= end)]
    values = np.array([np.interp(grid, *run) for run in known])
    axes.plot(grid, values.mean(axis=0), color=colour, linewidth=2, label=f"{label} ({len(known)} seeds)")
    axes.fill_between(grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.15, linewidth=0)


def _number(value: float | None) -> float:
    return math.nan if value is None else value
