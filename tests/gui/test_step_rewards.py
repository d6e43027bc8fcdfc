"""Rewards of single steps: rows computed by hand, spaces and radii, errors, and a run that pays for steps alone."""

import json
import math

import pytest

from mmrl.errors import UserError
from mmrl.gui.grounding.aepo import AepoConfig, AepoRecipe
from mmrl.gui.grounding.coords import Box
from mmrl.gui.grounding.rewards import AnswerRules, score_answer
from mmrl.gui.grounding.samples import (
    AnyOf,
    GroundingSample,
    NoTarget,
    Polygon,
    Spot,
    draw_answer,
    sample_row,
    target_of,
)
from mmrl.gui.grounding.step_rewards import gui_step_reward, step_points
from mmrl.rewards import RewardConfig, RewardSum
from mmrl.training.run import train
from tests.gui.screens import run_config, small_model
from tests.gui.test_aepo import load_run_entry

BOX = {"bbox": [100, 200, 300, 240]}


def step(action, point=(-100, -100), text="no input text", key="point"):
    return f"<think>so</think><answer>{[{'action': action, key: list(point), 'input_text': text}]}</answer>"


def grounding(target=None, space="abs_resized", original=(1000, 800), model=(1000, 800)):
    return {"original_wh": original, "model_wh": model, "space": space, "no_think": True} | (
        target or {"no_target": True}
    )


def reward(text, action, target=None, input_text=None, place=None, **options):
    rows = [{**grounding(target), **(place or {})}]
    return gui_step_reward([""], [text], grounding=rows, action=[action], input_text=[input_text], **options)[0]


HAND = [
    # GUI-R1: strictly inside
    ("gui_r1", step("click", (101, 201)), "click", BOX, None, 1.0),
    ("gui_r1", step("click", (100, 220)), "click", BOX, None, 0.2),
    ("gui_r1", step("click", (200, 240)), "click", BOX, None, 0.2),
    # 139.9 and 140 pixels from the point
    ("gui_r1", step("click", (340, 200)), "click", {"point": [200.1, 200]}, None, 1.0),
    ("gui_r1", step("click", (340, 200)), "click", {"point": [200, 200]}, None, 0.2),
    # two of four words and one of four, of as many: F1 1/2 and 1/4
    ("gui_r1", step("type", text="a b x y"), "type", None, "a b c d", 1.0),
    ("gui_r1", step("type", text="a x y z"), "type", None, "a b c d", 0.2),
    ("gui_r1", step("press_home"), "press_back", None, None, 0.2),
    # UI-R1: the edge counts, after cutting the decimals
    ("ui_r1", step("click", (300, 240), key="coordinate"), "click", BOX, None, 3.0),
    ("ui_r1", step("click", (301, 240), key="coordinate"), "click", BOX, None, 2.0),
    ("ui_r1", step("scroll", key="coordinate"), "click", BOX, None, 1.0),
    ("ui_r1", "<answer>[{'action': 'open_app', 'coordinate': [0, 0]}]</answer>", "open_app", None, None, 2.0),
]


@pytest.mark.parametrize(("preset", "text", "action", "target", "words", "expected"), HAND)
def test_rows_by_hand(preset, text, action, target, words, expected):
    assert reward(text, action, target, words, preset=preset) == expected


def test_the_radius_is_a_share_of_the_diagonal_that_the_model_sees():
    place = {"original_wh": (1200, 1600), "model_wh": (300, 400)}
    text = step("click", (150, 250))  # 50 pixels below the middle of 300 x 400, whose diagonal is 500
    middle = {"point": [600, 800]}
    assert reward(text, "click", middle, place=place, radius=0.1) == 0.2
    assert reward(text, "click", middle, place=place, radius=0.1001) == 1.0
    assert reward(text, "click", middle, place=place) == 1.0, "140 pixels of the seen image"
    # the radius of a row is in pixels of the stored image, where the click is 200 pixels off
    assert reward(text, "click", middle | {"radius": 200}, place=place) == 0.2
    assert reward(text, "click", middle | {"radius": 200.1}, place=place) == 1.0
    assert reward(text, "click", middle | {"radius": 200}, place=place, radius=0.2) == 1.0, "the option wins"


