import datetime
import json
import math
from collections import OrderedDict
from decimal import Decimal

import numpy as np
import pytest

from mmrl.workers.wire import decode, encode


def sent(value):
    """The value as a worker receives it, after JSON."""
    tree, arrays = encode(value)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), arrays)


PLAIN = [
    None,
    True,
    0,
    -(2**63),
    0.1,
    5e-324,
    "ä \n\ud800",
    [1, [2.0, "3"], []],
    (1, (2,), ()),
    {"a": 1, 2: "b", (3, None): [4]},
    {"list": {"pickle": "0"}},  # keys that look like the encoding's own
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_received_equal_and_with_the_same_types(value):
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value)


def test_floats_that_are_not_finite():
    nan, inf, minus = sent([math.nan, math.inf, -math.inf])
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "float64"])
def test_arrays_are_sent_as_they_are(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    found = sent({"x": [array]})["x"][0]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.5),
        np.int64(3),
        np.array(["text"]),
        np.arange(3, dtype=np.float16),
        OrderedDict(a=1),
        {1, 2},
        b"bytes",
        10**5000,
        -(10**5000),
        1 + 2j,
        frozenset({1}),
        datetime.datetime(2024, 2, 29, 1, 2, 3, 4, datetime.UTC),
        datetime.date(2024, 2, 29),
        Decimal("0.10"),
        np.array(["2024-01-01"], "datetime64[D]"),
        np.str_("text"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_keeps_its_type_too(value):
    found = sent([value])[0]
    assert type(found) is type(value)
    assert getattr(found, "dtype", None) == getattr(value, "dtype", None)
    assert np.array_equal(found, value) if isinstance(value, np.ndarray) else found == value


def test_an_image_of_several_rows_is_sent_once():
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    tree, arrays = encode([image, image, {"again": image}])
    assert len(arrays) == 1
    first, second, third = decode(tree, arrays)
    assert first is second is third["again"]
    np.testing.assert_array_equal(np.asarray(first), np.asarray(image))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "I;16", "F"])
def test_images_keep_mode_size_and_pixels(mode):
    image_module = pytest.importorskip("PIL.Image")
    image = image_module.new(mode, (3, 2), 1)
    if mode == "P":
        image.putpalette([9, 8, 7, 6, 5, 4])
    found = sent([image])[0]
    assert (found.mode, found.size, found.tobytes()) == (mode, (3, 2), image.tobytes())
    assert found.getpalette() == image.getpalette()


class Bomb:
    """Would run code when unpickled, and does when pickled."""

    def __reduce__(self):
        raise AssertionError("it was pickled")


@pytest.mark.parametrize("value", [Bomb(), lambda: None, np.array([object()]), type], ids=lambda v: type(v).__name__)
def test_everything_else_is_refused_by_name_and_never_pickled(value):
    with pytest.raises(TypeError, match=r"a [\w.]+ cannot be sent to a worker process; only text, numbers"):
        encode([1, {"cell": value}])
