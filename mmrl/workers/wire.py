"""Messages between a pool and its workers: JSON and arrays, nothing that could run code.

A message is a prefix of fixed size (mark, version, lengths), a JSON object and the raw bytes of some arrays; a request
or answer that says no more than its number is a prefix alone, because a step of a light environment takes less time
than reading JSON. A broken or hostile worker can at worst send wrong numbers. Both ends load this file, the worker by
its path in whatever interpreter its service needs: it runs on Python 3.8 and imports numpy, 1 or 2, only when a message
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
"""Begins a message without body and arrays: a place in `SHORT_KINDS` and the number stand where lengths stand."""
SHORT_KINDS = ("request", "result")
VERSION = 3
MAX_HEADER_BYTES = 256 << 20
MAX_BODY_BYTES = 4 << 30
MAX_AXES = 16
PREFIX = struct.Struct("<4sHIQ")
DTYPES = ("|b1", "|u1", "<i4", "<i8", "<f4", "<f8")
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


class WireError(ValueError):
    """The bytes in a pipe are no message of this version, or a message cannot be sent."""


class Message(NamedTuple):
    """One message."""

    fields: dict[str, Any]
    """A JSON object."""
    arrays: dict[str, np.ndarray]
    """Arrays by name; they own their memory."""


def pack(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> bytes:
    """Make the bytes of a message: JSON fields with finite floats, and arrays of six dtypes in any byte order."""
    # A step of a vector environment: its numbers are in shared memory, so the message has nothing to say.
    if not arrays and fields.keys() == {"kind", "id", "body"} and not fields["body"] and fields["kind"] in SHORT_KINDS:
        return PREFIX.pack(SHORT_MARK, VERSION, SHORT_KINDS.index(fields["kind"]), fields["id"])
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
    """Wait for a message on a blocking binary stream; None where the stream ended between two of them."""
    prefix = stream.read(PREFIX.size)
    if not prefix:
        return None
    if prefix.startswith(SHORT_MARK) and len(prefix) == PREFIX.size:
        return _short(prefix)
    header_bytes, body_bytes = _lengths(prefix)
    rest = stream.read(header_bytes + body_bytes)
    if len(rest) < header_bytes + body_bytes:
        raise WireError(f"the stream ended after {len(rest)} of {header_bytes + body_bytes} bytes of a message")
    return _unpack(rest[:header_bytes], memoryview(rest)[header_bytes:])


class MessageDecoder:
    """Collects bytes as they arrive and gives out the messages that are complete."""

    def __init__(self, max_bytes: int = MAX_HEADER_BYTES + MAX_BODY_BYTES) -> None:
        self._held, self._max_bytes = bytearray(), max_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """Add the bytes of one read; to be iterated to its end."""
        if not self._held and len(data) == PREFIX.size and data.startswith(SHORT_MARK):
            yield _short(data)
            return
        self._held += data
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
            if len(self._held) < end:
                break
            header, body = bytes(self._held[PREFIX.size : start]), bytes(self._held[start:end])
            del self._held[:end]
            yield _unpack(header, body)
        # The first bytes alone tell garbage from a message that is still incomplete.
        first = bytes(self._held[: len(MARK)])
        if not (MARK.startswith(first) or SHORT_MARK.startswith(first)):
            raise WireError(_garbage(bytes(self._held)))


def error_text(error: BaseException) -> str:
    """Text of an exception, which may raise another one when it is asked for it."""
    try:
        return str(error)
    except BaseException as other:
        return f"(its text cannot be had: __str__ raised {type(other).__name__})"


def describe_error(error: BaseException) -> dict[str, Any]:
    """JSON of an exception of a service, of which the pool makes a `WorkerFailure`; called where it is handled."""
    try:
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
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    if little.dtype.str not in DTYPES:
        raise WireError(f"array {name!r} has the dtype {values.dtype}; allowed: {', '.join(DTYPES)}")
    return little


def _short(prefix: bytes) -> Message:
    _, version, kind, number = PREFIX.unpack(prefix)
    _check_version(version)
    if kind >= len(SHORT_KINDS):
        raise WireError(f"a short message has the kind {kind}; there are {len(SHORT_KINDS)}")
    return Message({"kind": SHORT_KINDS[kind], "id": number, "body": {}}, {})


def _check_version(version: int) -> None:
    if version != VERSION:
        raise WireError(f"the other side uses version {version} of the messages, this one uses {VERSION}")


def _lengths(prefix: bytes) -> tuple[int, int]:
    if len(prefix) < PREFIX.size or not prefix.startswith(MARK):
        raise WireError(_garbage(prefix))
    _, version, header_bytes, body_bytes = PREFIX.unpack(prefix)
    _check_version(version)
    _check_lengths(header_bytes, body_bytes)
    return header_bytes, body_bytes


def _check_lengths(header_bytes: int, body_bytes: int) -> None:
    for part, size, limit in (("header", header_bytes, MAX_HEADER_BYTES), ("arrays", body_bytes, MAX_BODY_BYTES)):
        if size > limit:
            raise WireError(f"the {part} of a message would take {size} bytes; at most {limit} are allowed")


def _unpack(header: bytes, body: bytes | memoryview) -> Message:
    try:
        parsed = json.loads(header.decode(), parse_constant=_refuse_constant)
        fields, layout = dict(parsed["fields"]), [(str(n), str(d), tuple(map(int, s))) for n, d, s in parsed["arrays"]]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"the header of a message cannot be read: {error!r:.200}") from None
    arrays, start = {}, 0
    for name, dtype, shape in layout:
        # In Python's integers, which do not overflow: a product of sizes in NumPy's could come out small.
        end = start + _array_bytes(name, dtype, shape)
        if end > len(body):
            raise WireError(f"array {name!r} {shape} needs {end - start} bytes; {len(body) - start} came")
        arrays[name] = _array(body[start:end], dtype, shape)
        start = end
    if start != len(body):
        raise WireError(f"{len(body) - start} bytes of a message belong to no array")
    return Message(fields, arrays)


def _array_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    if dtype not in DTYPES or len(shape) > MAX_AXES or not all(0 <= size <= MAX_BODY_BYTES for size in shape):
        raise WireError(f"array {name[:80]!r} is announced with the dtype {dtype[:80]} and the shape {shape[:9]}")
    count = int(dtype[2:])
    for size in shape:
        count *= size
    return count


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _array(data: bytes | memoryview, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    import numpy as np

    try:
        # A copy, since the view is read-only and keeps the whole message alive.
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except ValueError as error:
        raise WireError(f"an array of the shape {shape} cannot be made: {error}") from None


def _garbage(data: bytes) -> str:
    return f"expected a message, which begins with {MARK!r}, but {data[:40]!r} came; something else writes to this pipe"


def encode(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Turn a value into JSON and arrays."""
    encoder = _TreeWriter()
    return encoder.tree(value), encoder.arrays


def decode(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Build the value that was given to `encode`."""
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


class _TreeReader:
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
    return array if tag == "ndarray" else array[()]
