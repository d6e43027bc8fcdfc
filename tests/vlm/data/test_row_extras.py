"""What estimators read of responses: where code begins, budgets."""

import pytest

from mmrl.errors import UserError
from mmrl.vlm.data.row_extras import code_start, row_extras, with_budgets
from mmrl.vlm.data.task import VlmTask


def decode(tokens):
    return "".join(map(chr, tokens))


def task(**columns):
    return VlmTask("one", [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}], columns=columns)


@pytest.mark.parametrize("text", ["ab```py", "```", "no code", "", "x<tool_call>{}", "`` `"])
def test_code_starts_where_its_mark_is_complete(text):
    places = [text.find(mark) + len(mark) - 1 for mark in ("```", "<tool_call>") if mark in text]
    assert code_start([ord(c) for c in text], decode) == (min(places) if places else -1)


def test_only_what_is_needed_is_computed():
    rows = [task(budget=512), task()], [[97], [98]]
    assert row_extras({"samples"}, *rows, decode) == {}
    found = row_extras({"budgets", "code_starts"}, *rows, decode)
    assert {name: values.tolist() for name, values in found.items()} == {"budget": [512, 4096], "code_start": [-1, -1]}


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
    with pytest.raises(UserError, match=r"data\.budgets holds 0"):
        with_budgets([question], [0])