@pytest.mark.parametrize(
    ("space", "point"), [("abs_resized", (100, 110)), ("rel1000", (200, 275)), ("rel1", (0.2, 0.275))]
)
def test_points_are_read_in_the_space_of_the_model(space, point):
    place = {"space": space, "original_wh": (1000, 800), "model_wh": (500, 400)}
    assert reward(step("click", point), "click", BOX, place=place) == 1.0
    assert reward(step("click", point[::-1]), "click", BOX, place=place) == 0.2


def test_fractions_are_the_wrong_format_where_points_are_whole():
    text = step("click", (200.5, 220.5))
    assert reward(text, "click", BOX, part="format") == 0
    assert reward(text, "click", BOX, part="accuracy") == 1


def test_the_first_of_several_areas_and_polygons():
    corners = [[100, 200], [300, 200], [200, 300]]
    assert reward(step("click", (200, 250)), "click", {"polygon": corners}) == 1.0
    assert reward(step("click", (110, 290)), "click", {"polygon": corners}) == 0.2
    boxes = {"boxes": [[0, 0, 10, 10], BOX["bbox"]]}
    assert [reward(step("click", (x, 220)), "click", boxes) for x in (100, 101)] == [0.2, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>" * 50,
        "<think></think><answer>" + "[" * 5000 + "</answer>",
        f"<think></think><answer>{'9' * 5000}</answer>",
        "<think></think><answer>[{'action': ['click'], 'point': {'x': 1}, 'input_text': None}]</answer>",
        "<think></think><answer>[{'action': 'click', 'point': [True, None], 'input_text': 'a'}]</answer>",
        "<think></think><answer>[{'action': 'click', 'point': [1e999, 2], 'input_text': 'a'}]</answer>",
        "<think></think><answer>__import__('os').getpid()</answer>",
    ],
)
def test_no_response_raises_or_runs(text):
    assert reward(text, "click", BOX, part="accuracy") == 0
    assert reward(text, "click", BOX, preset="ui_r1", part="accuracy") == 0


def test_wrong_options_are_refused_before_a_run():
    for options, message in (
        ({"preset": "gui_r2"}, "preset is 'gui_r2'; expected one of gui_r1, ui_r1"),
        ({"part": "all"}, "part is 'all'"),
        ({"radius": 0}, "radius is 0"),
        ({"radus": 0.1}, "radus"),
    ):
        with pytest.raises(UserError, match=message):
            RewardSum([RewardConfig(name="gui_step", options=options)])


def test_a_row_without_its_text_is_a_failure_and_not_zero():
    rewards = RewardSum([RewardConfig(name="gui_step")])
    columns = {"grounding": [grounding(), grounding(BOX)], "action": ["type", "click"], "input_text": [None, None]}
    found = rewards.score([""] * 2, [step("type", text="a"), step("click", (200, 220))], columns)
    assert math.isnan(found.total[0])
    assert found.total[1] == 1.0
    (message,) = found.examples.values()
    assert "needs the column input_text" in message


def test_a_point_with_a_radius_works_in_the_reward_for_points():
    spot = target_of({"point": [20, 30], "radius": 5})
    assert spot == Spot((20, 30), 5)
    texts = [f'[{{"point_2d": [{x}, 30]}}]' for x in (24.9, 25, "NaN")]
    scores = [score_answer(text, spot, AnswerRules(parser="robust"), no_think=True).has_correct for text in texts]
    assert scores == [1, 0, 0]


