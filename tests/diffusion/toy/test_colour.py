import numpy as np
import pytest

from diffusion.toy.shapes import COLOURS, all_scenes, parse_caption, render_dataset
from diffusion.toy.shapes.colour import caption_colour, caption_position


def flat(rgb, size=16):
    return np.full((size, size, 3), rgb, dtype=np.uint8)


def test_colour_is_one_less_the_mean_distance():
    half = flat(COLOURS["red"])
    half[:8] = (0, 0, 0)
    black = 1 - np.linalg.norm(COLOURS["red"]) / (255 * np.sqrt(3))
    images = [flat(COLOURS["red"]), flat((0, 0, 0)), half]
    assert caption_colour(["a red dog"] * 3, images) == pytest.approx([1.0, black, (1 + black) / 2], abs=1e-6)


def test_colour_uses_the_nearest_of_several_and_the_metadata_first():
    half = flat(COLOURS["red"])
    half[:8] = COLOURS["blue"]
    metadata = [parse_caption("a red circle and a blue square").metadata]
    assert caption_colour(["a green dog"], [half], metadata=metadata) == pytest.approx([1.0])
    assert caption_colour(["red"], [half])[0] < 0.95
    assert caption_colour(["a dog", "reddish"], [half, half]) == [None, None]


def test_colour_grows_steadily_towards_the_caption():
    start, end = np.zeros(3), np.asarray(COLOURS["green"])
    images = [flat((start + (end - start) * share).astype(np.uint8)) for share in np.linspace(0, 1, 8)]
    values = caption_colour(["green"] * 8, images)
    assert (np.diff(values) > 0).all()


def two_squares(red_x, blue_x, size=32):
    image = flat((240, 240, 240), size)
    image[12:18, red_x : red_x + 6] = COLOURS["red"]
    image[12:18, blue_x : blue_x + 6] = COLOURS["blue"]
    return image


def test_position_is_the_offset_of_the_centres():
    prompts = ["a red square left of a blue circle", "a red square right of a blue circle"]
    left, right = caption_position(prompts, [two_squares(2, 22)] * 2)
    assert left == pytest.approx(20 / 32, abs=0.04)
    assert right == pytest.approx(-left)
    (across,) = caption_position(["a red square above a blue circle"], [two_squares(2, 22)])
    assert across == pytest.approx(0.0, abs=1e-6)


def test_position_grows_with_every_pixel():
    images = [two_squares(10 - step, 16 + step) for step in range(8)]
    values = caption_position(["a red square left of a blue circle"] * 8, images)
    assert (np.diff(values) > 0.02).all()


def test_position_of_renders_has_the_sign_of_the_relation():
    scenes = all_scenes(["position"])
    images, index = render_dataset(scenes, 96, seed=2)
    metadata = [scenes[scene].metadata for scene in index]
    assert min(caption_position(["?"] * 96, list(images), metadata=metadata)) > 0.1


def test_position_does_not_apply_without_a_relation_and_is_zero_without_objects():
    blank = flat((240, 240, 240))
    assert caption_position(["a red circle", "two red circles"], [blank] * 2) == [None, None]
    assert caption_position(["a red circle above a blue square"], [blank]) == pytest.approx([0.0], abs=1e-6)
