"""Published methods as rows: one `Objective` each, with the constants of its paper."""

from __future__ import annotations

from mmrl.core.catalogue import critic, group, image, supervised
from mmrl.core.checks import look_up
from mmrl.core.objective import Objective

__all__ = ["CATALOGUE", "get"]


def get(name: str) -> Objective:
    """Return a method of the catalogue.

    Args:
        name: Its name, such as "grpo"; `Objective.override` changes numbers of its blocks.

    Returns:
        The objective.

    Raises:
        ValueError: No such method; the message lists what exists.
    """
    return look_up(CATALOGUE, name, "objective")


CATALOGUE: dict[str, Objective] = {
    row.name: row for family in (group, critic, image, supervised) for row in family.ROWS
}