def test_targets_in_rows_and_drawings(tmp_path):
    from PIL import Image

    image = Image.new("RGB", (400, 400))
    for target in (Spot((200, 100), 30), Spot((200, 100)), NoTarget()):
        sample = GroundingSample(image, (400, 400), "it", target)
        assert target_of(sample_row(sample)) == target
        drawn = draw_answer(image, target, [], False)
        box = drawn.getbbox()
        if isinstance(target, NoTarget):
            assert box is None
        else:
            assert (box[0] + box[2]) / 2 == pytest.approx(200, abs=2)
            assert box[2] - box[0] == pytest.approx(2 * max(target.radius, 4), abs=6)
    assert not any(target.contains((0, 0)) for target in (NoTarget(), Spot((0, 0))))
    for wrong, message in (
        ({"point": [0.5, 0.3]}, "is a fraction"),
        ({"point": [5, 3], "radius": -1}, "at least 0"),
        ({"point": [5, 3, 1]}, "2 finite numbers"),
        ({"point": [5, 3], "bbox": [1, 2, 3, 4]}, "found bbox, point"),
    ):
        with pytest.raises(ValueError, match=message):
            target_of(wrong)
    assert isinstance(target_of({"boxes": [[1, 2, 3, 4]], "no_target": False}), AnyOf)
    assert isinstance(target_of({"polygon": [[0, 0], [1, 0], [0, 1]]}), Polygon)
    assert target_of({"bbox": [1, 2, 3, 4], "radius": None}) == Box(1, 2, 3, 4)


def test_the_click_of_a_response_is_drawn():
    assert step_points(step("click", (3, 4))) == [(3, 4)]
    assert step_points(step("click", (3, 4), key="coordinate")) == [(3, 4)]
    assert step_points(step("type", (3, 4))) == step_points("none") == step_points("<answer>[]</answer>") == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("m"))


def steps_config(folder, model, rows):
    """A run on screens whose rows are replaced by steps."""
    config = run_config(AepoConfig, folder, model)
    file = folder / "screens.jsonl"
    drawn = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [{"id": row["id"], "image": row["image"], "instruction": row["instruction"]} for row in drawn]
    file.write_text("".join(json.dumps(row | step) + "\n" for row, step in zip(kept, rows, strict=True)))
    config.evaluation.by = []
    return config


STEPS = [
    *({"action": "click", "bbox": [10, 10, 40, 40]},) * 2,
    *({"action": "click", "point": [30, 30]},) * 2,
    *({"action": "type", "input_text": "red", "no_target": True},) * 2,
]


def test_a_run_pays_for_steps_alone(tmp_path, model):
    config = steps_config(tmp_path, model, STEPS)
    config.answer = None
    config.rewards = [
        RewardConfig(name="right", function="gui_step", weight=0, options={"part": "accuracy"}),
        RewardConfig(name="gui_step"),
    ]
    config.accuracy_reward = "right"
    config.validate()
    run_dir = train(load_run_entry(), config)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    assert {"reward/right", "reward/gui_step"} <= {*rows[0]}
    assert not {"reward/point", "reward/has_correct"} & {*rows[0]}
    assert not [name for name in rows[0] if name.startswith("reward_error")]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"no_target": True, "action": "type"}] * 6, "no_target is set, so the reward point"),
        ([{"point": [30, 30]}] * 6, "the point has no radius, which the reward point needs"),
        ([{"point": [3000, 30]}] * 6, r"the point \[3000, 30\] is outside the image"),
        ([{"no_target": True, "action": "click"}] * 6, "the action is click, which needs a target"),
        ([{"point": [0.3, 0.3]}] * 6, "is a fraction"),
    ],
)
def test_rows_that_cannot_be_paid_are_refused(tmp_path, model, rows, message):
    config = steps_config(tmp_path, model, rows)
    config.validate()
    with pytest.raises(UserError, match=message):
        AepoRecipe(config)


def test_the_reward_asks_for_the_expected_action(tmp_path, model):
    config = steps_config(tmp_path, model, [{"bbox": [10, 10, 40, 40]}] * 6)
    config.answer, config.rewards, config.accuracy_reward = None, [RewardConfig(name="gui_step")], "gui_step"
    config.validate()
    with pytest.raises(UserError, match="action"):
        AepoRecipe(config)
    config.accuracy_reward = "first_correct"
    with pytest.raises(ValueError, match="accuracy_reward is 'first_correct' but the rewards are: gui_step"):
        config.validate()
