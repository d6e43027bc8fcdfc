"""Images of environments and files: every declared form becomes the same RGB, and nothing is cast unseen."""

import numpy as np
import pytest
from PIL import Image

from mmrl.hub.foreign import MalformedError, as_image, image_form, to_rgb

spaces = pytest.importorskip("gymnasium", reason="needs pip install 'mmrl-suite[sim]'").spaces
RGB = np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8)
SCALED = (RGB / 255).astype(np.float32)


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        (spaces.Box(0, 255, (4, 5, 3), np.uint8), RGB, RGB),
        (spaces.Box(0, 255, (3, 4, 5), np.uint8), RGB.transpose(2, 0, 1), RGB),
        (spaces.Box(0, 1, (4, 5, 3), np.float32), SCALED, RGB),
        (spaces.Box(0, 1, (3, 4, 5), np.float64), SCALED.transpose(2, 0, 1), RGB),
        (spaces.Box(0, 255, (4, 5, 3), np.float32), RGB.astype(np.float32), RGB),
        (spaces.Box(0, 255, (1, 4, 5), np.uint8), RGB[None, ..., 0], np.stack([RGB[..., 0]] * 3, 2)),
        (spaces.Box(0, 255, (4, 5), np.uint8), RGB[..., 0], np.stack([RGB[..., 0]] * 3, 2)),
        (spaces.Box(0, 1, (4, 5), np.uint8), RGB[..., 0] // 128, np.stack([RGB[..., 0] // 128 * 255] * 3, 2)),
    ],
)
def test_each_declared_form_becomes_the_same_rgb(space, value, expected):
    np.testing.assert_array_equal(as_image(value, image_form(space)), expected)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 9, (4, 5), np.float32),  # depth
        spaces.Box(0, 1, (4, 5, 1), np.float32),
        spaces.Box(-1, 1, (4, 5, 3), np.float32),
        spaces.Box(0, 255, (4, 84, 84), np.uint8),  # four frames
        spaces.Box(0, 65535, (4, 5, 3), np.uint16),
        spaces.Discrete(3),
        spaces.Dict({}),
    ],
)
def test_other_spaces_hold_no_image(space):
    assert image_form(space) is None


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (
            None,
            SCALED,
            r"an image of shape \(4, 5, 3\) has type float32; expected uint8, 0 to 255; .* multiply by 255",
        ),
        (None, RGB.astype(np.int64) + 50, r"\(4, 5, 3\) has type int64; expected uint8, 0 to 255$"),
        (None, RGB > 7, "has type bool; expected uint8"),
        (None, RGB.transpose(2, 0, 1), r"the shape \(3, 4, 5\); .* the channels come last"),
        (spaces.Box(0, 1, (4, 5, 3), np.float32), SCALED * 255, "values from .* to 255; expected float32, 0 to 1"),
        (spaces.Box(0, 1, (4, 5, 3), np.float32), SCALED * np.nan, "values from nan to nan"),
        (spaces.Box(0, 1, (4, 5, 3), np.float32), RGB, r"has type uint8; expected float32, 0 to 1"),
    ],
)
def test_a_value_of_another_form_is_named_and_not_cast(space, value, message):
    with pytest.raises(MalformedError, match=message):
        as_image(value, None if space is None else image_form(space))


@pytest.mark.parametrize("mode", ["I;16", "I"])
def test_greys_of_16_bits_are_scaled(mode):
    greys = np.arange(256, dtype=np.uint32).reshape(16, 16)
    image = Image.fromarray((greys * 257).astype(np.uint16 if mode == "I;16" else np.int32))
    assert image.mode == mode
    np.testing.assert_array_equal(as_image(image)[..., 0], greys)


@pytest.mark.parametrize("pixels", [np.full((2, 2), 0.5, np.float32), np.full((2, 2), 70_000, np.int32)])
def test_pixels_without_a_known_range_are_refused(pixels):
    with pytest.raises(MalformedError, match=r"an image has mode [FI]: .* 8 "):
        as_image(Image.fromarray(pixels))


def test_transparency_is_white_in_files_and_arrays():
    clear = np.dstack([RGB, np.random.default_rng(1).integers(0, 256, (4, 5)).astype(np.uint8)])
    np.testing.assert_array_equal(np.asarray(to_rgb(Image.fromarray(clear))), as_image(clear))
