"""FAPO's reward, with a judge behind an endpoint."""

import pytest

from mmrl.errors import UserError
from mmrl.vlm.critic.flaws import flawless_reward

RIGHT, WRONG = "2 + 2 = 5, 5 - 1 = 4 <answer>4</answer>", "<answer>5</answer>"


def earned(server, completions, **options):
    rows = len(completions)
    given = {"answer": ["4"] * rows, "url": server.url, "model": "judge"} | options
    return flawless_reward(["2 + 2?"] * rows, completions, **given)


def test_right_answers_with_a_wrong_step_earn_less(chat_server):
    chat_server.answers[:] = ["Step 0 is wrong: \\boxed{0}", "All right. \\boxed{-1}"]
    assert earned(chat_server, [RIGHT, WRONG, RIGHT]) == [0.0, -1.0, 1.0]
    (first, _) = chat_server.requests
    asked = first.body["messages"][0]["content"][0]["text"]
    assert "2 + 2?" in asked
    assert RIGHT in asked
    assert "\nRight answer:\n4\n" in asked
    chat_server.answers[:] = ["\\boxed{2}"]
    assert earned(chat_server, [RIGHT], penalty=0.5) == [0.5]


def test_an_unreadable_verdict_is_a_failed_reward(chat_server):
    chat_server.answers[:] = ["I do not know."]
    with pytest.raises(RuntimeError, match=r"no .*boxed.*I do not know"):
        earned(chat_server, [RIGHT])


def test_options_are_checked(chat_server):
    with pytest.raises(UserError, match="url is 'localhost'"):
        earned(chat_server, [RIGHT], url="localhost")
    with pytest.raises(UserError, match=r"the question must contain \{answer\}"):
        earned(chat_server, [RIGHT], question="{problem} {solution}?")
    with pytest.raises(ValueError, match="flawless: check is 'maths'"):
        earned(chat_server, [RIGHT], check="maths")
