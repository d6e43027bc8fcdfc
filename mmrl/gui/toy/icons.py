"""Screens drawn without a browser: a grid of icons, each asked for by name or by function.

The setting of AEPO's confidence trap: a supervised start points at the right icon when asked by name and, almost
certainly, at a wrong one when asked by function. Reinforcement learning has to find the right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from PIL import Image

from mmrl.gui.grounding.answers import answer_text, answer_tokens
from mmrl.gui.grounding.coords import Box, CoordinateSpace
from mmrl.gui.grounding.samples import GroundingSample, write_samples

if TYPE_CHECKING:
    from PIL import Image, ImageDraw


Color: TypeAlias = tuple[int, int, int]

OVERSAMPLING = 4
"""Icons are drawn this many times larger and then reduced, which smooths their edges."""


@dataclass(frozen=True)
class Icon:
    """One kind of icon."""

    functions: tuple[str, ...]
    """Its function, in words that do not name the icon; the last phrase is for test vocabularies."""
    taken_for: str
    """The icon whose function is easily confused with this one's."""
    color: Color
    """Its colour on coloured screens."""
    draw: Callable[[Pen], None]
    """Draws it into the unit square."""


class Pen:
    """Draws in the unit square of an icon, `side` pixels long, with ink and holes in the colour of the paper."""

    def __init__(self, draw: ImageDraw.ImageDraw, side: int, ink: Color, paper: Color) -> None:
        self._draw, self._side, self.ink, self.paper = draw, side, ink, paper
        self._width = max(1, round(0.1 * side))

    def line(self, *points: tuple[float, float]) -> None:
        """A stroke through points."""
        self._draw.line(self._scaled(points), fill=self.ink, width=self._width, joint="curve")

    def fill(self, *points: tuple[float, float], hole: bool = False) -> None:
        """A filled polygon."""
        self._draw.polygon(self._scaled(points), fill=self.paper if hole else self.ink)

    def block(self, x1: float, y1: float, x2: float, y2: float, *, hole: bool = False) -> None:
        """A filled rectangle."""
        self._draw.rectangle(self._scaled([(x1, y1), (x2, y2)]), fill=self.paper if hole else self.ink)

    def disc(self, x: float, y: float, radius: float, *, hole: bool = False) -> None:
        """A filled circle."""
        corners = [(x - radius, y - radius), (x + radius, y + radius)]
        self._draw.ellipse(self._scaled(corners), fill=self.paper if hole else self.ink)

    def _scaled(self, points: object) -> list[tuple[float, float]]:
        return [(x * self._side, y * self._side) for x, y in points]  # type: ignore[attr-defined]


def draw_icon(name: str, side: int, ink: Color, paper: Color) -> Image.Image:
    """An icon, key of `ICONS`, as an image of side x side pixels."""
    from PIL import Image, ImageDraw

    large = Image.new("RGB", (side * OVERSAMPLING,) * 2, paper)
    ICONS[name].draw(Pen(ImageDraw.Draw(large), side * OVERSAMPLING, ink, paper))
    return large.resize((side, side), Image.Resampling.BOX)


def _disk(pen: Pen) -> None:
    pen.block(0.1, 0.1, 0.9, 0.9)
    pen.block(0.3, 0.1, 0.7, 0.38, hole=True)
    pen.block(0.25, 0.55, 0.75, 0.8, hole=True)


def _bin(pen: Pen) -> None:
    pen.block(0.1, 0.16, 0.9, 0.28)
    pen.block(0.38, 0.06, 0.62, 0.16)
    pen.fill((0.18, 0.36), (0.82, 0.36), (0.74, 0.95), (0.26, 0.95))


def _lens(pen: Pen) -> None:
    pen.disc(0.4, 0.4, 0.33)
    pen.disc(0.4, 0.4, 0.21, hole=True)
    pen.line((0.62, 0.62), (0.93, 0.93))


def _house(pen: Pen) -> None:
    pen.fill((0.5, 0.05), (0.97, 0.5), (0.03, 0.5))
    pen.block(0.18, 0.5, 0.82, 0.93)
    pen.block(0.42, 0.62, 0.58, 0.93, hole=True)


def _star(pen: Pen) -> None:
    pen.fill(
        (0.5, 0.02), (0.62, 0.37), (0.98, 0.38), (0.69, 0.6), (0.79, 0.96),
        (0.5, 0.75), (0.21, 0.96), (0.31, 0.6), (0.02, 0.38), (0.38, 0.37),
    )  # fmt: skip


def _heart(pen: Pen) -> None:
    pen.disc(0.29, 0.32, 0.24)
    pen.disc(0.71, 0.32, 0.24)
    pen.fill((0.06, 0.42), (0.94, 0.42), (0.5, 0.95))


def _plus(pen: Pen) -> None:
    pen.block(0.4, 0.08, 0.6, 0.92)
    pen.block(0.08, 0.4, 0.92, 0.6)


