"""Colours and axes that all figures share, readable on light and dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.files import replaced

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# after Okabe and Ito, without black and yellow: safe for colour-blind readers, visible on white and black
COLOURS = ("#2f88c8", "#d9640f", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#7f7f7f")
INK = "#7b8087"
GRID = "#7b808733"


def colour_cycle() -> list[str]:
    """Colours for more curves than there are colours."""
    return list(COLOURS) * 3


def style_axes(axes: Axes) -> None:
    """Thin grid, two spines, whole steps."""
    from matplotlib.ticker import MaxNLocator

    axes.patch.set_alpha(0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9)
    axes.ticklabel_format(scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set_color(INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def draw_legend(axes: Axes) -> None:
    """Legend where there is room."""
    axes.legend(fontsize=8, frameon=False, labelcolor=INK, loc="best")


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, replacing an earlier file in one step."""
    with replaced(path) as draft:
        figure.savefig(draft, format="png", dpi=130)
