"""Bounds, choices and kinds that configuration fields declare in their metadata, and the check of all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

from mmrl.errors import ConfigError, did_you_mean

SET, UNSET = object(), object()
"""Values of other options that `only_with` asks for."""


@dataclass(frozen=True)
class Unless:
    """Any value of another option except this one, for `only_with`."""

    value: Any


LARGEST = 2**63 - 1
"""Whole numbers beyond it fit neither tensors nor files."""
PLAIN: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (Integral,), float: (Real,), str: (str, os.PathLike)}
"""Plain types and the types accepted for them, such as NumPy's numbers and paths."""

hints_of: Callable[[type[Any]], dict[str, Any]] = functools.cache(typing.get_type_hints)  # type: ignore[assignment]
"""Types of a class's annotations, cached because a run needs them for its configuration at each step."""


def is_text(value: str) -> bool:
    """Whether a text can be written down: no half of a surrogate pair, no NUL."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def value_problems(key: str, hint: Any, value: Any) -> Iterator[str]:
    """Yield one line for each part of a value that its annotation does not allow or that nothing can use."""
    if isinstance(value, str) and not is_text(value):
        yield f"{key} is {value!r}; a text must not contain NUL or a lone surrogate"
    elif isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        yield f"{key} is an integer with {int(value.bit_length() * 0.30103) + 1} digits; must be at most {LARGEST}"
    elif isinstance(value, Real) and not isinstance(value, int) and not math.isfinite(value):
        # "without a limit" is null
        yield f"{key} is {float(value)}; must be finite"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from value_problems(f"{key}.{name}", _inner(hint, value), part)
        # keys are texts too, and end up in file names and metrics
        yield from (problem for name in value for problem in value_problems(f"a key of {key}", Any, name))
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from value_problems(f"{key}[{index}]", _inner(hint, value), part)
    # a type that is not plain, such as a dataclass, is checked by itself
    allowed = [option for option in options_of(hint) if option is not Any]
    if allowed and all(option in PLAIN or option is type(None) for option in allowed):
        standing = tuple(kind for option in allowed for kind in PLAIN.get(option, (type(None),)))
        if not isinstance(value, standing):
            names = " or ".join("none" if option is type(None) else option.__name__ for option in allowed)
            yield f"{key} is {value!r}; expected {names}"


def _inner(hint: Any, value: Any) -> Any:
    """Annotation of the entries of a list or dictionary; Any if there is none."""
    for option in options_of(hint):
        arguments = typing.get_args(option)
        # the last argument: values of a dictionary, entries of a list
        if arguments and isinstance(value, typing.get_origin(option) or ()):
            return arguments[-1]
    return Any


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that an annotation allows."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


FUNCTION = "module:function"


@dataclass(frozen=True)
class Bounds:
    """Allowed values of a field, whose numbers are finite unless `any_float` is set.

    None always passes if the type allows it; a list is checked entry by entry.
    """

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    multiple_of: int | None = None
    any_float: bool = False
    """Whether the number may also be infinite or NaN."""
    length: int | None = None
    """Number of entries of a list."""
    choices: Callable[[], Collection[Any]] | None = None
    """The values of a choice; None for numbers."""
    or_function: bool = False
    """Whether a choice also takes the user's own `module:function`."""
    unit: str = ""
    """Unit of the numbers, such as m or rad; empty if the field's name states it or there is none."""

    @property
    def allowed(self) -> tuple[Any, ...]:
        """The values of a choice; empty for numbers."""
        return () if self.choices is None else tuple(self.choices())

    def __str__(self) -> str:
        """The bounds as the end of "must be ..."."""
        if self.choices is not None:
            return f"one of {self._listed()}"
        multiple = "" if self.multiple_of is None else f"a multiple of {self.multiple_of}"
        text = " and ".join(filter(None, (self._range(), multiple)))
        if self.length is not None:
            text = f"a list of {self.length}{f', each {text}' if text else ''}"
        return f"{text}, in {self.unit}" if self.unit else text

    def problem(self, key: str, value: Any) -> str | None:
        """One line with the key, the value and the allowed values; None if the value is fine."""
        # None means that the option is not set, so it has no bounds to keep
        if value is None or self._holds(value):
            return None
        if self.choices is None:
            return f"{key} is {value}; must be {self}"
        return f"{key} is {value!r}; {did_you_mean(str(value), self.allowed)}allowed: {self._listed()}"

    def _listed(self) -> str:
        return f"{', '.join(map(str, self.allowed))}{f', or {FUNCTION}' if self.or_function else ''}"

    def _range(self) -> str:
        low, high = (self.at_least, self.above), (self.at_most, self.below)
        if low == high == (None, None):
            return ""
        if high == (None, None):
            if self.above is not None:
                return "positive" if self.above == 0 else f"above {self.above:g}"
            return f"at least {self.at_least:g}"
        if low == (None, None):
            return f"below {self.below:g}" if self.below is not None else f"at most {self.at_most:g}"
        left = f"[{self.at_least:g}" if self.at_least is not None else f"({self.above:g}"
        right = f"{self.at_most:g}]" if self.at_most is not None else f"{self.below:g})"
        return f"in {left}, {right}"

    def _holds(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return (self.length is None or len(value) == self.length) and all(map(self._holds_one, value))
        return self._holds_one(value)

    def _holds_one(self, value: Any) -> bool:
        if self.choices is not None:
            # a user's own function is named module:function, and found when it is loaded
            return value in self.allowed or (self.or_function and ":" in str(value))
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )


