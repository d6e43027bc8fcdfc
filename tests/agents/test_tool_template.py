"""Tools in chat templates: which format they write, what follows a call, and which templates are refused."""

import pytest

from mmrl.agents.rollout.tool_template import RESULT, call_format, check_plain_calls, read_template
from mmrl.errors import UserError
from mmrl.vlm.data.turn_template import as_call, call_id
from tests.agents.call_templates import CHATS, SHORT, TEXTS, ToolChat, tool
from tests.vlm.chat_templates import NAMES, turns_of

ADD = tool("add", a="integer", b="integer")


@pytest.mark.parametrize("name", CHATS)
def test_exactly_one_format_reads_the_calls_of_a_template_back(name):
    assert call_format(CHATS[name].turns())[0] == CHATS[name].format


@pytest.mark.parametrize("name", CHATS)
def test_results_follow_a_call_as_the_template_writes_them(name):
    """Each result once, behind the calls as sampled, up to where the next answer begins."""
    turns = CHATS[name].turns()
    _, body = (
        turns.write_calls([as_call("add", {"a": 1}, call_id(0))], [ADD])
        if name not in TEXTS
        else (
            turns.write_calls(
                [as_call("add", {}, call_id(0)) | {"function": {"name": "add", "arguments": "{}"}}], [ADD]
            )
        )
    )
    end = next((token for token in turns.stops if body.rstrip().endswith(token)), None)
    results = [{"role": "tool", "content": [{"type": "text", "text": f"333{n}"}]} for n in range(2)]
    for count in (1, 2):
        tail = turns.follow(
            results[:count],
            end=None if end is None else turns.tokenizer.convert_tokens_to_ids(end),
            tools=[ADD],
            calls=["add"] * count,
        )
        assert [tail.count(f"333{n}") for n in range(2)] == [1, count - 1]
        assert end is None or not tail.startswith(end)
        assert RESULT in read_template(turns, [ADD]).result


def test_ids_of_calls_reach_their_results():
    turns = SHORT["kimi"].turns()
    result = {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "functions.add:3"}
    assert "## Return of functions.add:3\n5<|im_end|>" in turns.follow([result], end=None, tools=[ADD], calls=["add"])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("gemma3", "gemma3 does not support tools"),
        ("qwen2_5_vl", "qwen2_5_vl does not support tools"),
        ("deepseek_r1_distill", "deepseek_r1_distill does not support tools"),
    ],
)
def test_a_template_without_tools_is_refused(name, told):
    with pytest.raises(UserError, match=f"the chat template of {told}, so .* remove conversation.tools"):
        read_template(turns_of(name), [ADD])


def test_every_other_template_is_read_or_refused():
    """No template of a released model may end in another error."""
    for name in NAMES:
        if name in CHATS:
            assert read_template(turns_of(name), [ADD]).format
        else:
            with pytest.raises(UserError, match=r"remove conversation\.tools"):
                read_template(turns_of(name), [ADD])


def test_a_template_of_another_format_is_refused_with_its_rendering():
    turns = CHATS["qwen3_5_think"].turns()
    assert read_template(turns, [ADD], "qwen_xml").format == "qwen_xml"
    with pytest.raises(
        UserError, match=r"reads calls in the format hermes, but .* in the format qwen_xml; .*<function=pr"
    ):
        read_template(turns, [ADD], "hermes")
    strange = ToolChat("x", SHORT["phi_tags"].template.replace("<|tool_call|>", "CALL "), ["<|end|>"], ["<|end|>"])
    with pytest.raises(UserError, match=r'none of the formats hermes, .* your own module:function .*CALL \{"'):
        read_template(strange.turns(), [ADD])
    assert read_template(strange.turns(), [ADD], "").format == "", "a reader of the user's own"
    lost = SHORT["phi"].template.replace("{{ m.content | tojson }}", "")
    with pytest.raises(UserError, match="drops tool results"):
        read_template(ToolChat("x", lost, ["<|end|>"], ["<|end|>"]).turns(), [ADD])


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "gemma4", "kimi", "mistral", "deepseek", "pythonic"])
def test_a_tool_whose_calls_can_never_be_read_is_refused(name):
    with pytest.raises(UserError, match=r"the tool 'files/read' could never be called: .* rename the tool"):
        read_template(CHATS[name].turns(), [ADD, tool("files/read", path="string")])


def test_thoughts_are_dropped_only_from_calls_that_are_plain_text():
    check_plain_calls(CHATS["qwen3"].turns())
    for name, token in (("gptoss", r"<\|channel\|>"), ("gemma4", r"<\|tool_call>"), ("kimi", r"<\|tool_calls_sec")):
        with pytest.raises(UserError, match=f"conversation.drop_thoughts .* writes {token}"):
            check_plain_calls(CHATS[name].turns())


@pytest.mark.parametrize(
    ("name", "parallel", "thoughts", "turns"),
    [
        ("qwen3", True, (True, False), False),
        ("qwen3_8", True, (True, True), True),
        ("llama3_1", False, (False, False), True),
        ("gptoss", False, (True, False), False),
        ("glm4moe", True, (True, False), False),
        ("muse_glimmer", True, (True, True), True),
    ],
)
def test_facts_of_templates(name, parallel, thoughts, turns):
    found = read_template(CHATS[name].turns(), [ADD])
    assert (found.parallel, found.keeps_thoughts, found.keeps_turns) == (parallel, thoughts, turns)


def test_lines_of_a_template():
    turns = CHATS["qwen3"].turns()
    assert read_template(turns, [ADD]).lines(turns.ends) == [
        "chat template: a response ends at <|im_end|> or <|endoftext|>",
        "  tool calls: format hermes, several per turn",
        "  a tool result: '<|im_end|>\\n<|im_start|>user\\n<tool_response>\\n...\\n</tool_response><|im_end|>\\n"
        "<|im_start|>assistant\\n'",
        "  thoughts of earlier turns: kept before tool results, dropped before user messages",
        "  earlier turns: unchanged before tool results, rewritten before user messages",
    ]
