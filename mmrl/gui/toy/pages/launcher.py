"""The home screen of a phone: tiles with an icon and no text, one colour per function, in random order.

A model of a few hundred thousand weights cannot read small text but distinguishes colours, so short demonstrations and
experiments use these pages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded, choice
from mmrl.gui.grounding.answers import answer_text, answer_tokens
from mmrl.gui.grounding.coords import CoordinateSpace, Size
from mmrl.gui.toy.pages.instructions import SENTENCES
from mmrl.gui.toy.pages.vocabulary import THEMES, Function, Theme, functions

VOCAB_SIZE = 800
"""Large enough for each word of the instructions to be one token."""


@dataclass(frozen=True)
class LauncherSettings:
    """Contents of a home screen."""

    functions: tuple[str, ...] = choice((), lambda: COLORS)
    """Functions of the tiles. Default: all of `COLORS`."""
    tiles: int = bounded(12, at_least=2)
    """Maximum number of tiles per page, at most one for each function."""
    fewest_tiles: int | None = bounded(None, at_least=1)
    """Minimum number of tiles per page; training on pages with few tiles helps to find one among many. Default:
    `tiles`."""
    cell_px: int = bounded(32, at_least=16)
    """Side of a tile with its margin, in CSS pixels; with 32, Qwen3-VL sees a tile in about one token."""
    wallpaper: str = ""
    """CSS colour behind the tiles. Default: the colour of the page's theme. A medium grey is about 0 after
    normalisation, which helps a model distinguish the tiles."""
    aligned: bool = False
    """Center every tile in its cell; otherwise gaps differ from page to page."""

    def count(self) -> int:
        """Maximum number of tiles per page."""
        return min(self.tiles, len(self.functions or COLORS))

    def grid(self, page_wh: Size) -> tuple[int, int]:
        """Columns and rows of a page of (width, height) in CSS pixels."""
        columns, rows = page_wh[0] // self.cell_px, page_wh[1] // self.cell_px
        if columns * rows < self.count():
            raise UserError(
                f"a page of {page_wh[0]} x {page_wh[1]} CSS pixels has {columns} x {rows} cells of {self.cell_px}, "
                f"too few for {self.count()} tiles; use a larger page, or a smaller launcher.cell_px or launcher.tiles"
            )
        return columns, rows


@dataclass(frozen=True)
class Tile:
    """A button with an icon on a colour."""

    function: str
    label: str
    """Accessible name."""
    icon: str
    """SVG elements."""
    color: str
    ink: str
    """Colour of the icon."""


@dataclass(frozen=True)
class LauncherPage:
    """The variables of one home screen."""

    theme: Theme
    language: str
    wh: Size
    """(width, height) in CSS pixels."""
    columns: int
    rows: int
    tile_px: int
    radius_px: int
    gaps_px: tuple[int, int]
    """Gaps between rows and between columns."""
    cells: tuple[Tile | None, ...]
    """Tiles row by row; None for an empty cell."""
    wallpaper: str
    """CSS colour behind the tiles."""
    layout: str = "launcher"


@dataclass(frozen=True)
class LauncherSheet:
    """Home screens side by side in one window; a browser draws them almost as fast as a single one."""

    pages: tuple[LauncherPage, ...]
    columns: int
    """Pages in a row."""
    layout: str = "launcher"

    def corner(self, number: int) -> tuple[int, int]:
        """Left and top edge of a page in CSS pixels of the window."""
        width, height = self.pages[number].wh
        return number % self.columns * width, number // self.columns * height


def compose_launcher(
    draw: random.Random, themes: str, words: str, page_wh: Size, language: str, settings: LauncherSettings
) -> LauncherPage:
    """Choose the tiles of a page, their order and its theme; `themes` and `words` are "train" or "test"."""
    columns, rows = settings.grid(page_wh)
    known = functions(words, language)
    cells: list[Tile | None] = [None] * (columns * rows)
    most = settings.count()
    tiles = most if settings.fewest_tiles is None else draw.randint(min(settings.fewest_tiles, most), most)
    chosen = draw.sample(sorted(settings.functions or COLORS), tiles)
    for cell, name in zip(draw.sample(range(len(cells)), len(chosen)), chosen, strict=True):
        cells[cell] = tile_of(known[name])
    tile_px = settings.cell_px * draw.randint(12, 14) // 16
    space = settings.cell_px - tile_px

    def gap() -> int:
        return space if settings.aligned else draw.randint(space - 2, space)

    theme = draw.choice(THEMES[themes])
    return LauncherPage(
        theme=theme,
        language=language,
        wh=page_wh,
        columns=columns,
        rows=rows,
        tile_px=tile_px,
        radius_px=tile_px * draw.randint(1, 4) // 16,
        gaps_px=(gap(), gap()),
        cells=tuple(cells),
        wallpaper=settings.wallpaper or theme.background,
    )


def tile_of(function: Function) -> Tile:
    """The tile of a function: its first label, its colour, and an icon that contrasts with it."""
    color = COLORS[function.name]
    red, green, blue = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 140
    return Tile(function.name, app_name(function), function.icon, color, "#101010" if bright else "#ffffff")


def app_name(function: Function) -> str:
    """The name of a function on home screens."""
    return function.labels[0]


def corpus(words: str = "train", language: str = "en") -> list[str]:
    """Texts of instructions and answers about these pages, to train a tokenizer on."""
    known = functions(words, language)
    sentences = SENTENCES[words][language]
    texts = [sentence.format(name=app_name(known[name])) for name in COLORS for sentence in sentences["name"]]
    texts += [f"{phrase[0].upper()}{phrase[1:]}." for name in COLORS for phrase in known[name].phrases]
    answers = [answer_text([(1.0, 2.0)], CoordinateSpace.REL1000, ["label"]), *sentences["listing"]]
    return [*(texts * 20), *answers]


def build_model(path: str | Path, *, words: str = "train", language: str = "en", **options: Any) -> Path:
    """Build a tiny random model with one token for each word and name of these pages; options of `build_tiny`."""
    from mmrl.vlm.toy.tiny_generic import build_tiny

    known = functions(words, language)
    tokens = answer_tokens([app_name(known[name]) for name in COLORS])
    return build_tiny(path, corpus=corpus(words, language), tokens=tokens, **({"vocab_size": VOCAB_SIZE} | options))


COLORS: dict[str, str] = {
    "save": "#ffdc00",
    "download": "#006e14",
    "delete": "#ff5ac8",
    "archive": "#783c00",
    "search": "#143cff",
    "filter": "#b4a0ff",
    "share": "#00dce6",
    "reply": "#00006e",
    "undo": "#ff8200",
    "refresh": "#78ff00",
    "settings": "#808080",
    "profile": "#ffb496",
    "play": "#ff0000",
    "mute": "#8c00dc",
    "home": "#007878",
    "help": "#6e0032",
}
"""Colour of each function of home screens; two functions of each family."""
SIX_FAMILIES = tuple(name for name in COLORS if name not in ("share", "reply", "settings", "profile"))
"""Twelve functions, which fill a page of 4 x 3 tiles."""
GREY = "#808080"
"""A wallpaper that is about 0 after normalisation."""
