"""Figures of the report and of comparisons, drawn with matplotlib and readable on light and dark pages."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "comparison_figure",
    "interval_chart",
    "line_chart",
    "moving_average",
    "panel_chart",
    "save_png",
    "stacked_chart",
    "work_figure",
]

# after Okabe and Ito, without black and yellow: safe for colour-blind readers, visible on white and black
COLOURS = ("#2f88c8", "#d9640f", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
_INK = "#7b8087"
_GRID = "#7b808733"

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
Estimates = Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]]


def line_chart(series: Series, *, log_scale: bool = False) -> bytes:
    """Curves over steps: the raw values faint, their moving average on top.

    Args:
        series: Label to (steps, values); values that are not finite leave a gap.
        log_scale: Logarithmic values, for norms and rates; used only where every value is positive.

    Returns:
        The figure as SVG.
    """
    figure, axes = _canvas()
    for (label, (steps, values)), colour in zip(series.items(), _colours(), strict=False):
        smooth = moving_average(values, max(1, len(values) // 25))
        style: dict[str, Any] = {"marker": "o", "markersize": 4} if len(values) < 3 else {}
        axes.plot(steps, values, color=colour, alpha=0.28 if len(values) >= 3 else 1.0, linewidth=1, **style)
        axes.plot(steps, smooth, color=colour, linewidth=1.8, label=label)
    everything = np.concatenate([np.asarray(values, dtype=float) for _, values in series.values()])
    if log_scale and (everything[np.isfinite(everything)] > 0).all():
        axes.set_yscale("log")
    _legend_above(figure)
    return _svg(figure)


def interval_chart(series: Estimates) -> bytes:
    """Evaluated shares over steps, in per cent with their intervals.

    Args:
        series: Label to (steps, values, low ends, high ends) as shares; NaN ends draw no interval.

    Returns:
        The figure as SVG.
    """
    figure, axes = _canvas()
    for (label, (steps, *shares)), colour in zip(series.items(), _colours(), strict=False):
        values, low, high = (100 * np.asarray(share, dtype=float) for share in shares)
        _draw_intervals(axes, steps, values, low, high, colour, label)
    axes.set_ylabel("%", color=_INK)
    if len(series) > 1:
        _legend_above(figure)
    return _svg(figure)


def panel_chart(series: Estimates, x_label: str = "step") -> bytes:
    """Evaluated numbers of unlike scales: one panel each, over a shared horizontal axis.

    Args:
        series: Label to (positions, values, low ends, high ends); NaN ends draw no interval.
        x_label: What the positions count.

    Returns:
        The figure as SVG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 0.5 + 1.15 * len(series)), layout="constrained")
    figure.patch.set_alpha(0)
    panels = np.atleast_1d(figure.subplots(len(series), 1, sharex=True))
    for axes, (label, (positions, *columns)), colour in zip(panels, series.items(), _colours(), strict=False):
        values, low, high = (np.asarray(column, dtype=float) for column in columns)
        _style(axes)
        _draw_intervals(axes, positions, values, low, high, colour, label)
        axes.set_title(label, fontsize=9, color=_INK, loc="left")
    panels[-1].set_xlabel(x_label, color=_INK)
    return _svg(figure)


