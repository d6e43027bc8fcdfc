"""Published methods as rows: one `Objective` each, with the constants of its paper."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.core.block import unknown_name
from mmrl.core.blocks import contrib
from mmrl.core.catalogue import critic, group, image, mixed, pairs, peers, supervised
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective

__all__ = ["CATALOGUE", "PREFERENCES", "all_objectives", "all_preferences", "get", "get_preference"]


def get(name: str) -> Objective:
    """Return a method of the catalogue, or of contrib.

    Args:
        name: Its name, such as "grpo"; `Objective.override` changes numbers of its blocks.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    found = CATALOGUE.get(name) or contrib_objectives().get(name)
    if found is not None:
        return found
    known = _names(CATALOGUE, contrib_objectives())
    if name in all_preferences():
        raise ValueError(
            f"'{name}' learns from pairs of answers, not from rewards: use it with `recipe: preference` (images: "
            f"diffusion_dpo). Objectives: {', '.join(known)}."
        )
    raise ValueError(unknown_name(name, known, "objective"))


def get_preference(name: str) -> PreferenceObjective:
    """Return a method of the catalogue, or of contrib, that learns from pairs.

    Args:
        name: Its name, such as "dpo"; `PreferenceObjective.override` changes numbers of its blocks.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    found = PREFERENCES.get(name) or contrib_preferences().get(name)
    if found is None:
        known = _names(PREFERENCES, contrib_preferences())
        raise ValueError(unknown_name(name, known, "preference objective"))
    return found


def contrib_objectives() -> dict[str, Objective]:
    """The objectives of contrib by name."""
    return _by_name(contrib().FAMILIES, Objective)


def contrib_preferences() -> dict[str, PreferenceObjective]:
    """The objectives of contrib that learn from pairs, by name."""
    return _by_name(contrib().FAMILIES, PreferenceObjective)


def all_objectives() -> dict[str, Objective]:
    """The objectives of the library, then those of contrib."""
    return CATALOGUE | contrib_objectives()


def all_preferences() -> dict[str, PreferenceObjective]:
    """The objectives for pairs of the library, then those of contrib."""
    return PREFERENCES | contrib_preferences()


def all_headings() -> dict[str, str]:
    """Description of the family of each row; those of contrib begin with "contrib: "."""
    added = {name: f"contrib: {heading}" for name, heading in _headings(contrib().FAMILIES).items()}
    return _headings(FAMILIES) | added


def _by_name(families: Any, kind: type[Any]) -> dict[str, Any]:
    return {row.name: row for family in families for row in family.ROWS if isinstance(row, kind)}


def _headings(families: Any) -> dict[str, str]:
    return {row.name: re.split("[.:;]", family.__doc__ or "")[0] for family in families for row in family.ROWS}


def _names(own: Mapping[str, Any], added: Mapping[str, Any]) -> list[str]:
    return [*sorted(own), *sorted(added)]


FAMILIES = (group, critic, image, peers, mixed, supervised, pairs)
"""Files of the catalogue, in the order in which its rows are listed."""
CATALOGUE: dict[str, Objective] = _by_name(FAMILIES, Objective)
PREFERENCES: dict[str, PreferenceObjective] = _by_name(FAMILIES, PreferenceObjective)
