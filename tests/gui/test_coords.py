"""Coordinate spaces, the one resize, and boxes."""

import math

import numpy as np
import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.gui.grounding.coords import (
    Box,
    CoordinateSpace,
    Resize,
    clean_box,
    coordinate_space,
    from_original,
    pointing_families,
    smart_resize,
    to_original,
)
from mmrl.gui.grounding.samples import AnyOf, GroundingSample, Polygon, Refusal
from mmrl.hub.compat import ensure_torchvision

FACTORS = (28, 32)


def sides(rng, count):
    """Heights and widths from very narrow images to 8K screens."""
    return np.exp(rng.uniform(math.log(8), math.log(8192), (count, 2))).astype(int).tolist()


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("bounds", [(None, None), (3136, 1_003_520), (100_000, 12_845_056)])
def test_smart_resize_is_that_of_qwen_vl_utils(factor, bounds):
    if ensure_torchvision() == "absent":
        pytest.skip("qwen-vl-utils needs torchvision")
    theirs = pytest.importorskip("qwen_vl_utils.vision_process").smart_resize
    for height, width in [(42, 70), (1080, 1920), (10, 2000), *sides(np.random.default_rng(0), 3000)]:
        try:
            expected = theirs(height, width, factor, *bounds)
        except ValueError:
            with pytest.raises(ValueError, match="aspect ratio"):
                smart_resize(height, width, factor, *bounds)
            continue
        if min(expected) < 1:
            with pytest.raises(ValueError, match="would have a side below"):
                smart_resize(height, width, factor, *bounds)
        else:
            assert smart_resize(height, width, factor, *bounds) == expected


def test_smart_resize_on_the_numbers_of_the_original():
    assert smart_resize(42, 70, 28) == (56, 56)  # halves are rounded to even
    assert smart_resize(1080, 1920, 28, 3136, 12_845_056) == (1092, 1932)
    assert smart_resize(1080, 1920, 28, 3136, 1_003_520) == (728, 1316)
    assert smart_resize(10, 2000, 28) == (28, 1988)


