"""What a value of a configuration must be beside its bounds: of its field's type, text and numbers that can be used."""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any

LARGEST = 2**63 - 1
"""Whole numbers beyond it fit neither tensors nor files."""
PLAIN: dict[Any, tuple[type, ...]] = {bool: (bool,), int: (Integral,), float: (Real,), str: (str, os.PathLike)}
"""Plain types, and what stands for them: the numbers of NumPy, paths."""


def is_text(value: str) -> bool:
    """Whether a text can be written down: no half of a surrogate pair, no NUL."""
    return "\0" not in value and not any("\ud800" <= letter <= "\udfff" for letter in value)


def value_problems(key: str, hint: Any, value: Any) -> Iterator[str]:
    """Yield one line for each part of a value that its annotation does not allow or that nothing can use."""
    if isinstance(value, str) and not is_text(value):
        yield f"{key} is {value!r}; a text may hold no NUL and no half of a surrogate pair"
    elif isinstance(value, int) and not -LARGEST - 1 <= value <= LARGEST:
        yield f"{key} is a whole number of {int(value.bit_length() * 0.30103) + 1} digits; must be at most {LARGEST}"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from value_problems(f"{key}.{name}", _inner(hint, value), part)
        yield from (problem for name in value for problem in value_problems(f"a key of {key}", Any, name))
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            yield from value_problems(f"{key}[{place}]", _inner(hint, value), part)
    allowed = [option for option in _options(hint) if option is not Any]
    if allowed and all(option in PLAIN or option is type(None) for option in allowed):
        standing = tuple(kind for option in allowed for kind in PLAIN.get(option, (type(None),)))
        if not isinstance(value, standing):
            names = " or ".join("none" if option is type(None) else option.__name__ for option in allowed)
            yield f"{key} is {value!r}; expected {names}"


def _inner(hint: Any, value: Any) -> Any:
    """Annotation of the entries of a list or dictionary; Any where nothing is said."""
    for option in _options(hint):
        arguments = typing.get_args(option)
        if arguments and isinstance(value, typing.get_origin(option) or ()):
            return arguments[-1]
    return Any


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