def stacked_chart(series: Series) -> bytes:
    """Parts that add up, over steps.

    Args:
        series: Label to (steps, values), all over the same steps; values that are not finite count as 0.

    Returns:
        The figure as SVG.
    """
    figure, axes = _canvas()
    steps = next(iter(series.values()))[0]
    layers = [np.nan_to_num(moving_average(values, max(1, len(values) // 50))) for _, values in series.values()]
    axes.stackplot(steps, layers, labels=list(series), colors=_colours()[: len(layers)], alpha=0.75, linewidth=0)
    axes.set_ylim(bottom=0)
    _legend_above(figure)
    return _svg(figure)


def moving_average(values: Sequence[float], window: int) -> np.ndarray:
    """Centred mean over finite neighbours.

    Args:
        values: (n,) numbers.
        window: Neighbours on each side plus itself are `2 * (window // 2) + 1`.

    Returns:
        (n,) means; NaN where no neighbour is finite.
    """
    array = np.asarray(values, dtype=float)
    half = window // 2
    if half == 0:
        return array
    kernel = np.ones(2 * half + 1)
    finite = np.isfinite(array)
    total = np.convolve(np.where(finite, array, 0.0), kernel)[half : half + array.size]
    count = np.convolve(finite.astype(float), kernel)[half : half + array.size]
    return np.divide(total, count, out=np.full(array.size, math.nan), where=count > 0)


def comparison_figure(
    title: str,
    metric: str,
    values: Mapping[str, Mapping[int, float]],
    baseline: str,
    differences: Mapping[str, Mapping[str, Any]],
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
) -> Figure:
    """Three views of arms on shared seeds: values seed by seed, paired differences, curves over steps.

    Args:
        title: Name of the experiment.
        metric: Name of the compared metric.
        values: Arm to seed to value; failed seeds are absent.
        baseline: Arm that the others are compared with.
        differences: Other arm to `per_seed` (seed to difference), `mean`, `low` and `high`.
        curves: Arm to one (steps, values) a seed; the panel is left out where no run has two evaluations.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    curves = {arm: [run for run in runs if len(run[0]) > 1] for arm, runs in curves.items()}
    panels = 3 if any(curves.values()) else 2
    figure = Figure(figsize=(4.6 * panels, 4.2), layout="constrained", facecolor="white")
    axes = np.atleast_1d(figure.subplots(1, panels))
    for panel in axes:
        _style(panel)
    colours = dict(zip(values, _colours(), strict=False))
    _draw_pairs(axes[0], values, metric, colours)
    _draw_differences(axes[1], differences, baseline, colours)
    if panels == 3:
        _draw_bands(axes[2], curves, metric, colours)
    figure.suptitle(title)
    return figure


def work_figure(
    title: str,
    metric: str,
    curves: Mapping[str, Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]]],
    targets: Sequence[float] = (),
) -> Figure:
    """A metric over what it cost, one panel a cost and one colour an arm, with the mean target as a dashed line.

    Args:
        title: Name of the experiment.
        metric: Name of the metric.
        curves: Cost to arm to one (costs, values) a seed; values that are not finite are joined over.
        targets: Value to reach at each seed; empty draws no line.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(curves), 4.2), layout="constrained", facecolor="white")
    panels = np.atleast_1d(figure.subplots(1, len(curves), sharey=True))
    for axes, (cost, arms) in zip(panels, curves.items(), strict=True):
        _style(axes)
        for (arm, runs), colour in zip(arms.items(), _colours(), strict=False):
            _draw_cost_band(axes, runs, arm, colour)
        if targets:
            axes.axhline(float(np.mean(targets)), color=_INK, linewidth=1, linestyle="--", label="target, mean")
        axes.set_xlabel(cost, color=_INK)
    panels[0].set_ylabel(metric, color=_INK)
    if panels[0].get_legend_handles_labels()[0]:
        _legend(panels[0])
    figure.suptitle(f"{title}: mean and range of seeds")
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, replacing an earlier file in one step.

    Args:
        figure: The figure.
        path: The PNG file.
    """
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png", dpi=130)
    partial.replace(path)


def _draw_pairs(axes: Axes, values: Mapping[str, Mapping[int, float]], metric: str, colours: Mapping[str, str]) -> None:
    arms = list(values)
    for seed in sorted({seed for by_seed in values.values() for seed in by_seed}):
        points = [(index, values[arm][seed]) for index, arm in enumerate(arms) if seed in values[arm]]
        axes.plot(*zip(*points, strict=True), color=_INK, alpha=0.4, linewidth=1, zorder=1)
    for index, arm in enumerate(arms):
        finished = list(values[arm].values())
        axes.scatter([index] * len(finished), finished, color=colours[arm], s=26, zorder=2)
        if finished:
            mean = float(np.mean(finished))
            axes.hlines(mean, index - 0.22, index + 0.22, color=colours[arm], linewidth=2.5, zorder=3)
    axes.set_xticks(range(len(arms)), arms)
    axes.set_xlim(-0.5, len(arms) - 0.5)
    axes.set_title("each seed, and the mean", fontsize=10, color=_INK)
    axes.set_ylabel(metric, color=_INK)


def _draw_differences(
    axes: Axes, differences: Mapping[str, Mapping[str, Any]], baseline: str, colours: Mapping[str, str]
) -> None:
    axes.axhline(0, color=_INK, linewidth=1)
    for index, (arm, difference) in enumerate(differences.items()):
        pairs = list(difference["per_seed"].values())
        spread = np.linspace(-0.08, 0.08, len(pairs)) if len(pairs) > 1 else np.zeros(len(pairs))
        axes.scatter(index - 0.18 + spread, pairs, color=colours[arm], s=20, alpha=0.55)
        if pairs:
            mean, low, high = (difference[key] for key in ("mean", "low", "high"))
            reach = np.nan_to_num(np.array([[mean - _number(low)], [_number(high) - mean]]))
            axes.errorbar([index + 0.12], [mean], yerr=reach, color=colours[arm], marker="D", capsize=5, linewidth=2)
    axes.set_xticks(range(len(differences)), [f"{arm}\n− {baseline}" for arm in differences])
    axes.set_xlim(-0.5, max(len(differences), 1) - 0.5)
    axes.set_title("paired differences, mean with 95 % interval", fontsize=10, color=_INK)


def _draw_bands(
    axes: Axes,
    curves: Mapping[str, Sequence[tuple[Sequence[float], Sequence[float]]]],
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
        axes.plot(steps, means, color=colours[arm], linewidth=2, label=f"{arm} ({len(runs)} seeds)")
        lows, highs = ([pick(by_step[step]) for step in steps] for pick in (min, max))
        axes.fill_between(steps, lows, highs, color=colours[arm], alpha=0.15, linewidth=0)
    axes.set_xlabel("step", color=_INK)
    axes.set_title(f"{metric}: mean and range of seeds", fontsize=10, color=_INK)
    _legend(axes)


def _draw_intervals(
    axes: Axes,
    positions: Sequence[float],
    values: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    colour: str,
    label: str,
) -> None:
    reach = np.nan_to_num(np.maximum([values - low, high - values], 0))
    look: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.6}
    axes.errorbar(positions, values, yerr=reach, color=colour, label=label, **look)


def _draw_cost_band(
    axes: Axes, runs: Sequence[tuple[Sequence[float], Sequence[float]]], label: str, colour: str
) -> None:
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


def _canvas() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.4, 2.7), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    _style(axes)
    axes.set_xlabel("step", color=_INK)
    return figure, axes


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.patch.set_alpha(0)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=_INK, labelsize=9)
    axes.ticklabel_format(scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set_color(_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_INK)


def _legend_above(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    columns = max(1, min(len(labels), 74 // (max(map(len, labels)) + 6)))
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=_INK,
    )


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, labelcolor=_INK, loc="best")


def _colours() -> list[str]:
    return list(COLOURS) * 3


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
