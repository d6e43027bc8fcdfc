import io
import json
import struct

import numpy as np
import pytest

from mmrl.workers import wire


def sample() -> tuple[dict, dict]:
    rng = np.random.default_rng(0)
    fields = {"kind": "result", "text": "ä \n", "list": [1, None, True], "nested": {"x": 0.1}}
    arrays = {
        "f8": rng.normal(size=(2, 3)),
        "f4": rng.normal(size=(4,)).astype(np.float32),
        "u1": rng.integers(0, 256, (3, 2, 2, 3), dtype=np.uint8),
        "i8": np.array(-7),
        "b1": np.array([True, False]),
        "none": np.zeros((0, 5), np.float32),
    }
    return fields, arrays


def assert_same(message: wire.Message, fields: dict, arrays: dict) -> None:
    assert message.fields == fields
    assert list(message.arrays) == list(arrays)
    for name, array in arrays.items():
        assert message.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(message.arrays[name], array)


def test_a_message_is_received_as_it_was_sent():
    fields, arrays = sample()
    stream = io.BytesIO(wire.pack(fields, arrays) + wire.pack({"kind": "close"}))
    assert_same(wire.read(stream), fields, arrays)
    assert_same(wire.read(stream), {"kind": "close"}, {})
    assert wire.read(stream) is None


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_it_does_not_matter_where_the_bytes_are_cut(size):
    fields, arrays = sample()
    data = wire.pack(fields, arrays) * 3
    decoder, messages = wire.MessageDecoder(), []
    for start in range(0, len(data), size):
        messages += decoder.feed(data[start : start + size])
    assert len(messages) == 3
    for message in messages:
        assert_same(message, fields, arrays)


def test_numbers_that_are_not_finite_travel_in_arrays_only():
    message = wire.read(io.BytesIO(wire.pack({}, {"x": np.array([np.nan, np.inf])})))
    assert np.isnan(message.arrays["x"][0])
    assert np.isinf(message.arrays["x"][1])
    with pytest.raises(wire.WireError, match="must be JSON"):
        wire.pack({"x": float("nan")})


def test_views_and_foreign_byte_orders_keep_their_values():
    base = np.arange(12.0).reshape(3, 4)
    message = wire.read(io.BytesIO(wire.pack({}, {"t": base.T[::2], "big": base.astype(">f4")})))
    np.testing.assert_array_equal(message.arrays["t"], base.T[::2])
    np.testing.assert_array_equal(message.arrays["big"], base)


def test_the_arrays_belong_to_the_receiver():
    (message,) = wire.MessageDecoder().feed(wire.pack({}, {"x": np.zeros(3)}))
    message.arrays["x"][0] = 1.0
    assert message.arrays["x"].flags.owndata


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.zeros(2, np.complex64)])
def test_only_plain_numbers_travel(array):
    with pytest.raises(wire.WireError, match="array 'x' has dtype"):
        wire.pack({}, {"x": array})


def test_prints_in_the_pipe_are_named():
    for data in (b"Loading assets, please wait ...", b"M nothing"):
        with pytest.raises(wire.WireError, match="something else writes to this pipe"):
            list(wire.MessageDecoder().feed(data))
        with pytest.raises(wire.WireError, match="something else writes to this pipe"):
            wire.read(io.BytesIO(data))


def test_garbage_is_found_before_a_whole_prefix_has_come():
    assert list(wire.MessageDecoder().feed(wire.MARK[:2])) == []
    with pytest.raises(wire.WireError, match="b'MRLX'"):
        list(wire.MessageDecoder().feed(b"MRLX"))


def test_messages_in_front_of_garbage_are_not_lost():
    fields, arrays = sample()
    messages = wire.MessageDecoder().feed(wire.pack(fields, arrays) + b"hello")
    assert_same(next(messages), fields, arrays)
    with pytest.raises(wire.WireError, match="hello"):
        next(messages)


def test_a_stream_that_ends_within_a_message_is_an_error():
    data = wire.pack(*sample())
    with pytest.raises(wire.WireError, match="the stream ended after"):
        wire.read(io.BytesIO(data[:-1]))


def prefixed(header: bytes, body: bytes = b"", version: int = wire.VERSION, claim: int | None = None) -> bytes:
    return struct.pack("<4sHIQ", wire.MARK, version, len(header), len(body) if claim is None else claim) + header + body


def announce(*arrays) -> bytes:
    return json.dumps({"fields": {}, "arrays": list(arrays)}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (prefixed(b"{}", version=9), f"version 9, .* uses {wire.VERSION}"),
        (prefixed(b"{}", claim=wire.MAX_BODY_BYTES + 1), f"at most {wire.MAX_BODY_BYTES}"),
        (prefixed(b"{}"), "cannot be read"),
        (prefixed(b"\xff"), "cannot be read"),
        (prefixed(announce(["x", "|O8", [1]]), bytes(8)), "dtype |O8"),
        (prefixed(announce(["x", "<f4", [-1]]), bytes(4)), "and shape"),
        (prefixed(announce(["x", "<f4", [2]]), bytes(4)), "needs 8 bytes, but 4 arrived"),
        (prefixed(announce(["x", "<f4", [1]]), bytes(8)), "4 bytes of a message belong to no array"),
        (prefixed(announce(["x", "<f4", [2**40, 2**40]]), bytes(8)), "is announced with"),
        (prefixed(announce(["x", "<f4", [2**20, 2**20]]), bytes(8)), "needs"),
        (prefixed(announce(["x", "<f4", [1] * 100]), bytes(4)), "is announced with"),
        (prefixed(announce(["x", "<f4", [0] + [2**32] * 4])), "cannot be created"),
        (prefixed(b'{"fields": {}, "arrays": [["x", "<f4", [1e999]]]}', bytes(4)), "cannot be read"),
        (prefixed(b'{"fields": {"x": NaN}, "arrays": []}'), "cannot be read"),
        (prefixed(b'{"fields": {"x": ' + b"[" * 200_000), "cannot be read"),
    ],
)
def test_a_false_header_is_refused(data, reason):
    with pytest.raises(wire.WireError, match=reason.replace("|", r"\|")):
        wire.read(io.BytesIO(data))
    with pytest.raises(wire.WireError, match=reason.replace("|", r"\|")):
        list(wire.MessageDecoder().feed(data))


def test_a_message_beyond_the_receivers_limit_is_refused_before_it_has_come():
    data = wire.pack({}, {"x": np.zeros(1000, np.uint8)})
    assert len(list(wire.MessageDecoder(len(data)).feed(data))) == 1
    with pytest.raises(wire.WireError, match="at most 100 are allowed"):
        list(wire.MessageDecoder(100).feed(data[: wire.PREFIX.size]))


def test_a_message_too_large_is_not_sent(monkeypatch):
    monkeypatch.setattr(wire, "MAX_BODY_BYTES", 100)
    wire.pack({}, {"x": np.zeros(100, np.uint8)})
    with pytest.raises(wire.WireError, match="would take 101 bytes; at most 100"):
        wire.pack({}, {"x": np.zeros(101, np.uint8)})
