"""Settings of environments from plain data, as configuration files and messages to workers hold them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from mmrl.errors import UserError
from mmrl.gui.grounding.coords import CoordinateSpace, coordinate_space

SettingsT = TypeVar("SettingsT")


def settings_from(kind: type[SettingsT], values: Mapping[str, Any], where: str = "environment.kwargs") -> SettingsT:
    """Build settings from plain data; raises UserError for an unknown entry."""
    names = [item.name for item in dataclasses.fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in values if name not in names]
    if unknown:
        raise UserError(f"{where} has no entry {unknown[0]!r}; it has: {', '.join(names)}")
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is CoordinateSpace:
        return coordinate_space(value)
    if isinstance(value, Mapping):
        part: Any = next(
            (option for option in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(option)), None
        )
        return value if part is None else settings_from(part, value, where)
    return tuple(value) if isinstance(value, list) else value
