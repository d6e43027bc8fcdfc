"""Bounds of dataclass fields, declared where the field is and checked in one place.

    @dataclass
    class SamplerConfig:
        temperature: float = bounded(1.0, above=0)
        top_p: float = bounded(1.0, above=0, at_most=1)
        solver: str = choice("euler", SOLVERS)

    check_fields(config, "sampler")  # ValueError: sampler.temperature is -1.0; must be positive
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Bounds", "bounded", "bounds_of", "check_fields", "choice", "field_problems"]


@dataclass(frozen=True)
class Bounds:
    """What a field may be; None, where the field's type allows it, is always fine."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    allowed: tuple[Any, ...] = ()
    """The values of a choice; empty for numbers."""
    length: int | None = None
    """Entries of a list."""

    def __str__(self) -> str:
        """The bounds as the end of "must be ..."."""
        if self.allowed:
            return f"one of {', '.join(map(str, self.allowed))}"
        if self.length is not None:
            return f"a list of {self.length}"
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        if high == (None, None):
            if self.above is not None:
                return "positive" if self.above == 0 else f"above {self.above:g}"
            return f"at least {self.at_least:g}"
        if low == (None, None):
            return f"below {self.below:g}" if self.below is not None else f"at most {self.at_most:g}"
        left = f"[{self.at_least:g}" if self.at_least is not None else f"({self.above:g}"
        right = f"{self.at_most:g}]" if self.at_most is not None else f"{self.below:g})"
        return f"in {left}, {right}"

    def problem(self, key: str, value: Any) -> str | None:
        """One line that names the key, the value and what is allowed; None where the value is fine."""
        if value is None or self._holds(value):
            return None
        if not self.allowed:
            return f"{key} is {value}; must be {self}"
        close = difflib.get_close_matches(str(value), [str(name) for name in self.allowed], n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return f"{key} is '{value}'; {hint}allowed: {', '.join(map(str, self.allowed))}"

    def _holds(self, value: Any) -> bool:
        if self.allowed:
            return value in self.allowed
        if self.length is not None:
            return len(value) == self.length
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )


def bounded(default: Any, **bounds: float) -> Any:
    """A dataclass field whose number has bounds: any of `at_least`, `above`, `at_most` and `below`."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(**bounds)})


def choice(default: Any, allowed: Collection[Any]) -> Any:
    """A dataclass field whose value is one of a few."""
    return dataclasses.field(default=default, metadata={"bounds": Bounds(allowed=tuple(allowed))})


def bounds_of(item: dataclasses.Field[Any]) -> Bounds | None:
    """The declared bounds of a field, or None."""
    return item.metadata.get("bounds")


def field_problems(config: Any, where: str = "") -> Iterator[str]:
    """Yield one line for each value outside its field's bounds, in dataclasses, their lists and their dictionaries.

    Args:
        config: A dataclass instance.
        where: Dotted key of the instance; empty for the root.
    """
    for item in dataclasses.fields(config):
        key = f"{where}.{item.name}" if where else item.name
        value, bounds = getattr(config, item.name), bounds_of(item)
        if bounds is not None and (problem := bounds.problem(key, value)) is not None:
            yield problem
        yield from _nested(value, key)


def check_fields(config: Any, where: str = "") -> None:
    """Refuse the first value outside its field's bounds; see `field_problems`.

    Raises:
        ValueError: The message names the key, the value and what is allowed.
    """
    for problem in field_problems(config, where):
        raise ValueError(problem)


def _nested(value: Any, key: str) -> Iterator[str]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from field_problems(value, key)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _nested(part, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from _nested(part, f"{key}[{place}]")
