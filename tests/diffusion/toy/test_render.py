import numpy as np
import pytest

from diffusion.toy.shapes import COLOURS, KINDS, all_scenes, detect, parse_caption, render_dataset, render_scene
from mmrl.errors import UserError


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("size", [32, 40, 64])
def test_renders_show_each_object_apart(kind, size):
    scenes = all_scenes([kind])[::5]
    images, index = render_dataset(scenes, 40, size=size, seed=1)
    assert images.shape == (40, size, size, 3)
    assert images.dtype == np.uint8
    for image, scene in zip(images, index, strict=True):
        seen = sorted((item.colour, item.shape) for item in detect(image))
        assert seen == sorted((item.colour, item.shape) for item in scenes[scene].objects)


def test_background_is_light_grey_and_objects_have_their_colour():
    rng = np.random.default_rng(0)
    for colour, rgb in COLOURS.items():
        image = render_scene(parse_caption(f"a {colour} square"), rng=rng)
        (square,) = detect(image)
        x0, y0, x1, y1 = square.box
        inside = image[y0 + 1 : y1 - 1, x0 + 1 : x1 - 1].reshape(-1, 3)
        assert np.abs(inside.mean(0) - rgb).max() <= 13
        outside = np.ones((32, 32), dtype=bool)
        outside[y0 - 1 : y1 + 1, x0 - 1 : x1 + 1] = False
        assert image[outside].min() > 215


def test_relations_hold_by_a_clear_margin():
    rng = np.random.default_rng(2)
    for _ in range(20):
        one, other = sorted(
            detect(render_scene(parse_caption("a red circle above a blue square"), rng=rng)),
            key=lambda item: item.colour == "blue",
        )
        assert one.colour == "red"
        across = abs(one.box[0] + one.box[2] - other.box[0] - other.box[2])
        assert other.box[1] + other.box[3] - one.box[1] - one.box[3] > across - 2


def test_images_depend_on_the_seed_and_not_on_their_number():
    scenes = all_scenes(["count"])
    few, index = render_dataset(scenes, 30, seed=5)
    many, _ = render_dataset(scenes, 40, seed=5)
    assert np.array_equal(few, many[:30])
    assert index.tolist() == [*range(24), *range(6)]
    assert not np.array_equal(few[0], few[24])
    assert not np.array_equal(render_dataset(scenes, 1, seed=6)[0], few[:1])


def test_sizes_and_positions_vary():
    images, _ = render_dataset(all_scenes(["single"])[:1], 40, seed=0)
    boxes = np.asarray([detect(image)[0].box for image in images])
    assert np.ptp(boxes[:, 2] - boxes[:, 0]) >= 5
    assert np.ptp(boxes[:, 0]) >= 8
    assert np.ptp(boxes[:, 1]) >= 8


def test_what_cannot_be_drawn_is_named():
    with pytest.raises(UserError, match="size=24 must be at least 32"):
        render_scene(all_scenes()[0], size=24, rng=np.random.default_rng(0))
    with pytest.raises(UserError, match="no scenes"):
        render_dataset([], 4)
