"""Python values in messages to a worker.

Text, numbers, None, lists, tuples, dicts and arrays are sent as plain data. Everything else, a PIL image or an object
of the user's for instance, is pickled, since no plain form would give the worker's function what the caller was given.
A pickle is only ever sent to a worker, a process that this one has started; what a worker sends is never unpickled.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

__all__ = ["decode", "encode"]

PLAIN_DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
INTEGERS = 1 << 63
"""Integers beyond this are pickled: Python refuses to write very long ones as text."""


def encode(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Turn a value into JSON and arrays.

    Args:
        value: anything that can be pickled.

    Returns:
        JSON, and the arrays that it refers to by name.

    Raises:
        Exception: whatever pickling a part of it raises.
    """
    encoder = _Encoder()
    return encoder.tree(value), encoder.arrays


def decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Build the value that was given to `encode`.

    Args:
        tree: JSON from `encode`.
        arrays: arrays from `encode`.

    Returns:
        The value; what occurred in several places before is one object again if it was an array or was pickled.
    """
    objects: dict[str, Any] = {}
    return _decode(tree, arrays, objects)


class _Encoder:
    """JSON scalars and lists stand for themselves, an object with one key for everything else."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[int, str] = {}

    def tree(self, value: Any) -> Any:
        kind = type(value)  # a subclass has more to it than its plain value
        if value is None or kind in (bool, str) or (kind is int and -INTEGERS <= value < INTEGERS):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self.tree(entry) for entry in value]
        if kind is tuple:
            return {"tuple": [self.tree(entry) for entry in value]}
        if kind is dict:
            return {"dict": [[self.tree(key), self.tree(entry)] for key, entry in value.items()]}
        return self._array_or_pickle(value)

    def _array_or_pickle(self, value: Any) -> dict[str, str]:
        import numpy as np

        tag = "array" if type(value) is np.ndarray and value.dtype.str in PLAIN_DTYPES else "pickle"
        name = self._names.get(id(value))  # an image that G samples share is sent once
        if name is None:
            name = self._names[id(value)] = str(len(self.arrays))
            self.arrays[name] = value if tag == "array" else np.frombuffer(pickle.dumps(value), np.uint8)
        return {tag: name}


def _decode(tree: Any, arrays: Mapping[str, np.ndarray], objects: dict[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_decode(entry, arrays, objects) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    ((tag, content),) = tree.items()
    if tag == "float":
        return float(content)
    if tag == "tuple":
        return tuple(_decode(entry, arrays, objects) for entry in content)
    if tag == "dict":
        return {_decode(key, arrays, objects): _decode(entry, arrays, objects) for key, entry in content}
    if content not in objects:
        objects[content] = arrays[content] if tag == "array" else pickle.loads(arrays[content].data)
    return objects[content]
