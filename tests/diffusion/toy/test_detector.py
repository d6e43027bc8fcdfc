import time

import numpy as np
import pytest
from PIL import Image, ImageDraw

from diffusion.toy.shapes import COLOURS, all_scenes, detect, relative_position, render_dataset
from diffusion.toy.shapes.detector import UNKNOWN, _components


def canvas(size=32):
    picture = Image.new("RGB", (size, size), (240, 240, 240))
    return picture, ImageDraw.Draw(picture)


def looks(image):
    return [(item.colour, item.shape) for item in detect(image)]


def reference_components(hues):
    """Flood fill, pixel by pixel, as a reference."""
    left, found = {(y, x) for y, x in np.argwhere(hues >= 0).tolist()}, []
    while left:
        stack, member = [min(left)], set()
        while stack:
            place = stack.pop()
            if place in left:
                left.remove(place)
                member.add(place)
                y, x = place
                near = [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
                stack += [other for other in near if other in left and hues[other] == hues[place]]
        found.append(sorted(member))
    return sorted(found)


def test_components_are_those_of_a_flood_fill():
    rng = np.random.default_rng(0)
    for _ in range(150):
        shape = rng.integers(1, 14, 2)
        hues = rng.integers(-1, rng.integers(1, 5), shape)
        ours = [[(run.row, x) for run in runs for x in range(run.start, run.stop)] for runs in _components(hues)]
        assert sorted(sorted(pixels) for pixels in ours) == reference_components(hues)


def test_drawn_square_has_its_box_area_and_colour():
    picture, draw = canvas()
    draw.rectangle((5, 8, 14, 17), fill=COLOURS["yellow"])
    (item,) = detect(np.asarray(picture))
    assert (item.colour, item.shape, item.box, item.area) == ("yellow", "square", (5, 8, 15, 18), 100)


def test_shapes_by_how_they_fill_their_box():
    picture, draw = canvas(64)
    draw.ellipse((2, 2, 21, 21), fill=COLOURS["red"])
    draw.polygon([(50, 2), (40, 22), (60, 22)], fill=COLOURS["blue"])
    draw.polygon([(12, 60), (2, 40), (22, 40)], fill=COLOURS["green"])  # upside down
    draw.rectangle((30, 50, 60, 58), fill=COLOURS["green"])  # too long
    assert sorted(looks(np.asarray(picture))) == [
        ("blue", "triangle"),
        ("green", UNKNOWN),
        ("green", UNKNOWN),
        ("red", "circle"),
    ]


def test_small_grey_and_touching_objects():
    picture, draw = canvas()
    draw.rectangle((2, 2, 5, 5), fill=COLOURS["red"])  # 16 pixels are too few
    draw.rectangle((10, 10, 20, 20), fill=(120, 120, 120))
    assert looks(np.asarray(picture)) == []
    draw.rectangle((10, 10, 19, 19), fill=COLOURS["red"])
    draw.rectangle((20, 10, 29, 19), fill=COLOURS["blue"])
    assert looks(np.asarray(picture)) == [("red", "square"), ("blue", "square")]


def test_pale_edges_keep_their_hue():
    light = np.asarray([240.0, 240.0, 240.0])
    for colour, rgb in COLOURS.items():
        image = np.full((32, 32, 3), 240, dtype=np.uint8)
        image[8:20, 8:20] = (0.55 * np.asarray(rgb) + 0.45 * light).astype(np.uint8)
        assert looks(image) == [(colour, "square")]


def test_texture_and_noise_are_not_detected_as_objects():
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        assert not [look for look in looks(noise) if look[1] != UNKNOWN]
    stripes = np.full((32, 32, 3), 240, dtype=np.uint8)
    stripes[::2] = COLOURS["red"]
    assert not [look for look in looks(stripes) if look[1] != UNKNOWN]


def test_blank_image_has_no_objects():
    for value in (0, 128, 255):
        assert detect(np.full((32, 32, 3), value, np.uint8)) == []


def test_detection_takes_no_longer_than_a_few_renderings():
    started = time.process_time()
    images, _ = render_dataset(all_scenes(["count"]), 50, seed=0)
    rendered = time.process_time()
    for image in images:
        detect(image)
    assert time.process_time() - rendered < 10 * (rendered - started)


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        ((0, 0, 10, 10), (20, 0, 30, 10), {"left of"}),
        ((20, 0, 30, 10), (0, 0, 10, 10), {"right of"}),
        ((0, 0, 10, 10), (0, 20, 10, 30), {"above"}),
        ((0, 20, 10, 30), (0, 0, 10, 10), {"below"}),
        ((0, 0, 10, 10), (30, 30, 40, 40), {"left of", "above"}),  # (30 - 2) / 42.4 = 0.66 both ways
        ((0, 0, 10, 10), (7, 7, 17, 17), {"left of", "above"}),  # (7 - 2) / 9.9 = 0.505
        ((0, 0, 10, 10), (6, 6, 16, 16), set()),  # (6 - 2) / 8.5 = 0.47
        ((0, 0, 10, 10), (1, 0, 11, 10), set()),  # 1 is less than a tenth of both widths
        ((0, 0, 10, 10), (0, 0, 10, 10), set()),
    ],
)
def test_relative_position(box, other, expected):
    assert relative_position(box, other) == expected


def test_wrong_arrays_are_refused():
    with pytest.raises(ValueError, match="must be uint8"):
        detect(np.zeros((32, 32, 3), dtype=np.float32))
    with pytest.raises(ValueError, match=r"\(32, 32\)"):
        detect(np.zeros((32, 32), dtype=np.uint8))
