import numpy as np
import pytest
from PIL import Image

from mmrl.agents.environments.environment import (
    MalformedError,
    Observation,
    StepOutcome,
    as_observation,
    as_outcome,
    as_start,
)
from mmrl.hub.foreign import MAX_SIDE, as_image

RGB = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize(
    ("value", "text", "count"),
    [
        (Observation("t", (RGB,)), "t", 1),
        ("t", "t", 0),
        # half of a surrogate pair, as of a text that was cut inside an emoji
        ("a \ud83d b \udcff \U0001f600", "a \ufffd b \ufffd \U0001f600", 0),
        ({"text": "t"}, "t", 0),
        ({"image": RGB}, "", 1),
        ({"image": RGB, "images": [RGB, RGB], "text": "t"}, "t", 3),
        ({"images": np.stack([RGB, RGB])}, "", 2),
        (RGB, "", 1),
        ([RGB, RGB], "", 2),
        (Image.fromarray(RGB), "", 1),
    ],
)
def test_what_users_return_becomes_an_observation(value, text, count):
    found = as_observation(value)
    assert (found.text, len(found.images)) == (text, count)
    for image in found.images:
        np.testing.assert_array_equal(image, RGB)
        assert not np.shares_memory(image, RGB), "an environment may draw into its picture again"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"screen": RGB}, "is a dict with screen; its entries may be image, images, text"),
        ({}, "is a dict with no entries"),
        ({"text": 3}, "text is a int; expected a str"),
        ({"images": "a"}, "images is a str; expected a list"),
        ({"image": None}, "an image is a NoneType"),
        (RGB.astype(np.float32), "has type float32; expected uint8, 0 to 255; .* multiply by 255"),
        (RGB.astype(np.int64), "type int64; expected uint8, 0 to 255$"),
        (RGB.transpose(2, 0, 1)[:, :, :2], r"\(3, 2, 2\); expected \(H, W, 3\); the channels come last"),
        (np.zeros((0, 4, 3), np.uint8), "of at least one pixel"),
        (np.zeros((1, MAX_SIDE + 1, 3), np.uint8), "of at most 16384 pixels per side"),
        (3, r"has the shape \(\)"),
        (None, "an image is a NoneType"),
        ([[1, 2], [3]], "cannot be converted to an array|has the shape"),
        ("x" * 200_001, "200001 characters"),
        ([RGB] * 65, "65 images; at most 64"),
    ],
)
def test_what_is_no_observation_is_explained(value, message):
    with pytest.raises(MalformedError, match=message):
        as_observation(value)


def test_images_of_all_kinds_become_rgb():
    grey = RGB[:, :, 0]
    np.testing.assert_array_equal(as_image(grey), np.stack([grey] * 3, 2))
    np.testing.assert_array_equal(as_image(grey[:, :, None]), np.stack([grey] * 3, 2))
    np.testing.assert_array_equal(as_image(Image.fromarray(grey)), np.stack([grey] * 3, 2))
    clear = np.dstack([RGB, np.zeros((2, 3), np.uint8)])
    np.testing.assert_array_equal(as_image(clear), np.full((2, 3, 3), 255))
    opaque = np.dstack([RGB, np.full((2, 3), 255, np.uint8)])
    np.testing.assert_array_equal(as_image(opaque), RGB)
    half = np.array([[[100, 0, 255, 51]]], np.uint8)  # a fifth of the colour over white
    np.testing.assert_array_equal(as_image(half), [[[224, 204, 255]]])
    np.testing.assert_array_equal(as_image(Image.fromarray(half)), [[[224, 204, 255]]])


def test_reset_may_return_information_too():
    assert as_start("t") == (Observation("t"), {})
    assert as_start(("t", {"a": 1})) == (Observation("t"), {"a": 1})
    for value in (("t", 1), ("t",), ("a", "b", {})):
        with pytest.raises(MalformedError, match="reset returned a tuple of str"):
            as_start(value)


@pytest.mark.parametrize(
    ("value", "reward", "terminated", "truncated", "info"),
    [
        (("t", 1, True), 1.0, True, False, {}),
        (("t", np.float32(0.5), np.bool_(False)), 0.5, False, False, {}),
        (("t", np.array([2.0]), False, {"a": 1}), 2.0, False, False, {"a": 1}),
        (("t", 0.0, False, True, {"a": 1}), 0.0, False, True, {"a": 1}),
        (("t", 0.0, False, {"action_error": None, "a": None}), 0.0, False, False, {"a": None}),
        (("t", 0.0, False, {"action_error": "far off"}), 0.0, False, False, {"action_error": "far off"}),
        (("t", 0.0, True, {"success": np.bool_(True)}), 0.0, True, False, {"success": True}),
        (("t", 0.0, True, {"success": 1}), 0.0, True, False, {"success": True}),
        (("t", 0.0, True, {"success": np.array(True)}), 0.0, True, False, {"success": True}),
        (("t", 0.0, True, {"success": np.float32(0)}), 0.0, True, False, {"success": False}),
        (("t", 0.0, True, {"success": None, "action_error": ""}), 0.0, True, False, {}),
        (("t", 0.0, True, {"action_error": False}), 0.0, True, False, {}),
        (("t", 0.0, True, {"TimeLimit.truncated": True}), 0.0, False, True, {"TimeLimit.truncated": True}),
        (("t", 0.0, True, {"TimeLimit.truncated": False}), 0.0, True, False, {"TimeLimit.truncated": False}),
        ((Observation("t"), True, True), 1.0, True, False, {}),
        (StepOutcome(Observation("t"), 1.0, False, True), 1.0, False, True, {}),
    ],
)
def test_what_step_returns_becomes_an_outcome(value, reward, terminated, truncated, info):
    found = as_outcome(value)
    assert found == StepOutcome(Observation("t"), reward, terminated, truncated, info)
    assert type(found.info.get("success", True)) is bool


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("t", "step returned a str; expected"),
        (None, "step returned a NoneType"),
        (("t", 1.0), "a tuple of str, float"),
        (("t", 1.0, False, False, {}, 1), "a tuple of str, float, bool, bool, dict, int"),
        (("t", float("nan"), False), "the reward is nan"),
        (("t", float("-inf"), False), "the reward is -inf"),
        (("t", "1", "no"), "ended is 'no'|the reward is '1'"),
        (("t", None, False), "the reward is None|reward is nan"),
        (("t", [1.0, 2.0], False), r"the reward is \[1.0, 2.0\]; expected a number"),
        (("t", 10**400, False), "the reward is 1000"),
        (("t", False, 1.0), "ended is 1.0; expected True or False"),
        (("t", 1.0, 1), "ended is 1; expected"),
        (("t", 1.0, False, True), "the last of 4 values must be a dict"),
        (("t", 1.0, False, 0, {}), "truncated is 0"),
        (("t", 1.0, False, False, None), "must be a dict"),
        (("t", 1.0, True, {"success": "no"}), r"info\['success'\] is 'no'; expected True or False"),
        (("t", 1.0, True, {"success": 0.5}), r"info\['success'\] is 0.5; expected True or False"),
        (("t", 1.0, True, {"success": np.array([True, False])}), r"info\['success'\] is array"),
    ],
)
def test_what_is_no_outcome_is_explained(value, message):
    with pytest.raises(MalformedError, match=message):
        as_outcome(value)
