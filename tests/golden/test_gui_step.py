"""Rewards of single steps against the public code of GUI-R1 and UI-R1, response by response."""

import pytest

from mmrl.gui.grounding.coords import CoordinateSpace
from mmrl.gui.grounding.samples import NoTarget, target_of
from mmrl.gui.grounding.step_rewards import PARTS, ExpectedStep, StepScore, score_step
from tests.golden.numbers import load

FILE = load("gui_step")
PEERS = dict(zip(("gui_r1", "ui_r1"), FILE.peers, strict=True))
CASES = [(preset, number) for preset in PEERS for number in range(len(FILE.inputs[preset]))]
CLICK, ENTER = "<think>a</think><answer>[{'action': 'click', ", "<think>a</think><answer>[{'action': 'enter', "
DIFFERS = {
    # the first action counts whole: the public code takes the action of the first and the point of the last
    CLICK + "'point': [1, 2], 'input_text': 'a'}, {'action': 'x', 'point': [200, 220], 'input_text': ''}]</answer>": (
        StepScore(0.2, 1, 1, 0)
    ),
    # what Python reads as a point, double quotes and names with a slash are read
    CLICK + "'point': (200, 220), 'input_text': 'a'}]</answer>": StepScore(1, 1, 1, 1),
    '<think>a</think><answer>[{"action": "enter", "point": [-100, -100], "input_text": "no input text"}]</answer>': (
        StepScore(1, 1, 1, 1)
    ),
    ENTER.replace("enter", "close/delete") + "'point': [-100, -100], 'input_text': 'no input text'}]</answer>": (
        StepScore(1, 1, 1, 1)
    ),
    # no literal: the public code finds words in it
    ENTER + "'point': [-100, -100], 'input_text': 'no input text'}</answer>": StepScore(0, 0, 0, 0),
    ENTER + "'point': [-100, -100], 'input_text': 'no input text'}] x</answer>": StepScore(0, 0, 0, 0),
    "<think>a</think><answer>[{'action': scroll, 'coordinate': [1, 2]}]</answer>": StepScore(1, 1, 0, 0),
    '<think>a</think><answer>[{"action": "scroll", "coordinate": [1, 2]}]</answer>': StepScore(3, 1, 1, 1),
}
"""Responses that are read differently on purpose, and their scores here."""


def scored(preset, number):
    case = FILE.inputs[preset][number]
    target = target_of(case) if {"bbox", "point"} & set(case) else NoTarget()
    wh = tuple(case["original_wh"]), tuple(case["model_wh"])
    step = ExpectedStep(case["action"], case.get("input_text"), target, *wh, CoordinateSpace.ABS_RESIZED)
    return case["text"], score_step(case["text"], step, preset)


@pytest.mark.parametrize(("preset", "number"), CASES)
def test_the_reward_is_that_of_the_public_code(preset, number):
    text, found = scored(preset, number)
    peer = PEERS[preset]
    expected = {part: peer[part][number] for part in PARTS if part in peer}
    if text in DIFFERS:
        assert found == DIFFERS[text]
        assert {part: getattr(found, part) for part in expected} != expected
        return
    assert {part: getattr(found, part) for part in expected} == pytest.approx(expected, rel=peer["relative"])


def test_the_sum_of_ui_r1_is_that_of_its_three_rewards():
    peer = PEERS["ui_r1"]
    for number in range(len(FILE.inputs["ui_r1"])):
        text, found = scored("ui_r1", number)
        if text not in DIFFERS:
            assert found.score == sum(peer[part][number] for part in ("action", "accuracy", "format"))


def test_every_difference_is_in_the_file():
    texts = {case["text"] for cases in FILE.inputs.values() for case in cases}
    assert set(DIFFERS) <= texts
    assert {*PEERS["gui_r1"]["score"]} == {0.0, 0.2, 0.8, 1.0}
