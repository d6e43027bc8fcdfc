import json
import math
from collections import OrderedDict

import numpy as np
import pytest

from mmrl.workers import values
from mmrl.workers.values import decode, encode


def sent(value):
    """The value as a worker gets it: the tree goes through JSON."""
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
def test_plain_values_come_back_equal_and_of_the_same_types_without_a_pickle(value, monkeypatch):
    monkeypatch.setattr(values.pickle, "dumps", None)
    found = sent(value)
    assert found == value
    assert repr(found) == repr(value)


def test_floats_that_are_not_finite():
    nan, inf, minus = sent([math.nan, math.inf, -math.inf])
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int32", "int64", "float32", "float64"])
def test_arrays_are_sent_as_they_are(dtype, monkeypatch):
    monkeypatch.setattr(values.pickle, "dumps", None)
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
        1 + 2j,
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


def test_what_cannot_be_pickled_says_so():
    with pytest.raises(Exception, match="lambda"):
        encode([1, lambda: None])
