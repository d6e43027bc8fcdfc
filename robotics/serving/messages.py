"""Messages in the format of openpi's client: msgpack dictionaries, with arrays as bytes, dtype and shape.

An array is {b"__ndarray__": True, b"data": its bytes in row-major order, b"dtype": "<f4", b"shape": [K, D]}, a NumPy
number {b"__npgeneric__": True, b"data": a number, b"dtype": "<f4"}. Only booleans, integers and floats are read, never
a pickle.

Source: openpi-client 0.1.2, the format of its `msgpack_numpy`; it comes from lebedov/msgpack-numpy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.errors import UserError

LARGEST_MESSAGE = 64 * 2**20
"""Maximum size of a message in bytes; larger ones close the connection."""
MOST_ENTRIES = 10_000
"""Maximum number of entries of a message, over all its lists and dictionaries."""
MOST_LEVELS = 8
"""Maximum nesting of dictionaries; the names of nested entries are joined with `/`."""
LONGEST_NAME = 256
"""Maximum length of an entry's name in characters."""
MOST_AXES = 8
"""Maximum number of axes of an array."""
DTYPE = re.compile(r"[<>|=]?[biuf]\d{1,2}")
ARRAY, NUMBER = b"__ndarray__", b"__npgeneric__"


class BadMessageError(UserError):
    """A message that cannot be answered."""


@dataclass(frozen=True)
class Unreadable:
    """An array in a message that could not be read; kept so that the error can name its entry."""

    reason: str


def pack(message: Mapping[str, Any]) -> bytes:
    """Pack a dictionary of texts, numbers, lists, dictionaries and arrays."""
    import msgpack

    packed: bytes = msgpack.packb(message, default=_encode)
    return packed


def unpack(data: bytes | str) -> dict[str, Any]:
    """Read a message."""
    import msgpack

    # a WebSocket may send text frames
    if isinstance(data, str):
        raise BadMessageError(
            f"the message is the text {data[:80]!r}; expected bytes, a dictionary packed with msgpack"
        )
    limits = {"max_array_len": MOST_ENTRIES, "max_map_len": MOST_ENTRIES}
    limit = _Limit()
    try:
        # counted while decoding: sizes of single containers do not bound their sum
        message = msgpack.unpackb(data, object_hook=limit.of_map, list_hook=limit.of_list, **limits)
    except BadMessageError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadMessageError(
            f"the message of {len(data)} bytes is not msgpack ({reason[:200]}); expected a dictionary packed with "
            "openpi_client.msgpack_numpy"
        ) from error
    if not isinstance(message, dict):
        raise BadMessageError(f"the message is {describe_value(message)}; expected a dictionary of observations")
    return dict(_flattened(message))


class _Limit:
    """Stops decoding a message as soon as it has too many entries, before they fill the memory."""

    def __init__(self) -> None:
        self._entries = 0

    def of_map(self, entries: dict[Any, Any]) -> Any:
        self._count(entries)
        return _decode(entries)

    def of_list(self, entries: list[Any]) -> list[Any]:
        self._count(entries)
        return entries

    def _count(self, entries: Sized) -> None:
        self._entries += 1 + len(entries)
        if self._entries > MOST_ENTRIES:
            raise BadMessageError(f"the message has more than {MOST_ENTRIES} entries")


def describe_value(value: Any) -> str:
    """A message's entry in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, Unreadable):
        return value.reason
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing" if value is None else f"the {type(value).__name__} {str(value)[:40]}"


def printable(text: str) -> str:
    """Escape control characters in a robot's text for the log, as they could forge lines or control a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _flattened(message: Mapping[Any, Any], start: str = "", level: int = 1) -> Iterator[tuple[str, Any]]:
    if level > MOST_LEVELS:
        raise BadMessageError(f"the message has dictionaries nested more than {MOST_LEVELS} deep")
    for key, value in message.items():
        if isinstance(key, str | bytes) and len(key) > LONGEST_NAME - len(start):
            raise BadMessageError(f"an entry's name is longer than {LONGEST_NAME} characters: {start}{key[:40]!r}...")
        name = printable(f"{start}{key.decode('utf-8', 'replace') if isinstance(key, bytes) else key}")
        if isinstance(value, dict):
            yield from _flattened(value, f"{name}/", level + 1)
        else:
            yield name, value


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    # arrays of objects hold pointers, which mean nothing elsewhere
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise TypeError(f"a message cannot contain {describe_value(value)}")
    return {ARRAY: True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


def _decode(entries: dict[Any, Any]) -> Any:
    if ARRAY in entries:
        return _array(entries.get(b"data"), entries.get(b"dtype"), entries.get(b"shape"))
    if NUMBER in entries:
        return entries.get(b"data")
    return entries


def _array(data: Any, name: Any, shape: Any) -> Any:
    try:
        dtype = np.dtype(name) if isinstance(name, str) and DTYPE.fullmatch(name) else None
    except TypeError:  # such as f3
        dtype = None
    if dtype is None:
        return Unreadable(f"an array of the dtype {str(name)[:40]!r}, which is not read,")
    whole = isinstance(shape, list) and len(shape) <= MOST_AXES
    whole = whole and all(type(size) is int and 0 <= size <= LARGEST_MESSAGE for size in shape)
    if not whole or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        held = f"{len(data)} bytes" if isinstance(data, bytes) else describe_value(data)
        return Unreadable(f"an array of the shape {str(shape)[:40]} and dtype {name} with {held}")
    return np.frombuffer(data, dtype).reshape(shape)
