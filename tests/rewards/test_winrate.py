"""Rewards by pairwise comparison."""

import math

import numpy as np
import pytest
from PIL import Image

from mmrl.rewards import RewardConfig, RewardSum
from mmrl.rewards.budget import winrate_reward


def longer(prompts, first, second, images, **_):
    """Prefers longer responses, and the one that is shown first where both are as long."""
    return [float(len(a) >= len(b)) for a, b in zip(first, second, strict=True)]


def test_a_response_earns_its_mean_chance_against_the_others_of_its_question():
    prompts = ["a?", "b?", "a?", "a?", "b?"]
    found = winrate_reward(prompts, ["x", "yy", "xxx", "xx", "zz"], judge=longer)
    assert found == [0.0, 0.5, 1.0, 0.5, 0.5]


def test_an_order_that_the_judge_prefers_cancels_and_intransitive_judges_are_fine():
    def judge(first, second, **_):
        beats = {("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")}
        return [0.9 if (a, b) in beats else 0.3 for a, b in zip(first, second, strict=True)]

    found = winrate_reward(["?"] * 3, ["rock", "paper", "scissors"], judge=judge)
    assert found == pytest.approx([0.5] * 3)
    assert winrate_reward(["?"] * 2, ["rock", "scissors"], judge=judge) == pytest.approx([0.8, 0.2])


def test_questions_with_the_same_text_are_apart_by_their_images():
    red, blue = (Image.fromarray(np.full((2, 2, 3), value, np.uint8)) for value in (10, 200))
    seen = []

    def judge(first, second, images, topic, strict_mode, **_):
        assert strict_mode is True
        seen.extend(zip(first, second, [each[0].tobytes()[0] for each in images], topic, strict=True))
        return [1.0] * len(first)

    rows = {"images": [[red], [blue], [red], [blue]], "topic": ["r", "b", "r", "b"], "strict_mode": True}
    assert winrate_reward(["?"] * 4, ["1", "2", "3", "4"], judge=judge, **rows) == [0.5] * 4
    assert seen == [("1", "3", 10, "r"), ("3", "1", 10, "r"), ("2", "4", 200, "b"), ("4", "2", 200, "b")]


def test_what_cannot_be_compared_fails():
    assert math.isnan(winrate_reward(["?"], ["a"], judge=longer)[0])
    with pytest.raises(ValueError, match="judge returned 7; expected probabilities"):
        winrate_reward(["?"] * 2, ["a", "b"], judge=lambda first, **_: [7.0] * len(first))
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        winrate_reward(["?"] * 2, ["a", "b"], judge=lambda first, **_: [1.0])


def test_the_sum_gives_it_all_rows_of_a_question():
    term = RewardConfig(name="winrate", options={"judge": "tests/rewards/test_winrate.py:longer"})
    rewards = RewardSum([term])
    found = rewards.score(["a?", "b?", "a?", "b?"], ["x", "yy", "xx", "y"], {"images": [[]] * 4})
    assert found.total == [0.0, 1.0, 1.0, 0.0]
