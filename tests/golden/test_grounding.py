"""AEPO's reward against its public code, answer by answer."""

import pytest

from mmrl.gui.grounding.coords import Box
from mmrl.gui.grounding.rewards import PARTS, AnswerRules, score_answer
from tests.golden.numbers import load

FILE = load("aer")
(PEER,) = FILE.peers
CASES = FILE.inputs["cases"]
OURS = [part for part in PARTS if part not in PEER]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_the_reward_is_that_of_the_public_code(number):
    case, box = CASES[number], Box(**FILE.inputs["box"])
    found = score_answer(case["text"], box, AnswerRules(parser="reference"), no_think=case["no_think"])
    expected = {part: PEER[part][number] for part in PARTS if part in PEER}
    assert {part: getattr(found, part) for part in expected} == pytest.approx(expected, rel=PEER["relative"])


def test_what_the_public_code_does_not_report():
    assert OURS == ["wrong_format"]
    assert len(PEER["score"]) == len(CASES)
    assert {*PEER["score"]} > {-1.0, 0.0, 2.0}
