"""Python values in messages to a worker, as plain data: nothing here can run code on the other side.

Text, numbers, None, lists, tuples, sets, dicts, bytes, dates, decimals, NumPy arrays and scalars and PIL images are
sent and come back with their types. Anything else is refused by name: a plain form would not give the worker's function
what the caller was given.
"""

from __future__ import annotations

import datetime
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

PLAIN_DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
OTHER_DTYPES = "biufcUSmM"
"""Kinds of NumPy's dtypes that are sent as their bytes; objects and records are not."""
INTEGERS = 1 << 63
"""Integers beyond this are sent in base 16: Python refuses to write very long ones in base 10."""
TEXT_FORMS: dict[type, Callable[[Any], str]] = {
    datetime.datetime: datetime.datetime.isoformat,
    datetime.date: datetime.date.isoformat,
    datetime.time: datetime.time.isoformat,
    Decimal: str,
    Fraction: str,
}
FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "float": float,
    "int": lambda text: int(text, 16),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "Decimal": Decimal,
    "Fraction": Fraction,
}
COLLECTIONS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def encode(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Turn a value into JSON and arrays."""
    encoder = _Encoder()
    return encoder.tree(value), encoder.arrays


def decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Build the value that was given to `encode`."""
    return _Decoder(arrays).value(tree)


class _Encoder:
    """JSON scalars and lists as they are; everything else as an object with one key."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._known: dict[int, dict[str, Any]] = {}

    def tree(self, value: Any) -> Any:
        kind = type(value)  # a subclass has more to it than its plain value
        if value is None or kind in (bool, str) or (kind is int and -INTEGERS <= value < INTEGERS):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self.tree(entry) for entry in value]
        if kind in (dict, OrderedDict):
            tag = "dict" if kind is dict else "OrderedDict"
            return {tag: [[self.tree(key), self.tree(entry)] for key, entry in value.items()]}
        if kind in COLLECTIONS:
            return {COLLECTIONS[kind]: [self.tree(entry) for entry in value]}
        if kind in TEXT_FORMS:
            return {kind.__name__: TEXT_FORMS[kind](value)}
        return {"int": hex(value)} if kind is int else self._bulk(value)

    def _bulk(self, value: Any) -> dict[str, Any]:
        known = self._known.get(id(value))  # an image that G samples share is sent once
        if known is None:
            known = self._known[id(value)] = self._new_bulk(value)
        return known

    def _new_bulk(self, value: Any) -> dict[str, Any]:
        import numpy as np

        kind = type(value)
        if kind is np.ndarray and value.dtype.str in PLAIN_DTYPES:
            return {"array": self._add(value)}
        if kind is bytes:
            return {"bytes": self._add(np.frombuffer(value, np.uint8))}
        if kind is complex:
            return {"complex": [self.tree(value.real), self.tree(value.imag)]}
        if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in OTHER_DTYPES:
            array = np.asarray(value)
            tag = "ndarray" if kind is np.ndarray else "scalar"
            return {tag: [self._add(np.frombuffer(array.tobytes(), np.uint8)), array.dtype.str, list(array.shape)]}
        if kind.__module__.partition(".")[0] == "PIL" and hasattr(value, "tobytes"):
            data = self._add(np.frombuffer(value.tobytes(), np.uint8))
            return {"image": [data, value.mode, list(value.size), value.getpalette() if value.mode == "P" else None]}
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to a worker process, only text, numbers, lists, "
            "dicts, dates, NumPy arrays and PIL images; turn it into those, or keep the function in this process"
        )

    def _add(self, array: np.ndarray) -> str:
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


class _Decoder:
    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._objects: dict[str, Any] = {}

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(entry) for entry in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, content),) = tree.items()
        if tag in FROM_TEXT:
            return FROM_TEXT[tag](content)
        if tag in ("dict", "OrderedDict"):
            pairs = ((self.value(key), self.value(entry)) for key, entry in content)
            return dict(pairs) if tag == "dict" else OrderedDict(pairs)
        if tag in COLLECTIONS.values():
            kind = next(kind for kind, name in COLLECTIONS.items() if name == tag)
            return kind(self.value(entry) for entry in content)
        if tag == "complex":
            return complex(*(self.value(part) for part in content))
        name = content if isinstance(content, str) else content[0]
        if name not in self._objects:
            self._objects[name] = _bulk(tag, self._arrays[name], content)
        return self._objects[name]


def _bulk(tag: str, data: np.ndarray, content: Any) -> Any:
    if tag == "array":
        return data
    if tag == "bytes":
        return data.tobytes()
    if tag == "image":
        from PIL import Image

        _, mode, size, palette = content
        image = Image.frombytes(mode, tuple(size), data.tobytes())
        if palette is not None:
            image.putpalette(palette)
        return image
    import numpy as np

    _, dtype, shape = content
    array = np.frombuffer(data.tobytes(), dtype).reshape(shape).copy()
    return array if tag == "ndarray" else array[()]
