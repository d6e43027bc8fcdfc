"""Blocks of an objective by field: changed as a configuration asks for, and in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmrl.core.block import Block, changed, weighted
from mmrl.core.blocks import BLOCKS
from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.blocks.filter import KeepAll
from mmrl.core.blocks.order import Epochs
from mmrl.core.loss import Aggregation


def changed_blocks(current: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The blocks that `Objective.override` exchanges, by field; see there."""
    parts: dict[str, Any] = {}
    for key, options in changes.items():
        if key not in BLOCKS:
            raise ValueError(f"An objective has no part '{key}'; its parts: {', '.join(BLOCKS)}.")
        base = current[key]
        switched_off = base is None and "kind" not in options and options.get("coef") == 0
        parts[key] = None if switched_off else changed(base, _with_aggregation(options, key), BLOCKS[key], key)
    for key in ("kl", "entropy"):
        if key in parts:
            parts[key] = weighted(parts[key], changes[key], key)
    return parts


def blocks_line(blocks: Mapping[str, Block]) -> str:
    """The blocks in one line, for tables; parts that do nothing are left out."""
    shown = [
        block.summary().replace("scaling ", "scaled ") if key == "scaling" else f"{SHOWN_AS[key]}{block.summary()}"
        for key, block in blocks.items()
        if block not in (AdvantageScaling(), KeepAll(), Epochs())
    ]
    return ", ".join(shown)


def _with_aggregation(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Options of a block whose `aggregation`, given by name or as keys and values, is made a block."""
    made = dict(options)
    given = made.get("aggregation")
    if key == "kl" and given is not None and not isinstance(given, Aggregation):
        if not isinstance(given, str | Mapping):
            names = ", ".join(sorted(BLOCKS["aggregation"]))
            raise ValueError(f"kl.aggregation is {given!r}; expected a name, or kind and options: {names}")
        named = {"kind": given} if isinstance(given, str) else given
        made["aggregation"] = changed(None, named, BLOCKS["aggregation"], "kl.aggregation")
    return made


SHOWN_AS = {
    "advantage": "",
    "scaling": "",
    "ratio": "ratio ",
    "clip": "",
    "kl": "KL ",
    "entropy": "entropy ",
    "aggregation": "",
    "filter": "groups: ",
    "value": "value ",
    "weight": "weight ",
    "correction": "mismatch ",
    "gate": "gate ",
    "order": "order ",
}
"""Prefix of each block in `Objective.parts`."""
