"""Blocks of an objective by field: changed as a configuration asks for, and in one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mmrl.core.block import Block, unknown_name
from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS, all_kinds, kind_names
from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.blocks.filter import KeepAll
from mmrl.core.blocks.order import Epochs
from mmrl.core.loss import Aggregation
from mmrl.fields import bounds_of, hints_of


def changed_blocks(current: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The blocks that `Objective.override` exchanges, by field; see there."""
    parts: dict[str, Any] = {}
    for key, options in changes.items():
        if key not in BLOCKS:
            raise ValueError(f"An objective has no part '{key}'; its parts: {', '.join(BLOCKS)}.")
        base = current[key]
        switched_off = base is None and "kind" not in options and options.get("coef") == 0
        parts[key] = None if switched_off else changed(base, _with_aggregation(options, key), key)
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
        made["aggregation"] = changed(None, named, "aggregation", "kl.aggregation")
    return made


def changed(base: Block | None, changes: Mapping[str, Any], part: str, where: str = "") -> Block | None:
    """Change numbers of a block, or exchange it for one of another kind; `where` is its key, by default the part's."""
    if not changes:
        return base
    options, where = dict(changes), where or part
    kind = options.pop("kind", base.kind if base is not None else None)
    table = (BLOCKS | PREFERENCE_BLOCKS)[part]
    if kind == "none" and "none" not in table:
        return None
    if not isinstance(kind, str) or kind not in table:
        table = all_kinds(part)
    if kind is None:
        raise ValueError(
            f"{where} is not part of this objective, so {where}.{next(iter(options))} would do nothing; to go without, "
            f"set objective.{where}.kind=none; to add one, name its kind: {', '.join(kind_names(part))}"
        )
    if not isinstance(kind, str):
        raise ValueError(f"{where}.kind is {kind!r}; expected a name: {', '.join(kind_names(part))}")
    if kind not in table:
        raise ValueError(f"{where}.kind: {unknown_name(kind, kind_names(part), where)}")
    block_class = table[kind]
    known = block_class.options()
    for name in options:
        if name not in known:
            exists = f"it has: {', '.join(known)}" if known else "it has none"
            raise ValueError(f"{where}: '{kind}' has no option '{name}'; {exists}")
    kept = {} if base is None else {name: getattr(base, name) for name in known if name in base.options()}
    given = {name: _typed(block_class, name, value, f"{where}.{name}") for name, value in options.items()}
    return block_class(**(kept | given))


def weighted(block: Any, options: Mapping[str, Any], where: str) -> Any:
    """The block, or None if its `coef` is set to 0; raises ValueError if nobody set `coef` and it is 0 by default."""
    if block is None or block.coef != 0:
        return block
    if "coef" not in options:
        raise ValueError(f"{where} is '{block.kind}', whose coef is 0 unless you set it: it would do nothing")
    return None


def _typed(block_class: type[Block], name: str, value: Any, key: str) -> Any:
    """`value` as the type of the field: whole numbers become floats where a float is expected."""
    allowed = _types(hints_of(block_class)[name])
    if value is None and type(None) in allowed:
        return None
    if float in allowed and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    for kind in allowed:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
    expected = " or ".join("none" if kind is type(None) else kind.__name__ for kind in allowed)
    item = next(item for item in dataclasses.fields(block_class) if item.name == name)
    raise ValueError(f"{key} is {value!r}; expected {expected}{_allowed(item)}")


def _allowed(item: dataclasses.Field[Any]) -> str:
    bounds = bounds_of(item)
    return f", {bounds}" if bounds is not None else ""


def _types(hint: Any) -> tuple[type, ...]:
    return getattr(hint, "__args__", None) or (hint,)


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
