"""Screens drawn without a browser: a grid of icons, each asked for by name or by function.

The setting of AEPO's confidence trap: a supervised start points at the right icon when asked by name and, almost
certainly, at a wrong one when asked by function. Reinforcement learning has to find the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmrl.gui.answers import answer_text, answer_tokens
from mmrl.gui.coords import Box, CoordinateSpace
from mmrl.gui.icons import ICONS, Color, draw_icon
from mmrl.gui.samples import GroundingSample
from mmrl.gui.tables import write_samples

KINDS = ("name", "function")
"""Kinds of instruction."""
ASKS = ("one", "some")
"""Whether a question asks for one point or for any number of points; the column `ask`."""
LIST = "everything"
"""The question whose worked answer lists every icon with its name and position."""
VOCAB_SIZE = 600
"""Enough for each word of the questions to be one token."""


@dataclass(frozen=True)
class IconGrid:
    """Layout of the grid."""

    columns: int = 4
    rows: int = 3
    cell_px: int = 32
    """Side of a cell; with 32, Qwen3-VL sees a cell as one token."""
    min_icon_px: int = 24
    """Smallest side of an icon."""
    max_icon_px: int = 28
    """Largest side of an icon."""
    jitter_px: int = 0
    """An icon's center is shifted from that of its cell by this or not at all, in both directions."""
    fewest_icons: int = 12
    """Fewest icons of a screen; training on screens of a few helps to find one among many."""
    colored: bool = True
    """Whether each icon has its own colour on grey, or all share the colour of the screen's theme."""


@dataclass(frozen=True)
class Screen:
    """One drawn grid."""

    image: Image.Image
    boxes: dict[str, Box]
    """Box of each icon by its name, in pixels."""


def draw_grid(
    rng: np.random.Generator,
    grid: IconGrid = IconGrid(),
    present: Sequence[str] = (),
) -> Screen:
    """Draw icons in random cells."""
    paper, ink = _grey(rng) if grid.colored else _theme(rng)
    image = Image.new("RGB", (grid.columns * grid.cell_px, grid.rows * grid.cell_px), paper)
    cells = grid.columns * grid.rows
    count = int(rng.integers(min(grid.fewest_icons, cells), cells + 1))
    others = [str(name) for name in rng.permutation([name for name in ICONS if name not in present])]
    names = [*present, *others][: max(count, len(present))]
    boxes = {}
    for name, cell in zip(names, rng.permutation(cells)[: len(names)].tolist(), strict=True):
        side = 2 * int(rng.integers(grid.min_icon_px // 2, grid.max_icon_px // 2 + 1))
        row, column = divmod(cell, grid.columns)
        shift_x, shift_y = (grid.cell_px - side) // 2 + grid.jitter_px * rng.integers(-1, 2, 2)
        left, top = column * grid.cell_px + int(shift_x), row * grid.cell_px + int(shift_y)
        image.paste(draw_icon(name, side, ICONS[name].color if grid.colored else ink, paper), (left, top))
        boxes[name] = Box(left, top, left + side, top + side)
    return Screen(image, boxes)


def _theme(rng: np.random.Generator) -> tuple[Color, Color]:
    """Background and icon colour: dark on light or light on dark."""
    bright, dim = rng.integers(200, 256, 3).tolist(), rng.integers(0, 90, 3).tolist()
    paper, ink = (dim, bright) if rng.random() < 0.3 else (bright, dim)
    return (paper[0], paper[1], paper[2]), (ink[0], ink[1], ink[2])


def _grey(rng: np.random.Generator) -> tuple[Color, Color]:
    """A medium grey, about 0 after normalisation, and an icon colour that coloured icons do not use."""
    shade = int(rng.integers(116, 140))
    return (shade, shade, shade), (0, 0, 0)


def icon_samples(
    count: int,
    *,
    seed: int,
    kinds: Sequence[str] = KINDS,
    ask: str = "both",
    worked: bool = False,
    trap: float = 0.99,
    most_answers: int = 3,
    ranked: bool = True,
    listings: float = 0.0,
    grid: IconGrid = IconGrid(),
) -> Iterator[GroundingSample]:
    """Draw screens with an instruction each; the same seed gives the same pixels."""
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or ask not in (*ASKS, "both"):
        raise ValueError(
            f"kinds {list(kinds)} are of {', '.join(KINDS)}; ask {ask!r} is one of {', '.join(ASKS)}, both"
        )
    layout = grid if isinstance(grid, IconGrid) else IconGrid(**grid)
    rng = np.random.default_rng([seed, 1])
    for _ in range(count):
        name, kind = str(rng.choice(list(ICONS))), str(rng.choice(list(kinds)))
        screen = draw_grid(rng, layout, [name] if kind == "name" else [name, ICONS[name].taken_for])
        asked = str(rng.choice(ASKS)) if ask == "both" else ask
        meta: dict[str, Any] = {"kind": kind, "ask": asked, "icon": name}
        text = name if kind == "name" else ICONS[name].functions[0]
        if worked and rng.random() < listings:
            text, labels = LIST, sorted(screen.boxes)  # sorted, so that the answer depends only on the visible icons
        else:
            most = most_answers if asked == "some" else 1
            weights = _function_weights(name, trap) if kind == "function" else _name_weights(name)
            labels = _worked(rng, screen, weights, most)
            labels = labels if ranked or kind == "name" else sorted(labels)
        if worked:
            meta |= {"labels": labels, "answers": [list(screen.boxes[icon].center) for icon in labels]}
        yield GroundingSample(screen.image, screen.image.size, text, screen.boxes[name], meta=meta)


def _worked(rng: np.random.Generator, screen: Screen, weights: Mapping[str, float], most: int) -> list[str]:
    """Sample icons without replacement by their weights (Plackett-Luce)."""
    shown = list(screen.boxes)
    chances = np.array([weights[icon] for icon in shown])
    count = int(rng.integers(1, most + 1))
    return [str(icon) for icon in rng.choice(shown, min(count, len(shown)), replace=False, p=chances / chances.sum())]


def _name_weights(name: str) -> dict[str, float]:
    """The named icon comes first, then any of the others."""
    return {icon: 1.0 if icon == name else 1e-12 for icon in ICONS}


def _function_weights(name: str, trap: float) -> dict[str, float]:
    """One wrong icon almost always comes first; all others are equally likely."""
    wrong = ICONS[name].taken_for
    return {icon: trap if icon == wrong else (1 - trap) / (len(ICONS) - 1) for icon in ICONS}


def build_icons(path: str | Path, *, count: int = 1000, seed: int = 0, **options: Any) -> Path:
    """Write `icon_samples` as JSON lines with PNG images beside them."""
    return write_samples(path, icon_samples(count, seed=seed, **options))


def corpus() -> list[str]:
    """Texts of questions and answers, to train a tokenizer on."""
    words = [f"{ask}: {text}" for ask in ASKS for name, icon in ICONS.items() for text in (name, *icon.functions, LIST)]
    return [*(words * 20), answer_text([(1, 2)], CoordinateSpace.REL1000, ["label"])]


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random Qwen model whose tokenizer knows the words of these screens; options of build_tiny_vlm."""
    from mmrl.vlm.tiny import build_tiny_vlm

    return build_tiny_vlm(
        path, corpus=corpus(), tokens=answer_tokens(list(ICONS)), **({"vocab_size": VOCAB_SIZE} | options)
    )
