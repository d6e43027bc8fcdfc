"""The reward for right answers near a budget of tokens."""

import math

import pytest

from mmrl.rewards.budget import budget_reward


def earned(lengths, budgets, **options):
    rows = len(lengths)
    return budget_reward(
        ["1 + 1?"] * rows,
        ["2"] * rows,
        answer=["2"] * rows,
        completion_lengths=lengths,
        budget=budgets,
        require_block=False,
        **options,
    )


def u(tokens):
    return 4 * math.cos(math.pi * tokens / 8192)


def test_a_right_answer_earns_less_far_from_its_budget_and_never_more_than_the_budget():
    found = earned([512, 100, 2000, 4096, 5000, 300], [512, 512, 512, 2048, 2048, None])
    expected = [u(512), min(u(100) - 412 / 4096, u(512)), u(2000) - 1488 / 4096, u(4096) - 0.5, 0.0, u(300)]
    assert found == pytest.approx(expected)


def test_a_wrong_answer_earns_nothing():
    options = {"prompts": ["?"], "completions": ["<answer>3</answer>"], "answer": ["2"], "completion_lengths": [10]}
    assert budget_reward(**options) == [0.0]
    assert budget_reward(**options | {"answer": ["3"]}, check="number") == pytest.approx([u(10)])
    with pytest.raises(ValueError, match="check is 'maths'; expected one of exact, number, choice"):
        budget_reward(**options, check="maths")
