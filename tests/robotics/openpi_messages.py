"""Messages of openpi's client, written down by hand from its format, for a client that needs only websockets."""

import msgpack
import numpy as np


def encode(value):
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(type(value))


def decode(entries):
    if b"__ndarray__" in entries:
        return np.ndarray(entries[b"shape"], np.dtype(entries[b"dtype"]), entries[b"data"])
    return entries


def pack(message):
    return msgpack.packb(message, default=encode)


def unpack(data):
    return msgpack.unpackb(data, object_hook=decode)
