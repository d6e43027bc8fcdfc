import json

import pytest

from diffusion.toy.shapes import KINDS, Scene, ShapeGroup, all_scenes, parse_caption, split_scenes, write_prompt_file
from mmrl.errors import UserError

RED_CIRCLE, BLUE_SQUARE = ShapeGroup("red", "circle"), ShapeGroup("blue", "square")


@pytest.mark.parametrize(
    ("scene", "caption", "kind"),
    [
        (Scene((RED_CIRCLE,)), "a red circle", "single"),
        (Scene((RED_CIRCLE, BLUE_SQUARE)), "a red circle and a blue square", "two"),
        (Scene((ShapeGroup("green", "triangle", 3),)), "three green triangles", "count"),
        (Scene((RED_CIRCLE, BLUE_SQUARE), "left of"), "a red circle left of a blue square", "position"),
    ],
)
def test_captions_say_what_the_scene_shows(scene, caption, kind):
    assert scene.caption == caption
    assert scene.kind == kind
    assert parse_caption(f" {caption.upper()}  ") == scene


def test_every_scene_has_its_own_caption_that_is_parsed_back():
    scenes = all_scenes()
    assert {kind: len(all_scenes([kind])) for kind in KINDS} == {"single": 12, "two": 72, "count": 24, "position": 288}
    assert len({scene.caption for scene in scenes}) == len(scenes) == 396
    assert [parse_caption(scene.caption) for scene in scenes] == scenes
    assert all(scene.kind == kind for kind in KINDS for scene in all_scenes([kind]))
    assert all_scenes(["count", "single"]) == all_scenes(["count"]) + all_scenes(["single"])


def test_metadata_has_genevals_layout():
    assert parse_caption("two red circles").metadata == {
        "tag": "counting",
        "include": [{"class": "circle", "count": 2, "color": "red"}],
        "exclude": [{"class": "circle", "count": 3}],
        "prompt": "two red circles",
    }
    # the object that has the position follows the one it refers to by its index
    assert parse_caption("a red circle above a blue square").metadata["include"] == [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["above", 0]},
    ]


def test_objects_are_listed_one_by_one():
    scene = Scene((ShapeGroup("red", "circle", 2), BLUE_SQUARE))
    assert scene.objects == [RED_CIRCLE, RED_CIRCLE, BLUE_SQUARE]


def test_split_is_disjoint_complete_and_depends_on_the_seed():
    scenes = all_scenes()
    train, held_out = split_scenes(scenes, held_out_share=0.25, seed=3)
    assert sorted(train + held_out, key=scenes.index) == scenes
    assert not set(train) & set(held_out)
    assert {kind: sum(scene.kind == kind for scene in held_out) for kind in KINDS} == {
        "single": 3,
        "two": 18,
        "count": 6,
        "position": 72,
    }
    assert split_scenes(scenes, held_out_share=0.25, seed=3) == (train, held_out)
    assert split_scenes(scenes, held_out_share=0.25, seed=4)[1] != held_out
    assert split_scenes(scenes, held_out_share=0.0) == (scenes, [])


def test_prompt_file_has_one_json_line_for_each_scene(tmp_path):
    scenes = all_scenes(["single"])
    path = write_prompt_file(tmp_path / "new" / "prompts.jsonl", scenes)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [scene.caption for scene in scenes]
    assert [row["metadata"] for row in rows] == [scene.metadata for scene in scenes]


@pytest.mark.parametrize(
    ("attempt", "culprit"),
    [
        (lambda: ShapeGroup("pink", "circle"), "'pink' is not one of red, green, blue, yellow"),
        (lambda: ShapeGroup("red", "star"), "'star' is not one of circle"),
        (lambda: ShapeGroup("red", "circle", 4), "count 4"),
        (lambda: Scene((RED_CIRCLE, RED_CIRCLE)), "different shapes"),
        (lambda: Scene(()), "one group, or two"),
        (lambda: Scene((RED_CIRCLE, BLUE_SQUARE), "near"), "'near' is not one of left of"),
        (lambda: Scene((RED_CIRCLE,), "above"), "two single objects"),
        (lambda: parse_caption("a red dog"), "cannot read 'a red dog'"),
        (lambda: parse_caption("a red circles"), "cannot read 'a red circles'"),
        (lambda: parse_caption("a red circle above"), "cannot read"),
        (lambda: all_scenes(["three"]), "unknown kind of scene 'three'; known: single"),
        (lambda: split_scenes(all_scenes(), held_out_share=1.2), "held_out_share=1.2"),
        (lambda: split_scenes(all_scenes(["single"]) * 2), "occurs twice"),
    ],
)
def test_what_is_no_scene_is_named(attempt, culprit):
    with pytest.raises(UserError, match=culprit):
        attempt()
