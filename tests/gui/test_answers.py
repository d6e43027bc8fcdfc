"""Points parsed from answers: the public rule bit for bit, and a tolerant one; neither raises."""

import json
import math

import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.gui.grounding.answers import ANSWER_ERRORS, PARSERS, ParsedPoints, answer_text, parse_answer, split_think
from mmrl.gui.grounding.coords import CoordinateSpace

GOOD = '[{"point_2d": [10, 20]}]'
PIECES = [
    *("[", "]", "{", "}", ",", ":", '"', " ", "\n", "-", ".", "e", "1", "23", "NaN", "Infinity", "null", "true", "\\"),
    *('"point_2d"', '"bbox_2d"', '"coordinate"', "<think>", "</think>", "so", "```json", "```", "\u00e9", "\x00", "'"),
    *('{"point_2d": [', "]}", GOOD, "1e999", "9" * 30),
]


def test_the_think_block():
    assert split_think(f"<think>so</think>{GOOD}") == GOOD
    assert split_think(f"<think>so</think>\n {GOOD} \n") == GOOD
    wrong = [f" <think>so</think>{GOOD}", GOOD, f"<think> </think>{GOOD}", "<think>so</think> ", "<think>so", ""]
    wrong += [f"<think>a</think><think>b</think>{GOOD}", f"<think>a</think></think>{GOOD}", f"</think><think>{GOOD}"]
    assert [split_think(text) for text in wrong] == [None] * len(wrong)


@pytest.mark.parametrize(
    ("text", "points", "error"),
    [
        (GOOD, ((10, 20),), ""),
        (f"The button is here: {GOOD}, I think.", ((10, 20),), ""),
        ('[{"point_2d": [1, 2], "label": "a"}, {"point_2d": [3.5, 4]}]', ((1, 2), (3.5, 4)), ""),
        ("[]", (), "empty"),
        ("", (), "not_json"),
        (f"As in [1]: {GOOD}", (), "wrong_shape"),  # the first bracket counts
        (f"see [above]: {GOOD}", (), "not_json"),
        ("[{'point_2d': [10, 20]}]", (), "not_json"),
        ('[{"point_2d": [10, 20]}, {"point_2d": [1]}]', (), "wrong_shape"),  # one bad item spoils the list
        ('[{"bbox_2d": [1, 2, 3, 4]}]', (), "wrong_shape"),
        ("[[10, 20]]", (), "wrong_shape"),
        ('[{"point_2d": ["10", "20"]}]', (("10", "20"),), ""),  # the reward finds that these are no numbers
        ('[{"point_2d": [10, 20]}', (), "not_json"),
    ],
)
def test_the_reference_rule(text, points, error):
    found = parse_answer(text, "reference", no_think=True)
    assert (found.points, found.error) == (points, error)


def test_the_reference_rule_lets_nan_pass():
    (point,) = parse_answer('[{"point_2d": [NaN, 20]}]', "reference", no_think=True).points
    assert math.isnan(point[0])


def test_the_reference_rule_needs_its_think_block():
    assert parse_answer(GOOD, "reference").error == "no_think"
    assert parse_answer(f"<think>[1]</think>{GOOD}", "reference").points == ((10, 20),)


@pytest.mark.parametrize(
    ("text", "points", "kind"),
    [
        (GOOD, ((10, 20),), "point_2d"),
        (f"```json\n{GOOD}\n```", ((10, 20),), "point_2d"),
        (f"<think>perhaps [1, 2]</think>{GOOD}", ((10, 20),), "point_2d"),
        (f"As in [1] and [above]: {GOOD}", ((10, 20),), "point_2d"),
        ('{"point_2d": [10, 20]}', ((10, 20),), "point_2d"),
        ('[{"bbox_2d": [10, 20, 30, 50], "label": "x"}]', ((20, 35),), "bbox_2d"),
        ('{"bbox_2d": [10, 20, 30, 50]}', ((20, 35),), "bbox_2d"),
        ('{"name": "computer", "arguments": {"action": "click", "coordinate": [7, 8]}}', ((7, 8),), "coordinate"),
        ("[10, 20]", ((10, 20),), "pairs"),
        ("[[10, 20], [30.5, -4]]", ((10, 20), (30.5, -4)), "pairs"),
        ("click at [10, 20].", ((10, 20),), "pairs"),
        ("[10, 20, 30, 50]", ((20, 35),), "pairs"),
        ("<ref>save</ref><box>[[10, 20, 30, 50]]</box>", ((20, 35),), "pairs"),
        ("<think>at [1, 2]</think><|begin_of_box|>[[10,20,30,50]]<|end_of_box|>", ((20, 35),), "pairs"),
        ("Action: click(start_box='(197,525)')", ((197, 525),), "start_box"),
        ("Action: click(start_box='<|box_start|>(197,525)<|box_end|>')", ((197, 525),), "start_box"),
        ("Action: click(start_box='[0.25,0.125,0.75,0.375]')", ((0.5, 0.25),), "pairs"),
        ("Action: click(start_box='(0.25,0.125,0.75,0.375)')", ((0.5, 0.25),), "start_box"),
        ("Action: click(point='<point>510 150</point>')", ((510, 150),), "point"),
        ("<|object_ref_start|>save<|object_ref_end|><|box_start|>(576,12),(592,42)<|box_end|>", ((584, 27),), "box"),
        ("save(576,12),(592,42)", ((584, 27),), "box"),
        ("```python\npyautogui.click(x=0.25, y=0.5)\n```", ((0.25, 0.5),), "pyautogui"),
        ("pyautogui.doubleClick(960, 540)", ((960, 540),), "pyautogui"),
        ("It is at (12, 34.5), I think.", ((12, 34.5),), "pair"),
        ("<think>at (1, 2)</think>(3, 4)", ((3, 4),), "pair"),
    ],
)
def test_the_robust_rule(text, points, kind):
    assert parse_answer(text) == ParsedPoints(points, kind)


