"""Where the code of a response begins, and questions with budgets."""

import pytest

from mmrl.errors import UserError
from mmrl.vlm.data.dataset import with_budgets
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.vlm_recipe import code_start


def decode(tokens):
    return "".join(map(chr, tokens))


def task(**columns):
    return VlmTask("one", [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}], columns=columns)


@pytest.mark.parametrize("text", ["ab```py", "```", "no code", "", "x<tool_call>{}", "`` `"])
def test_code_starts_where_its_mark_is_complete(text):
    places = [text.find(mark) + len(mark) - 1 for mark in ("```", "<tool_call>") if mark in text]
    assert code_start([ord(c) for c in text], decode) == (min(places) if places else -1)


def test_a_question_is_asked_once_for_each_budget():
    question = task(answer="4")
    found = with_budgets([question], [512, 2048])
    assert [(each.id, each.columns["budget"]) for each in found] == [
        ("one (512 tokens)", 512),
        ("one (2048 tokens)", 2048),
    ]
    assert [item["text"] for item in found[1].messages[0]["content"]] == [
        "How many?",
        "\n\nAnswer the question with 2048 tokens.",
    ]
    assert len(question.messages[0]["content"]) == 1
    with pytest.raises(UserError, match=r"data\.budgets contains 0"):
        with_budgets([question], [0])
