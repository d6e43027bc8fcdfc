"""A page from a seed: its controls, labels, theme and HTML."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.gui.toy.pages.vocabulary import CONTENT, DENSITIES, FIELDS, LANGUAGES, THEMES, Function, Theme, functions

if TYPE_CHECKING:
    import jinja2

    from mmrl.gui.toy.pages.launcher import LauncherSheet

LAYOUTS: dict[str, tuple[str, ...]] = {
    "train": ("editor", "files", "form", "cards"),
    "test": ("mail", "dialog", "board"),
}
"""Templates by split, in the folder layouts."""
SPLITS: dict[str, tuple[str, str]] = {
    "train": ("train", "train"),
    "layouts": ("test", "train"),
    "test": ("test", "test"),
}
"""Split to (templates and themes, words and icons): `layouts` shows known words in unknown templates and themes."""
STYLES = ("text", "icon", "both")


@dataclass(frozen=True)
class Control:
    """A button or link."""

    function: str
    label: str
    icon: str
    style: str
    """text, icon or both."""
    tag: str
    """button, a or div."""
    look: str
    """primary, plain or empty."""


@dataclass(frozen=True)
class Field:
    """An input with a label."""

    kind: str
    """text, select or box."""
    label: str
    value: str


@dataclass(frozen=True)
class PageRow:
    """A row of a table or a card, with the controls of every row."""

    name: str
    detail: str
    controls: tuple[Control, ...]


@dataclass(frozen=True)
class PageModel:
    """The variables of a template."""

    layout: str
    theme: Theme
    language: str
    title: str
    font_px: int
    padding_px: int
    width_px: int
    align: str
    mirrored: bool
    flipped: bool
    toolbar: tuple[Control, ...]
    navigation: tuple[Control, ...]
    actions: tuple[Control, ...]
    behind: tuple[Control, ...]
    """Controls covered by a dialog, with the same functions as some of the controls in front of it."""
    links: tuple[Control, ...]
    rows: tuple[PageRow, ...]
    fields: tuple[Field, ...]


def compose(draw: random.Random, split: str, width_px: int, language: str | None = None) -> PageModel:
    """Choose the contents and the theme of a page, and the language if it is None.

    Controls come in families, so that a page with one function has others that are easily confused with it.
    """
    places, words = SPLITS[split]
    language = language or draw.choice(LANGUAGES)
    groups = _families(draw, words, language)
    controls = [_control(draw, function, draw.choice(STYLES)) for group in groups[:3] for function in group]
    draw.shuffle(controls)
    row_functions = groups[3][: draw.randint(1, 2)]
    row_style = draw.choice(("icon", "icon", "text"))
    row_controls = tuple(_control(draw, function, row_style, tag="button") for function in row_functions)
    font_px, padding_px = DENSITIES[draw.choice(sorted(DENSITIES))]
    content = CONTENT[words]
    names = draw.sample(content["files"] if draw.random() < 0.5 else content["people"], 5)
    details = draw.sample(content["topics"], 5)
    link = _control(draw, groups[4][0], "text", tag="a", look="plain")
    cut = draw.randint(2, 3)
    return PageModel(
        layout=draw.choice(LAYOUTS[places]),
        theme=draw.choice(THEMES[places]),
        language=language,
        title=draw.choice(content["titles"]),
        font_px=font_px,
        padding_px=padding_px,
        width_px=width_px,
        align=draw.choice(("flex-start", "center", "flex-end", "space-between")),
        mirrored=draw.random() < 0.5,
        flipped=draw.random() < 0.5,
        toolbar=tuple(controls[:4]),
        navigation=tuple(controls[4 : 4 + cut]),
        actions=tuple(controls[4 + cut : 9]),
        behind=tuple(controls[:3]),
        links=(link,),
        rows=tuple(PageRow(name, detail, row_controls) for name, detail in zip(names, details, strict=True)),
        fields=_fields(draw, words, language),
    )


def render(page: PageModel | LauncherSheet) -> str:
    """Render a page, or home screens side by side, to HTML."""
    return _templates().get_template(f"{page.layout}.jinja").render(page=page)


def _families(draw: random.Random, words: str, language: str) -> list[list[Function]]:
    """Families in random order, with functions in random order."""
    groups: dict[str, list[Function]] = {}
    for function in functions(words, language).values():
        groups.setdefault(function.family, []).append(function)
    found = list(groups.values())
    draw.shuffle(found)
    for group in found:
        draw.shuffle(group)
    return found


def _control(draw: random.Random, function: Function, style: str, tag: str = "", look: str | None = None) -> Control:
    return Control(
        function=function.name,
        label=draw.choice(function.labels),
        icon=function.icon,
        style=style,
        tag=tag or draw.choice(("button", "button", "a", "div")),
        look=draw.choice(("", "", "primary", "plain")) if look is None else look,
    )


def _fields(draw: random.Random, words: str, language: str) -> tuple[Field, ...]:
    kinds = ["text", "text", "select", "box", "box"]
    labels = draw.sample(FIELDS[words][language], len(kinds))
    draw.shuffle(kinds)
    values = draw.sample(CONTENT[words]["places"], len(kinds))
    checked = [draw.choice(("", "yes")) for _ in kinds]
    return tuple(
        Field(kind, label, box if kind == "box" else value)
        for kind, label, value, box in zip(kinds, labels, values, checked, strict=True)
    )


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    folder = Path(__file__).parent / "layouts"
    return jinja2.Environment(loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined)