@pytest.mark.parametrize("factor", FACTORS)
def test_a_resized_image_is_not_resized_again(factor):
    """Neither by this rule nor by transformers' copy of it, which differs for very narrow images."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_transformers

    bounds = (4 * factor**2, 1280 * factor**2)
    for height, width in sides(np.random.default_rng(1), 2000):
        if max(height, width) > 150 * min(height, width):
            continue
        once = smart_resize(height, width, factor, *bounds)
        if max(once) <= 200 * min(once):
            assert smart_resize(*once, factor, *bounds) == once
            assert tuple(of_transformers(*once, factor, *bounds)) == once


@pytest.mark.parametrize(("height", "width"), [(0, 10), (10, 0), (1, 201), (-5, 10)])
def test_images_without_a_usable_shape_are_refused(height, width):
    with pytest.raises(ValueError, match=f"{width} x {height}"):
        smart_resize(height, width, 28)


def test_reversed_pixel_bounds_are_refused():
    with pytest.raises(ValueError, match="min_pixels=200 is above max_pixels=100"):
        smart_resize(50, 50, 28, 200, 100)


def test_shrinking_first_is_that_of_the_public_evaluation():
    # 3840 x 2160: sqrt(5600 * 784 / 8294400) = 0.72755, so 2794 x 1571, then multiples of 28
    assert Resize(28, max_pixels=12_845_056, shrink_to=5600 * 784).model_wh((3840, 2160)) == (2800, 1568)
    assert Resize(28, max_pixels=12_845_056, shrink_to=5600 * 784).model_wh((1920, 1080)) == (1932, 1092)


@pytest.mark.parametrize("space", CoordinateSpace)
def test_points_are_recovered_from_every_space(space):
    rng = np.random.default_rng(2)
    for height, width in sides(rng, 500):
        if max(height, width) > 200 * min(height, width):
            continue
        original_wh, model_wh = (width, height), Resize(28).model_wh((width, height))
        point = tuple(rng.uniform(-0.5, 1.5, 2) * original_wh)  # outside stays outside
        found = to_original(from_original(point, space, original_wh, model_wh), space, original_wh, model_wh)
        assert found == pytest.approx(point, rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("space", CoordinateSpace)
def test_a_space_may_be_given_by_its_name(space):
    sizes = (1000, 800), (500, 400)
    assert to_original((0.5, 0.25), space.value, *sizes) == to_original((0.5, 0.25), space, *sizes)
    assert from_original((5, 2.5), space.value, *sizes) == from_original((5, 2.5), space, *sizes)


def test_a_name_that_is_no_space_is_refused():
    with pytest.raises(UserError, match="unknown coordinate space 'rel100'; available: abs_resized, rel1000"):
        to_original((1, 1), "rel100", (10, 10))


def test_both_axes_have_their_own_scale():
    original_wh, model_wh = (1920, 1080), (1932, 1092)
    assert from_original((1920, 1080), CoordinateSpace.ABS_RESIZED, original_wh, model_wh) == (1932, 1092)
    assert from_original((960, 270), CoordinateSpace.REL1000, original_wh) == (500, 250)
    assert from_original((960, 270), CoordinateSpace.REL1_YX, original_wh) == (0.25, 0.5)
    assert to_original((966, 273), CoordinateSpace.ABS_RESIZED, original_wh, model_wh) == (960, 270)
    with pytest.raises(ValueError, match="model_wh"):
        to_original((1, 1), CoordinateSpace.ABS_RESIZED, original_wh)


def test_a_hit_is_a_hit_in_every_space():
    """The closed test does not change under positive scaling, apart from points within rounding of an edge."""
    rng = np.random.default_rng(3)
    original_wh, model_wh, box = (1366, 768), (1372, 756), Box(100, 50, 400, 300)
    corners = [(box.x1, box.y1), (box.x2, box.y2)]
    for space in (CoordinateSpace.ABS_RESIZED, CoordinateSpace.REL1000, CoordinateSpace.REL1):
        low, high = (from_original(corner, space, original_wh, model_wh) for corner in corners)
        for point in rng.uniform(0, 500, (200, 2)):
            moved = from_original(tuple(point), space, original_wh, model_wh)
            assert Box(*low, *high).contains(moved) == box.contains(tuple(point))


def test_the_space_comes_from_the_family_and_its_name():
    families = pointing_families()
    assert families["qwen2_5_vl"].points == "abs_resized"
    assert families["qwen3_vl"].points == "rel1000"
    assert "paligemma" not in families
    assert all(coordinate_space(family.points) and family.image_factor for family in families.values())
    with pytest.raises(UserError, match=r"pixels.*abs_resized, rel1000"):
        coordinate_space("pixels")


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ((10, 20, 30, 40), (10, 20, 30, 40)),
        ((30, 40, 10, 20), (10, 20, 30, 40)),
        ((-5, -5, 15, 15), (0, 0, 15, 15)),
        ((90, 40, 130, 60), None),
        ((10, 10, 10, 30), None),
        ((10, 10, 11.5, 30), None),
        ((float("nan"), 0, 5, 5), None),
        ((0, 0, float("inf"), 5), None),
        ((200, 200, 210, 210), None),
        ((99, 10, 101, 50), None),
    ],
)
def test_clean_box(box, expected):
    assert clean_box(box, 100, 100) == expected


def test_boxes_are_closed():
    assert Box(1, 2, 3, 4).contains((1, 2))
    assert Box(1, 2, 3, 4).contains((3, 4))
    assert not Box(1, 2, 3, 4).contains((3.0001, 4))
    assert not Box(1, 2, 3, 4).contains((float("nan"), 3))
    assert Box(2, 2, 2, 2).contains((2, 2))


def test_polygons_are_closed_and_may_be_concave():
    arrow = Polygon(((0, 0), (10, 0), (10, 10), (5, 5), (0, 10)))
    for inside in [(5, 2), (1, 8), (9, 8), (5, 5), (0, 0), (7, 0), (2.5, 7.5)]:
        assert arrow.contains(inside), inside
    for outside in [(5, 6), (-1, 5), (11, 5), (5, -0.1), (5, 10), (float("nan"), 2)]:
        assert not arrow.contains(outside), outside
    with pytest.raises(ValueError, match="3 corners"):
        Polygon(((0, 0), (1, 1)))


def test_refusals_and_several_boxes():
    assert Refusal().contains((-1, -1))
    assert not Refusal().contains((-1, 1))
    both = AnyOf((Box(0, 0, 1, 1), Box(5, 5, 6, 6)))
    assert [both.contains(point) for point in [(1, 1), (5.5, 5.5), (3, 3), (-1, -1)]] == [True, True, False, False]


def test_a_sample_carries_both_sizes(tmp_path):
    file = tmp_path / "screen.png"
    Image.new("RGB", (300, 200), "red").save(file)
    sample = GroundingSample(file, (300, 200), "the red one", Box(0, 0, 30, 20))
    with pytest.raises(ValueError, match="fitted"):
        sample.model_image()
    fitted = sample.fitted(Resize(28))
    assert fitted.model_wh == (308, 196)
    assert fitted.model_image().size == (308, 196)
    assert fitted.target == sample.target
    assert fitted.to_original((154, 98), CoordinateSpace.ABS_RESIZED) == (150, 100)
    wrong = GroundingSample(file, (200, 300), "the red one", Box(0, 0, 30, 20))
    with pytest.raises(ValueError, match="300 x 200 pixels, but its sample says 200 x 300"):
        wrong.load_image()