def _pencil(pen: Pen) -> None:
    pen.fill((0.7, 0.05), (0.95, 0.3), (0.38, 0.87), (0.13, 0.62))
    pen.fill((0.09, 0.7), (0.3, 0.91), (0.04, 0.96))


def _cross(pen: Pen) -> None:
    pen.line((0.12, 0.12), (0.88, 0.88))
    pen.line((0.88, 0.12), (0.12, 0.88))


def _bell(pen: Pen) -> None:
    pen.disc(0.5, 0.38, 0.3)
    pen.fill((0.2, 0.38), (0.8, 0.38), (0.94, 0.76), (0.06, 0.76))
    pen.disc(0.5, 0.86, 0.11)


def _envelope(pen: Pen) -> None:
    pen.block(0.04, 0.18, 0.96, 0.82)
    pen.fill((0.14, 0.26), (0.86, 0.26), (0.5, 0.56), hole=True)


def _padlock(pen: Pen) -> None:
    pen.disc(0.5, 0.34, 0.29)
    pen.disc(0.5, 0.34, 0.16, hole=True)
    pen.block(0.14, 0.44, 0.86, 0.95)
    pen.disc(0.5, 0.67, 0.1, hole=True)


ICONS: dict[str, Icon] = {
    "disk": Icon(("keep my changes", "make this permanent"), "padlock", (20, 60, 255), _disk),
    "padlock": Icon(("nobody else may open this", "protect this"), "disk", (120, 60, 0), _padlock),
    "bin": Icon(("remove this item", "throw this away"), "cross", (245, 245, 245), _bin),
    "cross": Icon(("leave this window", "I am finished here"), "bin", (255, 0, 0), _cross),
    "lens": Icon(("where is my file", "look something up"), "house", (0, 220, 230), _lens),
    "house": Icon(("back to the start", "show the first page"), "lens", (0, 110, 20), _house),
    "star": Icon(("remember this page", "put it on my list"), "heart", (255, 220, 0), _star),
    "heart": Icon(("tell them I enjoyed it", "show some love"), "star", (255, 90, 200), _heart),
    "plus": Icon(("begin something new", "one more of these"), "pencil", (120, 255, 0), _plus),
    "pencil": Icon(("correct a mistake", "change the text"), "plus", (255, 130, 0), _pencil),
    "bell": Icon(("tell me when it happens", "what have I missed"), "envelope", (140, 0, 220), _bell),
    "envelope": Icon(("write to a friend", "contact them"), "bell", (0, 0, 60), _envelope),
}
"""Icons by name; no word of a function is the icon's name."""


KINDS = ("name", "function")
"""Kinds of instruction."""
ASKS = ("one", "some")
"""Whether a question asks for one point or for any number of points (column `ask`)."""
LIST = "everything"
"""The question whose worked answer lists every icon with its name and position."""
VOCAB_SIZE = 600
"""Large enough for each word of the questions to be one token."""


@dataclass(frozen=True)
class IconGrid:
    """Layout of the grid."""

    columns: int = 4
    rows: int = 3
    cell_px: int = 32
    """Side of a cell; with 32, Qwen3-VL sees a cell as one token."""
    min_icon_px: int = 24
    """Minimum side of an icon."""
    max_icon_px: int = 28
    """Maximum side of an icon."""
    jitter_px: int = 0
    """An icon's center is shifted from the center of its cell by this or not at all, in both directions."""
    fewest_icons: int = 12
    """Minimum number of icons per screen; training on screens with few icons helps to find one among many."""
    colored: bool = True
    """Give each icon its own colour on grey; otherwise all share the colour of the screen's theme."""


@dataclass(frozen=True)
class IconScreen:
    """One drawn grid."""

    image: Image.Image
    boxes: dict[str, Box]
    """Box of each icon by its name, in pixels."""


def draw_grid(
    rng: np.random.Generator,
    grid: IconGrid = IconGrid(),
    present: Sequence[str] = (),
) -> IconScreen:
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
    return IconScreen(image, boxes)


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
            f"kinds is {list(kinds)}; allowed are {', '.join(KINDS)}; ask is {ask!r}; allowed are {', '.join(ASKS)}, "
            "both"
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


def _worked(rng: np.random.Generator, screen: IconScreen, weights: Mapping[str, float], most: int) -> list[str]:
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
    """Write `icon_samples` as JSON lines, with PNG images next to them."""
    return write_samples(path, icon_samples(count, seed=seed, **options))


def corpus() -> list[str]:
    """Texts of questions and answers, to train a tokenizer on."""
    words = [f"{ask}: {text}" for ask in ASKS for name, icon in ICONS.items() for text in (name, *icon.functions, LIST)]
    return [*(words * 20), answer_text([(1, 2)], CoordinateSpace.REL1000, ["label"])]


def build_model(path: str | Path, **options: Any) -> Path:
    """Build a tiny random model whose tokenizer has the words of these screens; `options` are those of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    return build_tiny(
        path, corpus=corpus(), tokens=answer_tokens(list(ICONS)), **({"vocab_size": VOCAB_SIZE} | options)
    )