def test_a_users_function_reads_points(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def read(text):\n    return [tuple(float(n) for n in text.split('@')[1:])] if '@' in text else []\n"
    )
    for text, points, error in (
        ("<think>@1@2</think>@3@4", ((3, 4),), ""),
        ("none", (), "empty"),
        ("@3", (), "wrong_shape"),
    ):
        found = parse_answer(text, f"{file}:read")
        assert (found.points, found.error) == (points, error)


def test_a_users_function_that_raises_finds_nothing(tmp_path, caplog):
    file = tmp_path / "mine.py"
    file.write_text(
        "def read(text):\n    x, y = text.split('@')[0].split()\n    return [(float(x), float(y))]\n"
        "def broken(text):\n    return text['x']\n"
    )
    assert parse_answer("1 2", f"{file}:read").points == ((1, 2),)
    assert parse_answer("one two", f"{file}:read") == parse_answer("", f"{file}:read") == ParsedPoints(error="function")
    assert not caplog.records
    for _ in range(2):
        assert parse_answer("1 2", f"{file}:broken").error == "function"
    assert len(caplog.records) == 1
    assert "broken raised TypeError" in caplog.text
    with pytest.raises(UserError, match="unknown parser 'robst'; did you mean 'robust'"):
        parse_answer("1 2", "robst")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not_json"),
        ("(a, b) or (1, 2, 3)", "not_json"),
        ("I cannot find it.", "not_json"),
        ("[]", "empty"),
        ('[{"point_2d": [NaN, 20]}]', "non_finite"),
        ('[{"point_2d": [1e999, 20]}]', "non_finite"),
        (f'[{{"point_2d": [{"9" * 400}, 20]}}]', "non_finite"),
        ('[{"point_2d": ["10", "20"]}]', "wrong_shape"),
        ('[{"point_2d": [true, 20]}]', "wrong_shape"),
        ("[1, 2, 3]", "wrong_shape"),
        ("<think>it never ends [1, 2]", "no_think"),
        ("[[1, 2], [3, 4], [5, 6]]", "too_many"),
    ],
)
def test_what_the_robust_rule_refuses(text, error):
    found = parse_answer(text, max_answers=2)
    assert (found.points, found.error) == ((), error)
    assert not found.ok


def test_a_refusal_is_an_answer():
    found = parse_answer("[-1, -1]")
    assert found.ok
    assert (found.points, found.error) == (((-1, -1),), "refusal")
    assert parse_answer("[-1, 5]").error == ""


def test_numbers_are_never_taken_for_another_space():
    """0.5 stays 0.5 and 500 stays 500: the caller interprets them."""
    assert parse_answer("[0.5, 0.25]").points == ((0.5, 0.25),)
    assert parse_answer("[500, 250]").points == ((500, 250),)


@pytest.mark.parametrize("space", CoordinateSpace)
def test_what_is_written_is_read(space):
    fractions = space in (CoordinateSpace.REL1, CoordinateSpace.REL1_YX)
    points = ((0.25, 0.5), (1, 0.125)) if fractions else ((12, 34), (5, 600))
    text = answer_text(points, space)
    for mode in PARSERS:
        assert parse_answer(text, mode, no_think=True).points == points


@pytest.mark.parametrize("mode", PARSERS)
def test_no_text_raises(mode):
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(4000):
        text = "".join(PIECES[i] for i in rng.integers(0, len(PIECES), rng.integers(0, 14)))
        for no_think in (True, False):
            found = parse_answer(text, mode, no_think=no_think)
            seen.add(found.error)
            assert found.error in ("", *ANSWER_ERRORS)
            assert bool(found.points) == found.ok
            if mode == "robust":
                assert all(math.isfinite(number) for point in found.points for number in point)
    assert {"", "not_json", "wrong_shape", "empty"} <= seen


@pytest.mark.parametrize("mode", PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        *("[" * 100_000, "[" * 50_000 + "]" * 50_000, "[]" * 50_000, "{" * 50_000 + "}" * 50_000, "x" * 100_000),
        *("[1," * 33_000, '[{"point_2d": ' * 7000, json.dumps([{"point_2d": [1, 2]}] * 4000)),
    ],
)
def test_a_hundred_thousand_characters(mode, text):
    parse_answer(text, mode, no_think=True)


def test_labels_stand_before_their_points():
    text = answer_text([(125.2, 375), (875, 166.6)], CoordinateSpace.REL1000, ["disk", "bell"])
    assert text == '[{"label": "disk", "point_2d": [125, 375]}, {"label": "bell", "point_2d": [875, 167]}]'
    for parser in PARSERS:
        assert parse_answer(text, parser, no_think=True).points == ((125, 375), (875, 167))
    with pytest.raises(ValueError, match="zip"):
        answer_text([(1, 2)], CoordinateSpace.REL1000, [])


@pytest.mark.parametrize(
    "shape", ['{"box_2d": [100, 200, 300, 400]}', '[{"box_2d": [100, 200, 300, 400], "label": "x"}]']
)
def test_a_box_whose_y_comes_first_is_not_read_as_one_with_x_first(shape):
    assert parse_answer(shape, "robust").error == "wrong_shape"
    assert parse_answer("[100, 200, 300, 400]", "robust").points == ((200.0, 300.0),)
