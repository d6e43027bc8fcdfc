"""Messages between a pool and its workers: JSON and arrays, nothing that could run code.

A message is a prefix of fixed size (mark, version, lengths), a JSON object and the raw bytes of some arrays; a request
or answer that says no more than its number is a prefix alone, because a step of a light environment takes less time
than reading JSON. A broken or hostile worker can at worst send wrong numbers. Both ends load this file, the worker by
its path in whatever interpreter its service needs: it runs on Python 3.8 and imports numpy, 1 or 2, only when a message
has arrays.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    if not arrays and fields.keys() == {"kind", "id", "body"} and not fields["body"] and fields["kind"] in SHORT_KINDS:
        return PREFIX.pack(SHORT_MARK, VERSION, SHORT_KINDS.index(fields["kind"]), fields["id"])
    plain = {name: _little_endian(name, array) for name, array in (arrays or {}).items()}
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in plain.items()]
    try:
        header = json.dumps({"fields": dict(fields), "arrays": layout}, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WireError(f"fields of a message must be JSON: {error}") from None
    body = b"".join(array.tobytes() for array in plain.values())
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


class Decoder:
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
        return np.frombuffer(data, dtype).reshape(shape).copy()
    except ValueError as error:
        raise WireError(f"an array of the shape {shape} cannot be made: {error}") from None


def _garbage(data: bytes) -> str:
    return f"expected a message, which begins with {MARK!r}, but {data[:40]!r} came; something else writes to this pipe"
