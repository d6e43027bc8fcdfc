import numpy as np
import pytest
from PIL import Image, ImageDraw

from diffusion.toy.shapes import COLOURS, KINDS, Detection, all_scenes, parse_caption, render_dataset
from diffusion.toy.shapes.detector import UNKNOWN
from diffusion.toy.shapes.geneval import judge_scene, shapes_geneval, shapes_geneval_strict
from mmrl.errors import UserError
from mmrl.rewards import RewardConfig, RewardSum


def seen(*looks):
    """Detections side by side, from left to right."""
    return [
        Detection(colour, shape, (12 * place, 0, 12 * place + 10, 10), 80)
        for place, (colour, shape) in enumerate(looks)
    ]


def verdict(caption, *looks, compat=False):
    return judge_scene(seen(*looks), parse_caption(caption).metadata["include"], compat=compat)


def picture(*squares):
    """(colour, x, y) of squares of 8 pixels."""
    image = Image.new("RGB", (32, 32), (240, 240, 240))
    for colour, x, y in squares:
        ImageDraw.Draw(image).rectangle((x, y, x + 7, y + 7), fill=COLOURS[colour])
    return np.asarray(image)


@pytest.mark.parametrize("kind", list(KINDS))
def test_renders_of_the_caption_score_one(kind):
    scenes = all_scenes([kind])
    images, index = render_dataset(scenes, 120, seed=11)
    prompts = [scenes[scene].caption for scene in index]
    strict = shapes_geneval_strict(prompts, list(images))
    assert np.mean(strict) >= 0.99
    metadata = [scenes[scene].metadata for scene in index]
    graded = shapes_geneval(["?"] * len(images), list(images), metadata=metadata)
    assert [value == 1.0 for value in graded] == [value == 1.0 for value in strict]


def test_renders_of_other_captions_do_not_score_one():
    scenes = all_scenes(["single", "two", "count"])
    images, index = render_dataset(scenes, 108, seed=3)
    prompts = [scenes[(scene + 1) % len(scenes)].caption for scene in index]
    assert max(shapes_geneval(prompts, list(images), strict=True)) == 0.0
    assert max(shapes_geneval(prompts, list(images))) < 1.0


@pytest.mark.parametrize(
    ("caption", "looks", "parts"),
    [
        # count, colour, share of asked-for objects
        ("a red circle", [("red", "circle")], (1, 1, 1)),
        ("a red circle", [], (0, 0, 0)),
        ("a red circle", [("blue", "circle")], (1, 0, 0)),
        ("a red circle", [("red", "square")], (0, 0, 0)),
        ("a red circle", [("red", "circle"), ("red", UNKNOWN)], (1, 1, 1 / 2)),
        ("a red circle", [("red", "circle")] * 2, (0, 0, 1 / 2)),
        ("a red circle", [("red", "circle")] * 5, (0, 0, 1 / 5)),
        ("three red circles", [("red", "circle")] * 2, (2 / 3, 0, 1)),
        ("three red circles", [("red", "circle")] * 4, (2 / 3, 0, 3 / 4)),
        ("three red circles", [("red", "circle"), ("red", "circle"), ("blue", "circle")], (1, 2 / 3, 2 / 3)),
        ("a red circle and a blue square", [("red", "circle"), ("blue", "square")], (1, 1, 1, 1, 1)),
        ("a red circle and a blue square", [("blue", "circle"), ("red", "square")], (1, 0, 1, 0, 0)),
        ("a red circle and a blue square", [("red", "circle")], (1, 1, 0, 0, 1)),
    ],
)
def test_parts_by_hand(caption, looks, parts):
    result = verdict(caption, *looks)
    assert result.parts == pytest.approx(parts)
    assert result.graded == pytest.approx(sum(parts) / len(parts))
    assert result.correct == (set(parts) == {1})


@pytest.mark.parametrize(
    ("relation", "looks", "compat", "parts"),
    [
        ("left of", [("red", "circle"), ("blue", "square")], False, (1, 1, 1, 1, 1, 1)),
        ("right of", [("red", "circle"), ("blue", "square")], False, (1, 1, 1, 1, 0, 1)),
        ("right of", [("red", "circle"), ("blue", "square")], True, (1, 1, 1, 1, 0, 1, 1)),
        ("left of", [("red", "circle"), ("blue", "square")], True, (1, 1, 1, 1, 1, 1)),
        ("right of", [("red", "circle")], True, (0, 0, 1, 1, 0, 1)),
        ("left of", [("green", "circle"), ("blue", "square")], False, (1, 1, 1, 0, 0, 1 / 2)),
    ],
)
def test_relation_parts_by_hand(relation, looks, compat, parts):
    result = verdict(f"a red circle {relation} a blue square", *looks, compat=compat)
    assert result.parts == pytest.approx(parts)
    assert result.correct == (set(parts) == {1})


def test_entries_without_colour_accept_every_colour():
    include = [{"class": "circle", "count": 2}]
    assert judge_scene(seen(("red", "circle"), ("blue", "circle")), include).correct
    assert not judge_scene(seen(("red", "circle")), include).correct


def test_a_relation_must_refer_to_an_entry_before_it():
    include = [{"class": "circle", "count": 1, "position": ["above", 0]}]
    with pytest.raises(ValueError, match="does not come before"):
        judge_scene(seen(("red", "circle")), include)


def test_pixels_to_reward():
    both = picture(("red", 2, 2), ("red", 20, 20))
    one = picture(("red", 12, 12))
    assert shapes_geneval(["two red squares"] * 2, [both, one]) == pytest.approx([1.0, (0.5 + 0 + 1) / 3])
    assert shapes_geneval_strict(["two red squares"] * 2, [both, one]) == [1.0, 0.0]


def test_a_reward_sum_calls_it_with_the_metadata_column():
    images, index = render_dataset(all_scenes(["two"]), 6, seed=0)
    metadata = [all_scenes(["two"])[scene].metadata for scene in index]
    rewards = RewardSum(
        [RewardConfig("graded"), RewardConfig("exact", function="graded", options={"strict": True}, weight=0.5)],
        functions={"graded": shapes_geneval},
    )
    result = rewards.score(["?"] * 6, list(images), {"metadata": metadata, "other": [0] * 6})
    assert result.total == [1.5] * 6
    assert result.errors == {}


def test_rows_without_a_description_are_refused():
    image = picture(("red", 4, 4))
    with pytest.raises(UserError, match="cannot read 'a dog'"):
        shapes_geneval(["a dog"], [image])
    with pytest.raises(UserError, match="asks for nothing"):
        shapes_geneval(["a dog"], [image], metadata=[{"label": 3}])