@dataclass(frozen=True)
class Kinds:
    """Options of a dictionary field, by kind; for lists of options only."""

    table: Callable[[], Mapping[str, type[Any]]]
    """Kind to the dataclass of its options."""
    named: bool = False
    """Whether the dictionary itself contains the kind, under `kind`."""
    default_from: str = ""
    """Origin of the defaults, if not the dataclass."""
    without: tuple[str, ...] = ()
    """Fields of the dataclasses that are set elsewhere."""


class NumberBounds(TypedDict, total=False):
    """Keyword arguments of `bounded`."""

    at_least: float
    above: float
    at_most: float
    below: float
    multiple_of: int
    any_float: bool
    length: int
    unit: str


def bounded(default: Any = dataclasses.MISSING, **bounds: Unpack[NumberBounds]) -> Any:
    """A dataclass field whose number, or whose list of numbers, has bounds; see `Bounds`."""
    return _field(default, Bounds(**bounds))


def choice(default: Any, allowed: Collection[Any] | Callable[[], Collection[Any]], *, or_function: bool = False) -> Any:
    """A dataclass field with a fixed set of choices (or a function that returns it), maybe also a `module:function`."""
    choices = allowed if callable(allowed) else lambda: allowed
    return _field(default, Bounds(choices=choices, or_function=or_function))


def rare(default: Any) -> Any:
    """A dataclass field, given by its default or as made by `bounded`, `choice` or `field`, that few users ever set.

    `mmrl options RECIPE` leaves it out, and what is inside it, unless called with `--all`.
    """
    item = default if isinstance(default, dataclasses.Field) else _field(default, None)
    # a new mapping: Field.metadata is read-only
    item.metadata = types.MappingProxyType({**item.metadata, "rare": True})
    return item


def only_with(default: Any, **others: Any) -> Any:
    """A dataclass field that may only be set if other options of its dataclass have certain values.

    Args:
        default: as of `rare`.
        others: names of these options with their values; a tuple of values for any of them, `Unless(value)` for all
            others, `SET` for any but 0, false, none and empty, `UNSET` for these.
    """
    item = default if isinstance(default, dataclasses.Field) else _field(default, None)
    item.metadata = types.MappingProxyType({**item.metadata, "only_with": others})
    return item


