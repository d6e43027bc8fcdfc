"""Messages between a pool and its workers: JSON and arrays, nothing that could run code.

A message is a prefix of fixed size (mark, version, lengths), a JSON object and the raw bytes of some arrays; a request
or answer that says no more than its number is a prefix alone, because a step of a light environment takes less time
than reading JSON. A broken or hostile worker can at worst send wrong numbers. Both ends load this file, the worker by
its path in the interpreter of its service: it runs on Python 3.8 and imports numpy, 1 or 2, only when a message
has arrays.

Python values travel in such messages as plain data (`encode`, `decode`): text, numbers, None, lists, tuples, sets,
dicts, bytes, dates, decimals, NumPy arrays and scalars and PIL images come back with their types. Anything else is
refused by name: a plain form would not give the worker's function the value that the caller passed.
"""

from __future__ import annotations

import datetime
import json
import math
import struct
import traceback
from collections import OrderedDict
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


MARK = b"MRLW"
SHORT_MARK = b"MRLS"
"""Begins a message without body and arrays; an index into `SHORT_KINDS` and the number replace the two lengths."""
SHORT_KINDS = ("request", "result")
# Raised with the layout of a message, so that another version is refused and not misread.
VERSION = 3
MAX_HEADER_BYTES = 256 << 20
MAX_BODY_BYTES = 4 << 30
MAX_AXES = 16
PREFIX = struct.Struct("<4sHIQ")
DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
OTHER_DTYPES = "biufcUSmM"
"""Kinds of NumPy dtypes that are sent as bytes; objects and records are not."""
INTEGERS = 1 << 63
"""Integers beyond this are sent in base 16, because Python does not write very long ones in base 10."""
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


class WireError(ValueError):
    """The bytes in a pipe are not a message of this version, or a message cannot be sent."""


class Message(NamedTuple):
    """One message."""

    fields: dict[str, Any]
    """A JSON object."""
    arrays: dict[str, np.ndarray]
    """Arrays by name; they own their memory."""


