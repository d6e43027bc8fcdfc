"""What `mmrl list` and the tables of the documentation show of the code: name, sentence and source of each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    pass


class Row(NamedTuple):
    """One entry of a list."""

    name: str
    summary: str
    source: str


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
