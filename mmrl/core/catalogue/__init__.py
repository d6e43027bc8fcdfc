"""Published methods as rows: one `Objective` each, with the constants of its paper."""

from __future__ import annotations

import re

from mmrl.core.block import look_up
from mmrl.core.catalogue import (
    adaptive,
    agentic,
    critic,
    estimators,
    group,
    image,
    masked,
    mixed,
    peers,
    supervised,
    tracked,
)
from mmrl.core.catalogue import pairs as preference
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective

__all__ = ["CATALOGUE", "PREFERENCES", "get", "get_preference"]


def get(name: str) -> Objective:
    """Return a method of the catalogue.

    Args:
        name: Its name, such as "grpo"; `Objective.override` changes numbers of its blocks.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    if name in PREFERENCES:
        raise ValueError(
            f"'{name}' learns from pairs of answers, not from rewards: it belongs to `recipe: preference` (images: "
            f"diffusion_dpo). Objectives: {', '.join(sorted(CATALOGUE))}."
        )
    return look_up(CATALOGUE, name, "objective")


def get_preference(name: str) -> PreferenceObjective:
    """Return a method of the catalogue that learns from pairs.

    Args:
        name: Its name, such as "dpo"; `PreferenceObjective.override` changes numbers of its blocks.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    return look_up(PREFERENCES, name, "preference objective")


FAMILIES = (group, critic, image, adaptive, tracked, peers, estimators, agentic, mixed, masked, supervised)
"""Files of the catalogue, in the order in which its rows are listed."""
CATALOGUE: dict[str, Objective] = {row.name: row for family in FAMILIES for row in family.ROWS}
PREFERENCES: dict[str, PreferenceObjective] = {row.name: row for row in preference.ROWS}
HEADINGS = {
    row.name: re.split("[.:;]", family.__doc__ or "")[0] for family in (*FAMILIES, preference) for row in family.ROWS
}
"""Description of the family of each row."""