def pack(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Encode a message as bytes: JSON fields with finite floats, and arrays of six dtypes in any byte order."""
    # A step of a vector environment: its numbers are in shared memory, so the message has nothing to say.
    if not arrays and fields.keys() == {"kind", "id", "body"} and not fields["body"] and fields["kind"] in SHORT_KINDS:
        return PREFIX.pack(SHORT_MARK, VERSION, SHORT_KINDS.index(fields["kind"]), fields["id"])
    # One byte order on the wire: a worker may run on another machine.
    plain = {name: _little_endian(name, array) for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in plain.items()]
    try:
        header = json.dumps({"fields": dict(fields), "arrays": layout}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WireError(f"fields of a message must be JSON: {error}") from None
    body = b"".join(array.tobytes() for array in plain.values())
    # Here too, or the other side would refuse it and look as if it had crashed.
    _check_lengths(len(header), len(body))
    return PREFIX.pack(MARK, VERSION, len(header), len(body)) + header + body


def read(stream: BinaryIO) -> Message | None:
    """Wait for a message on a blocking binary stream; returns None if the stream has ended between two messages."""
    prefix = stream.read(PREFIX.size)
    if not prefix:
        return None
    if prefix.startswith(SHORT_MARK) and len(prefix) == PREFIX.size:
        return _short(prefix)
    header_bytes, body_bytes = _lengths(prefix)
    # One read for both, since each may wait for the other side.
    rest = stream.read(header_bytes + body_bytes)
    if len(rest) < header_bytes + body_bytes:
        raise WireError(f"the stream ended after {len(rest)} of {header_bytes + body_bytes} bytes of a message")
    return _unpack(rest[:header_bytes], memoryview(rest)[header_bytes:])


class MessageDecoder:
    """Collects bytes as they arrive and yields complete messages."""

    def __init__(self, max_bytes: int = MAX_HEADER_BYTES + MAX_BODY_BYTES) -> None:
        self._held = bytearray()
        self._max_bytes = max_bytes

    @property
    def incomplete(self) -> bool:
        """Whether it holds a part of a message."""
        return bool(self._held)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add the bytes of one read; must be iterated to the end."""
        # The common case of a vector environment: a whole short message in one read, without a copy.
        if not self._held and len(data) == PREFIX.size and data.startswith(SHORT_MARK):
            yield _short(data)
            return
        self._held += data
        # Several messages may arrive in one read, and one message in several.
        while len(self._held) >= PREFIX.size:
            if self._held.startswith(SHORT_MARK):
                yield _short(bytes(self._held[: PREFIX.size]))
                del self._held[: PREFIX.size]
                continue
            header_bytes, body_bytes = _lengths(bytes(self._held[: PREFIX.size]))
            # Before the bytes are there: otherwise a hostile length fills this process's memory.
            if header_bytes + body_bytes > self._max_bytes:
                size = header_bytes + body_bytes
                raise WireError(f"a message of {size} bytes is announced; at most {self._max_bytes} are allowed")
            start, end = PREFIX.size + header_bytes, PREFIX.size + header_bytes + body_bytes
            # Not complete: the rest comes with the next read.
            if len(self._held) < end:
                break
            # Copies: `del` below moves the rest to the front.
            header, body = bytes(self._held[PREFIX.size : start]), bytes(self._held[start:end])
            del self._held[:end]
            yield _unpack(header, body)
        # The first bytes alone tell garbage from a message that is still incomplete.
        first = bytes(self._held[: len(MARK)])
        if not (MARK.startswith(first) or SHORT_MARK.startswith(first)):
            raise WireError(_garbage(bytes(self._held)))


def error_text(error: BaseException) -> str:
    """Text of an exception, even if its `__str__` raises another one."""
    try:
        # An exception of a user's code, whose __str__ may fail as well.
        return str(error)
    except BaseException as other:
        return f"(its text is not available: __str__ raised {type(other).__name__})"


def describe_error(error: BaseException) -> dict[str, Any]:
    """JSON of a service's exception, from which the pool creates a `WorkerFailure`; call it in the `except` block."""
    try:
        # A property of a user's exception may raise, too.
        for_user = bool(getattr(error, "for_user", False))
    except BaseException:
        for_user = False
    return {
        "type": type(error).__name__,
        "message": error_text(error),
        "traceback": traceback.format_exc(),
        "for_user": for_user,
    }


def _little_endian(name: str, array: np.ndarray) -> np.ndarray:
    import numpy as np

    values = np.asarray(array)
    # No copy where the order is right already.
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in DTYPES:
        raise WireError(f"array {name!r} has dtype {values.dtype}; allowed: {', '.join(DTYPES)}")
    return little


def _short(prefix: bytes) -> Message:
    # The length fields of a full message hold the kind and the number here.
    _, version, kind, number = PREFIX.unpack(prefix)
    _check_version(version)
    if kind >= len(SHORT_KINDS):
        raise WireError(f"a short message has the kind {kind}; there are {len(SHORT_KINDS)}")
    return Message({"kind": SHORT_KINDS[kind], "id": number, "body": {}}, {})


def _check_version(version: int) -> None:
    if version != VERSION:
        raise WireError(f"the other side uses message version {version}, but this side uses {VERSION}")


def _lengths(prefix: bytes) -> tuple[int, int]:
    # The mark first: anything that prints to the pipe shows up here.
    if len(prefix) < PREFIX.size or not prefix.startswith(MARK):
        raise WireError(_garbage(prefix))
    _, version, header_bytes, body_bytes = PREFIX.unpack(prefix)
    _check_version(version)
    # Before anything of that size is allocated.
    _check_lengths(header_bytes, body_bytes)
    return header_bytes, body_bytes


def _check_lengths(header_bytes: int, body_bytes: int) -> None:
    for part, size, limit in (("header", header_bytes, MAX_HEADER_BYTES), ("arrays", body_bytes, MAX_BODY_BYTES)):
        if size > limit:
            raise WireError(f"the {part} of a message would take {size} bytes; at most {limit} are allowed")


def _unpack(header: bytes, body: bytes | memoryview) -> Message:
    try:
        # NaN and Infinity are no JSON, though Python's reader takes them.
        parsed = json.loads(header.decode(), parse_constant=_refuse_constant)
        fields, layout = dict(parsed["fields"]), [(str(n), str(d), tuple(map(int, s))) for n, d, s in parsed["arrays"]]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the header of a message cannot be read: {error!r:.200}") from None
    arrays, start = {}, 0
    for name, dtype, shape in layout:
        # In Python's integers, which do not overflow: a product of sizes in NumPy's could come out small.
        end = start + _array_bytes(name, dtype, shape)
        if end > len(body):
            raise WireError(f"array {name!r} {shape} needs {end - start} bytes, but {len(body) - start} arrived")
        arrays[name] = _array(body[start:end], dtype, shape)
        start = end
    # Bytes that no array claims mean that both sides disagree on the layout.
    if start != len(body):
        raise WireError(f"{len(body) - start} bytes of a message belong to no array")
    return Message(fields, arrays)


def _array_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPES or len(shape) > MAX_AXES or not all(0 <= size <= MAX_BODY_BYTES for size in shape):
        raise WireError(f"array {name[:80]!r} is announced with dtype {dtype[:80]} and shape {shape[:9]}")
    # The count of bytes in the dtype's name, such as 4 in "<f4".
    count = int(dtype[2:])
    for size in shape:
        count *= size
    return count


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _array(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    import numpy as np

    try:
        # A copy, since the view is read-only and keeps the whole message alive.
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except ValueError as error:
        raise WireError(f"an array of shape {shape} cannot be created: {error}") from None


def _garbage(data: bytes) -> str:
    return (
        f"expected a message, which begins with {MARK!r}, but received {data[:40]!r}; something else writes to "
        "this pipe"
    )


def encode(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Convert a value to JSON and arrays."""
    encoder = _TreeWriter()
    return encoder.tree(value), encoder.arrays


def decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Restore the value that was passed to `encode`."""
    return _TreeReader(arrays).value(tree)


class _TreeWriter:
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
        # Pairs, since keys of JSON objects are text and those of Python's dicts need not be.
        if kind in (dict, OrderedDict):
            tag = "dict" if kind is dict else "OrderedDict"
            return {tag: [[self.tree(key), self.tree(entry)] for key, entry in value.items()]}
        if kind in COLLECTIONS:
            return {COLLECTIONS[kind]: [self.tree(entry) for entry in value]}
        if kind in TEXT_FORMS:
            return {kind.__name__: TEXT_FORMS[kind](value)}
        return {"int": hex(value)} if kind is int else self._bulk(value)

    def _bulk(self, value: Any) -> dict[str, Any]:
        # By identity, which is safe here: the caller holds all values until the message is made.
        known = self._known.get(id(value))  # an image that G samples share is sent once
        if known is None:
            known = self._known[id(value)] = self._new_bulk(value)
        return known

    def _new_bulk(self, value: Any) -> dict[str, Any]:
        # Here and not at the top: most values need no NumPy.
        import numpy as np

        kind = type(value)
        if kind is np.ndarray and value.dtype.str in DTYPES:
            return {"array": self._add(value)}
        if kind is bytes:
            return {"bytes": self._add(np.frombuffer(value, np.uint8))}
        if kind is complex:
            return {"complex": [self.tree(value.real), self.tree(value.imag)]}
        if (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in OTHER_DTYPES:
            array = np.asarray(value)
            tag = "ndarray" if kind is np.ndarray else "scalar"
            # As bytes with their dtype: text, dates and complex numbers have no place in the six dtypes.
            return {tag: [self._add(np.frombuffer(array.tobytes(), np.uint8)), array.dtype.str, list(array.shape)]}
        # By name, so that a worker without PIL can load this file.
        if kind.__module__.partition(".")[0] == "PIL" and hasattr(value, "tobytes"):
            data = self._add(np.frombuffer(value.tobytes(), np.uint8))
            # Pixels and palette, not a file format: what comes back is exactly what was sent.
            return {"image": [data, value.mode, list(value.size), value.getpalette() if value.mode == "P" else None]}
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be sent to a worker process; only text, numbers, "
            "lists, dicts, dates, NumPy arrays and PIL images are supported. Convert it, or run the function in "
            "this process"
        )

    def _add(self, array: np.ndarray) -> str:
        # Numbers as names: they only have to be unique in one message.
        name = str(len(self.arrays))
        self.arrays[name] = array
        return name


class _TreeReader:
    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._objects: dict[str, Any] = {}

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(entry) for entry in tree]
        if not isinstance(tree, dict):
            return tree
        # Exactly one entry, by construction; anything else is no value of `encode`.
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
        # Bulk values name their array, or begin with its name.
        name = content if isinstance(content, str) else content[0]
        # Shared objects stay shared: an image sent once comes back as one object.
        if name not in self._objects:
            self._objects[name] = _from_bytes(tag, self._arrays[name], content)
        return self._objects[name]


def _from_bytes(tag: str, data: np.ndarray, content: Any) -> Any:
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
    # [()] turns a 0-d array into a scalar.
    return array if tag == "ndarray" else array[()]
