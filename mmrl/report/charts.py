"""Charts of the report as SVG, and the colours and axes that all figures share."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mmrl.files import replaced, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# after Okabe and Ito: safe for colour-blind readers; lines have a contrast of 3 on light and on dark cards, text of 4.5
COLOURS = ("#2f88c8", "#d9640f", "#009e73", "#c95f9c", "#8c6bb1", "#aa7c11", "#1b93a5", "#7f7f7f")
MARKERS = "os^DvPX*"
"""Markers that distinguish curves in addition to their colour."""
MARKS = 6
"""Number of markers on a curve with more points than that."""
INK = "#5d656f"
INK_ON_DARK = "#9aa3ad"
GRID = "#7b808733"
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""Characters that neither a page nor a figure can show."""


def colour_cycle() -> Iterator[str]:
    """Colours for any number of curves."""
    return itertools.cycle(COLOURS)


def shown_text(text: str) -> str:
    """Text of a user as a figure can show it: control characters replaced, and no `$...$` read as a formula."""
    return CONTROL.sub("\ufffd", text).replace("$", r"\$")


def style_axes(axes: Axes) -> None:
    """Set a thin grid, two spines and integer steps."""
    from matplotlib.ticker import MaxNLocator

    axes.patch.set_alpha(0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9)
    axes.ticklabel_format(scilimits=(-3, 5), useOffset=False)
    axes.yaxis.get_offset_text().set_color(INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def draw_legend(axes: Axes) -> None:
    """Draw the legend if there is room."""
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, loc="best")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, replacing an earlier file in one step."""
    with replaced(path) as draft:
        figure.savefig(draft, format="png", dpi=130)


def save_svg(figure: Figure, path: Path) -> None:
    """Write a figure as SVG without a background, whose text and axes follow the colour scheme of the page."""
    import matplotlib

    figure.set_facecolor("none")
    with matplotlib.rc_context({"svg.hashsalt": path.name}):  # equal bytes for an equal figure
        text = _svg(figure).decode()
    text = text.replace(INK, "var(--ink)").replace("#000000", "var(--ink)")
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ --ink: {INK_ON_DARK} }} }}"
    style = f"<style>svg {{ --ink: {INK}; fill: var(--ink) }} {dark}</style>"
    head, end, rest = text.partition("<defs>")
    write_atomically(path, head + style + end + rest)


WIDTH = 4.0
"""Width of a chart in inches: about a card of the page or a phone, so that 9-point text stays readable."""
WHOLE_SCALE = 10
"""Percentage above which a chart of fractions ranges from 0 to 100, like its neighbours."""
LEGEND_CHARACTERS = 55
"""Maximum number of characters in a row of names above a chart."""
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
Estimates = Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]]


class Chart(NamedTuple):
    """A drawing and the position of its horizontal axis, used to show the values under the pointer."""

    svg: bytes
    box: tuple[float, ...] = ()
    """Left, top, width and height of the panels as fractions of the drawing."""
    limits: tuple[float, ...] = ()
    """Values at the left and right end of the axis."""


def line_chart(series: Series, *, unit: str = "", log_scale: bool = False, smooth: bool = True) -> Chart:
    """Curves over steps: the raw values faint, their moving average on top; shares in per cent."""
    figure, axes = _canvas(unit)
    if unit == "%":
        series = {label: (steps, [100 * value for value in values]) for label, (steps, values) in series.items()}
    for place, ((label, (steps, values)), colour) in enumerate(zip(series.items(), colour_cycle(), strict=False)):
        marker = MARKERS[place % len(MARKERS)]
        if len(values) < 3:
            axes.plot(steps, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=shown_text(label))
            continue
        axes.plot(steps, values, color=colour, alpha=0.28, linewidth=1)
        every = max(1, len(values) // MARKS)
        marks: dict[str, Any] = {"marker": marker, "markersize": 4, "markevery": (place * every // len(series), every)}
        average = moving_average(values, max(1, len(values) // 25) if smooth else 1)
        axes.plot(steps, average, color=colour, linewidth=1.8, label=shown_text(label), **marks)
    everything = np.concatenate([np.asarray(values, dtype=float) for _, values in series.values()])
    if log_scale and (everything[np.isfinite(everything)] > 0).all():
        axes.set_yscale("log")
    elif unit == "%" and WHOLE_SCALE < np.nanmax(everything) <= 100 and np.nanmin(everything) >= 0:
        axes.set_ylim(-3, 103)
    _legend_above(figure)
    return _chart(figure)


def interval_chart(series: Estimates, limits: tuple[float, float] | None = None) -> Chart:
    """Chart of label to (steps, values, low ends, high ends) as fractions, shown in percent; NaN ends draw no interval.

    Charts shown side by side get the same `limits`, the ends of the vertical axis as shares.
    """
    figure, axes = _canvas("%")
    for place, ((label, (steps, *shares)), colour) in enumerate(zip(series.items(), colour_cycle(), strict=False)):
        values, low, high = (100 * np.asarray(share, dtype=float) for share in shares)
        _draw_intervals(axes, steps, values, low, high, colour, label, MARKERS[place % len(MARKERS)])
    if limits is not None:
        axes.set_ylim(100 * limits[0], 100 * limits[1])
    if len(series) > 1:
        _legend_above(figure)
    return _chart(figure)


def panel_chart(series: Estimates, x_label: str = "step") -> Chart:
    """Chart of label to (positions, values, low ends, high ends): one panel each, over a shared horizontal axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.5 + 1.15 * len(series)), layout="constrained")
    figure.patch.set_alpha(0)
    panels = np.atleast_1d(figure.subplots(len(series), 1, sharex=True))
    for axes, (label, (positions, *columns)), colour in zip(panels, series.items(), colour_cycle(), strict=False):
        values, low, high = (np.asarray(column, dtype=float) for column in columns)
        style_axes(axes)
        _draw_intervals(axes, positions, values, low, high, colour, label)
        axes.set_title(shown_text(label), fontsize=9, color=INK, loc="left")
    panels[-1].set_xlabel(x_label, color=INK)
    return _chart(figure)


