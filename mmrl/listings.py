"""Lists of recipes, objectives and rewards for `mmrl list` and the documentation: name, sentence and source."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
"""Configurations of a checkout; an installed wheel has none."""
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")


class Row(NamedTuple):
    """One entry of a list."""

    name: str
    summary: str
    source: str


def markdown(name: str) -> str:
    """Write a list as a Markdown table; recipes with their configurations, where there is a checkout."""
    columns, rows = COLUMNS[name], [(f"`{row.name}`", row.summary, row.source) for row in LISTINGS[name]()]
    if name != "recipes" or not CONFIGS.is_dir():
        return markdown_table(columns, rows)
    files: dict[str | None, list[str]] = defaultdict(list)
    for path in sorted(CONFIGS.rglob("*.yaml")):
        files[_recipe_of(path)].append(f"`{path.name}`")
    return markdown_table((*columns, "configurations"), [(*row, ", ".join(files[row[0].strip("`")])) for row in rows])


def _recipe_of(path: Path) -> str | None:
    """Recipe of a configuration file, its own or that of the file that it extends."""
    keys = dict(re.findall(r"^(recipe|extends): *(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return keys.get("recipe") or (_recipe_of(path.parent / keys["extends"]) if "extends" in keys else None)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a Markdown table; `arXiv 2507.06448` becomes a link and a bar stays inside its cell."""
    head, *body = [f"| {line} |\n" for line in (" | ".join(columns), *(" | ".join(map(_cell, row)) for row in rows))]
    return "".join((head, f"|{'---|' * len(columns)}\n", *body))


def _cell(text: str) -> str:
    linked = ARXIV.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", " ".join(text.split()))
    return linked.replace("|", "\\|")


def _recipes() -> list[Row]:
    from mmrl.recipes import RECIPES

    return [Row(name, entry.summary, entry.citation) for name, entry in RECIPES.items()]


def _objectives() -> list[Row]:
    from mmrl.core.catalogue import CATALOGUE

    return [Row(name, objective.parts(), objective.citation) for name, objective in CATALOGUE.items()]


def _preferences() -> list[Row]:
    from mmrl.core.catalogue import PREFERENCES

    return [Row(name, objective.parts(), objective.citation) for name, objective in PREFERENCES.items()]


def _rewards() -> list[Row]:
    from mmrl.rewards import REWARDS

    return [Row(name, entry.summary, entry.citation) for name, entry in REWARDS.items()]


def _image_rewards() -> list[Row]:
    from diffusion.rewards import IMAGE_REWARDS

    return [Row(name, entry.summary, entry.citation) for name, entry in IMAGE_REWARDS.items()]


LISTINGS: dict[str, Callable[[], list[Row]]] = {
    "recipes": _recipes,
    "objectives": _objectives,
    "preferences": _preferences,
    "rewards": _rewards,
    "image_rewards": _image_rewards,
}
COLUMNS = {
    "recipes": ("recipe", "what it does", "source"),
    "objectives": ("objective", "parts", "source"),
    "preferences": ("preference objective", "parts", "source"),
    "rewards": ("reward", "what earns it", "source"),
    "image_rewards": ("reward", "what earns it", "source"),
}
