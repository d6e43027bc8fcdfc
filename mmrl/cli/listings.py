"""Lists of recipes, objectives, rewards and families for `mmrl list` and the documentation: name, sentence, source."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmrl.cli.papers import status_of
from mmrl.entries import load_target
from mmrl.files import CONFIGS

ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
LINE_WIDTH = 100
"""Line width in characters if the terminal does not report its own."""


class ListingRow(NamedTuple):
    """One entry of a list."""

    group: str
    """Its purpose or, for a recipe, its domain; entries of contrib begin with "contrib: "."""
    name: str
    summary: str
    source: str


def rows_of(name: str) -> list[ListingRow]:
    """Read the entries of a list."""
    group, headings = LISTINGS[name][2], load_target("mmrl.core.catalogue:all_headings")() if name in CATALOGUES else {}
    return [
        ListingRow(
            group or headings.get(key) or _domain_of(entry),
            key,
            entry.parts() if hasattr(entry, "parts") else entry.summary,
            entry.citation,
        )
        for key, entry in _table(name).items()
    ]


def _table(name: str) -> Mapping[str, Any]:
    """The entries of a list, by name."""
    found = load_target(LISTINGS[name][0])
    return found() if callable(found) else found


def _domain_of(entry: Any) -> str:
    """Package of a recipe, such as "vlm", "robotics" or "contrib: agents"."""
    place = entry.preset or entry.target  # a preset of contrib may be for a recipe of the library
    parts = place.partition(":")[0].removeprefix("mmrl.").split(".")
    return f"contrib: {next(part for part in parts if part != 'contrib')}" if "contrib" in parts else parts[0]


def paper_of(source: str) -> str:
    """A source up to its arXiv number, shortened to fit next to a name."""
    room = terminal_width() - 30
    found = re.match(r"(.*?)(arXiv [0-9.]*[0-9])", source)
    head, number = found.groups() if found else (source, "")
    if len(head + number) <= room:
        return head + number
    return textwrap.shorten(head, room - len(number) - 1, placeholder=" ...") + f" {number}"


def terminal_width() -> int:
    """Columns of the terminal, or `LINE_WIDTH` if there is none."""
    return max(shutil.get_terminal_size((LINE_WIDTH, 24)).columns, 60)


def in_columns(name: str, text: str, width: int = 30) -> str:
    """A name and its text in two columns; the text wraps within its column."""
    line = max(terminal_width(), 2 * width)
    return textwrap.fill(
        " ".join(text.split()),
        line,
        initial_indent=f"  {name:<{width - 2}}",
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )


def markdown(name: str) -> str:
    """Write a list as a Markdown table; recipes include their configurations."""
    columns, rows = LISTINGS[name][1], [(f"`{row.name}`", row.summary, row.source) for row in rows_of(name)]
    if name in CATALOGUES:
        differs = [("; ".join(filter(None, (entry.differs, status_of(key)))),) for key, entry in _table(name).items()]
        return markdown_table((*columns, "differs"), [a + b for a, b in zip(rows, differs, strict=True)])
    if not name.endswith("recipes"):
        return markdown_table(columns, rows)
    files = {key: [f"`{Path(file).name}`" for file in found] for key, found in configurations().items()}
    names = [row.name for row in rows_of(name)]
    found = [
        (shown, "; ".join(filter(None, (summary, status_of(key)))), source, ", ".join(files.get(key, [])))
        for key, (shown, summary, source) in zip(names, rows, strict=True)
    ]
    return markdown_table((*columns, "configurations"), found)


def configurations() -> dict[str | None, list[str]]:
    """Configuration files of each recipe in a checkout, following `extends:`."""
    files: dict[str | None, list[str]] = defaultdict(list)
    for path in sorted(CONFIGS.rglob("*.yaml")):
        files[_recipe_of(path)].append(f"configs/{path.relative_to(CONFIGS)}")
    return files


def _recipe_of(path: Path) -> str | None:
    """Recipe of a configuration file, or of the file that it extends."""
    keys = dict(re.findall(r"^(recipe|extends): *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return keys.get("recipe") or (_recipe_of(path.parent / keys["extends"]) if "extends" in keys else None)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table; `arXiv 2507.06448` becomes a link and vertical bars are escaped."""
    head, *body = [f"| {line} |\n" for line in (" | ".join(columns), *(" | ".join(map(_cell, row)) for row in rows))]
    return "".join((head, f"|{'---|' * len(columns)}\n", *body))


def _cell(text: str) -> str:
    linked = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(text.split()))
    return linked.replace("|", "\\|")


CATALOGUES = ("objectives", "preferences", "contrib_objectives", "contrib_preferences")
"""Lists of objectives, grouped by family."""
LISTINGS = {
    "recipes": ("mmrl.recipes:RECIPES", ("recipe", "what it does", "source"), ""),
    "contrib_recipes": ("mmrl.recipes:contrib_recipes", ("contrib recipe", "what it does", "source"), ""),
    "objectives": ("mmrl.core.catalogue:CATALOGUE", ("objective", "parts", "source"), ""),
    "preferences": ("mmrl.core.catalogue:PREFERENCES", ("preference objective", "parts", "source"), ""),
    "contrib_objectives": (
        "mmrl.core.catalogue:contrib_objectives",
        ("contrib objective", "parts", "source"),
        "",
    ),
    "contrib_preferences": (
        "mmrl.core.catalogue:contrib_preferences",
        ("contrib preference objective", "parts", "source"),
        "",
    ),
    "rewards": ("mmrl.rewards:REWARDS", ("reward", "what earns it", "source"), "answers"),
    "image_rewards": ("diffusion.rewards:IMAGE_REWARDS", ("reward", "what earns it", "source"), "images"),
    "families": ("diffusion.families.table:FAMILIES", ("pipeline", "released models", "source"), "pipelines"),
}
"""Lists by name: the table, or a function that returns it, as `module:name`, imported when it is shown, the columns in
Markdown, and the group."""
