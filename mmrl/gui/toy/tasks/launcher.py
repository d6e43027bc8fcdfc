"""Home screen: open apps in the order of the instruction; opening an app moves all tiles to other positions."""

from __future__ import annotations

from dataclasses import asdict
from random import Random

from mmrl.gui.toy.pages.instructions import SENTENCES
from mmrl.gui.toy.pages.launcher import COLORS, GREY, SIX_FAMILIES, app_name, tile_of
from mmrl.gui.toy.pages.vocabulary import Function, functions
from mmrl.gui.toy.tasks.case import Case, Move, View, click

TILES = 12
"""Number of tiles, in 4 columns and 3 rows; the page is laid out for these."""


def make_named(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case that names its apps; distractors are apps of the same families as the targets."""
    return _make(draw, sub_goals, distractors, by_name=True)


def make_wished(draw: Random, sub_goals: int, distractors: int) -> Case:
    """A case that names the purpose of its apps."""
    return _make(draw, sub_goals, distractors, by_name=False)


def _make(draw: Random, sub_goals: int, distractors: int, *, by_name: bool) -> Case:
    known = functions("train", "en")
    wanted = draw.sample(sorted(SIX_FAMILIES), sub_goals)
    partners = [name for name in COLORS if known[name].family in {known[other].family for other in wanted}]
    near = [name for name in partners if name not in wanted][:distractors]
    others = draw.sample(sorted(set(COLORS) - set(partners)), TILES - sub_goals - len(near))
    apps = [*wanted, *near, *others]
    config = {
        "title": "Apps",
        "background": GREY,
        "tile_share": draw.randint(12, 14) / 16,
        "tiles": {name: asdict(tile_of(known[name])) for name in apps},
        "orders": [draw.sample(apps, TILES) for _ in range(sub_goals + 1)],
        "wanted": wanted,
    }
    return Case(" ".join(_sentence(known[name], draw, by_name) for name in wanted), config)


def _sentence(function: Function, draw: Random, by_name: bool) -> str:
    if by_name:
        return draw.choice(SENTENCES["train"]["en"]["name"]).format(name=app_name(function))
    phrase = draw.choice(function.phrases)
    return f"{phrase[0].upper()}{phrase[1:]}."


def expert(case: Case, view: View) -> Move:
    """The next move."""
    return click(view, case.config["wanted"][view.state["opened"]])