def by_kind(
    table: Callable[[], Mapping[str, type[Any]]],
    *,
    named: bool = False,
    default_from: str = "",
    without: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with the options of one of several kinds, empty by default; see `Kinds`."""
    kinds = Kinds(table, named, default_from, without)
    return dataclasses.field(default_factory=dict, metadata={"kinds": kinds})


def inheriting(source: str, *, own: tuple[str, ...]) -> Any:
    """A field of named parts; options that a part does not set, except `own`, are inherited from the field `source`."""
    return dataclasses.field(default_factory=dict, metadata={"inherits": (source, own)})


def bounds_of(item: dataclasses.Field[Any]) -> Bounds | None:
    """The declared bounds of a field, or None."""
    return item.metadata.get("bounds")


def part_of(hint: Any) -> tuple[type[Any] | None, str]:
    """The dataclass inside a field, and the suffix of its key; None if there is none."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [found for found in map(part_of, arguments) if found[0] is not None]
        return parts[0] if parts else (None, "")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and dataclasses.fields(hint):
        return hint, ""
    suffix = {list: "[]", dict: ".<name>"}.get(typing.get_origin(hint))
    if suffix is not None and arguments and dataclasses.is_dataclass(arguments[-1]):
        return arguments[-1], suffix  # type: ignore[return-value]
    return None, ""


def default_of(item: dataclasses.Field[Any]) -> Any:
    """Default of a field; MISSING if it has none."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def field_problems(config: Any, where: str = "") -> Iterator[str]:
    """Yield one line for each value outside its field's type or bounds, nested dataclasses included."""
    hints = hints_of(type(config))
    for item in dataclasses.fields(config):
        key = f"{where}.{item.name}" if where else item.name
        value, bounds = getattr(config, item.name), bounds_of(item)
        free = bounds is not None and bounds.any_float and isinstance(value, float)
        unusable = [] if free else list(value_problems(key, hints[item.name], value))
        yield from unusable
        # bounds of a value of the wrong type would only repeat the message
        if unusable:
            continue
        if bounds is not None and (problem := bounds.problem(key, value)) is not None:
            yield problem
        yield from _unread(config, item, where)
        # with the path of the part, so that the message names the option as the user writes it
        for part_key, part in _nested(value, key):
            yield from field_problems(part, part_key)


def check_fields(config: Any, where: str = "") -> None:
    """Raise an error for the first value outside its field's bounds; see `field_problems`."""
    for problem in field_problems(config, where):
        raise ConfigError(problem)


def parts_of(config: Any) -> Iterator[Any]:
    """Yield the dataclasses inside a dataclass, also in lists and dictionaries, inner ones first."""
    for item in dataclasses.fields(config):
        for _, part in _nested(getattr(config, item.name), ""):
            yield from parts_of(part)
            yield part


def check_config(config: Any, where: str = "") -> None:
    """Check everything that a dataclass declares: bounds of fields, then `validate` of its parts and its own."""
    check_fields(config, where)
    # parts before the whole, which may rely on them
    for part in (*parts_of(config), config):
        if hasattr(part, "validate"):
            part.validate()


def _field(default: Any, bounds: Bounds | None) -> Any:
    metadata = {} if bounds is None else {"bounds": bounds}
    # a copy for each instance: a shared list would be changed by all of them
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _unread(config: Any, item: dataclasses.Field[Any], where: str) -> Iterator[str]:
    """A line where an option differs from its default while another one keeps everything from reading it."""
    default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    value, front = getattr(config, item.name), f"{where}." if where else ""
    for name, wanted in item.metadata.get("only_with", {}).items():
        other = getattr(config, name)
        if value != default and not _fits(other, wanted):
            is_part = dataclasses.is_dataclass(value)
            given, kept = ("set", "leave it out") if is_part else (f"{value!r}", f"leave it at {default!r}")
            yield (
                f"{front}{item.name} is {given}, but it has no effect while {front}{name} is {other!r}; {kept}, or "
                f"{_needed(f'{front}{name}', wanted)}"
            )


def _fits(value: Any, wanted: Any) -> bool:
    """Whether the value of another option is one that `only_with` asks for."""
    if wanted is SET or wanted is UNSET:
        return bool(value) is (wanted is SET)
    if isinstance(wanted, Unless):
        return bool(value != wanted.value)
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)


def _needed(key: str, wanted: Any) -> str:
    """The way to make something read an option."""
    if isinstance(wanted, Unless):
        return f"change {key}"
    return f"unset {key}" if wanted is UNSET else f"set {key if wanted is SET else _wanted(key, wanted)}"


def readers_of(item: dataclasses.Field[Any], front: str = "") -> str:
    """The values of other options that a field requires to have an effect, such as "schedule: annealing"."""
    return " and ".join(
        _wanted(f"{front}{name}", wanted) for name, wanted in item.metadata.get("only_with", {}).items()
    )


def _wanted(key: str, wanted: Any) -> str:
    """A value that `only_with` asks for, as in a configuration file."""
    if wanted is SET or wanted is UNSET:
        return f"{key} {'set' if wanted is SET else 'unset'}"
    if isinstance(wanted, Unless):
        return f"{key} other than {wanted.value}"
    if isinstance(wanted, tuple):
        return f"{key}: {' or '.join(map(str, wanted))}"
    return f"{key}: {str(wanted).lower() if type(wanted) is bool else wanted}"


def _nested(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and dataclasses in a field's value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _nested(part, f"{key}.{name}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _nested(part, f"{key}[{index}]")