def stacked_chart(series: Series) -> Chart:
    """Stacked chart of the seconds of stages over steps, the first at the bottom."""
    figure, axes = _canvas("s")
    steps = next(iter(series.values()))[0]
    layers = [np.nan_to_num(moving_average(values, max(1, len(values) // 50))) for _, values in series.values()]
    axes.stackplot(steps, layers, labels=[*map(shown_text, series)], colors=COLOURS, alpha=0.75)
    axes.set_ylim(bottom=0)
    for layer in axes.collections:  # a line between neighbours, whose colours may look alike
        layer.set(edgecolor=INK, linewidth=0.6)
    _legend_above(figure)
    return _chart(figure)


def moving_average(values: Sequence[float], window: int) -> np.ndarray:
    """Centred mean (n,) over finite neighbours; NaN if there are none."""
    array = np.asarray(values, dtype=float)
    half = window // 2
    if half == 0:
        return array
    kernel = np.ones(2 * half + 1)
    finite = np.isfinite(array)
    total = np.convolve(np.where(finite, array, 0.0), kernel)[half : half + array.size]
    count = np.convolve(finite.astype(float), kernel)[half : half + array.size]
    return np.divide(total, count, out=np.full(array.size, math.nan), where=count > 0)


def _draw_intervals(
    axes: Axes,
    positions: Sequence[float],
    values: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    colour: str,
    label: str,
    marker: str = "o",
) -> None:
    reach = np.nan_to_num(np.maximum([values - low, high - values], 0))
    look: dict[str, Any] = {"marker": marker, "markersize": 4.5, "capsize": 3, "linewidth": 1.6}
    axes.errorbar(positions, values, yerr=reach, color=colour, label=shown_text(label), **look)


def _canvas(unit: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    style_axes(axes)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel(unit, color=INK)
    return figure, axes


def _legend_above(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if not labels:  # matplotlib shows no name that is empty or begins with an underscore
        return
    columns = max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=INK,
    )


def _chart(figure: Figure) -> Chart:
    svg = _svg(figure)  # which places the panels
    places = [axes.get_position() for axes in figure.axes]
    left, right = min(place.x0 for place in places), max(place.x1 for place in places)
    low, high = min(place.y0 for place in places), max(place.y1 for place in places)
    box = (left, 1 - high, right - left, high - low)
    return Chart(svg, tuple(round(float(part), 4) for part in box), tuple(map(float, figure.axes[-1].get_xlim())))


def _svg(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    rules = (f'[style*="{part}: {INK}"] {{ {part}: {INK_ON_DARK} !important }}' for part in ("fill", "stroke"))
    dark = f"@media (prefers-color-scheme: dark) {{ {' '.join(rules)} }}</style>"
    return buffer.getvalue().replace(b"</style>", dark.encode(), 1)
