"""Tool calls in the formats of released models: statuses, schemas, thoughts, other models' formats."""

import json
import time
from pathlib import Path

import pytest

from mmrl.agents.environments.environment import Action, ActionConfig
from mmrl.agents.environments.native_calls import CALL_FORMATS, STATUSES, ToolCall, read_native
from tests.agents.call_templates import tool

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tool_calls/parse.json").read_text(encoding="utf-8"))
ENDS = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "</s>", "<｜end▁of▁sentence｜>", "<|observation|>"]
ENDS += ["<|user|>", "<|return|>", "<|call|>", "<turn|>", "<|tool_response>", "[e~[", "<|end|>"]
F = tool("f", a="integer", b="object", s="string", ok="boolean")
READ = ("ok", "unknown_tool", "bad_arguments")
"""Statuses of calls whose name and arguments can be read."""


def read(text, format="hermes", tools=(F,), **options):
    return read_native(text, format, tools, ends=ENDS, **options)


def statuses(text, format="hermes", **options):
    return [call.status for call in read(text, format, **options).calls]


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["case"])
def test_golden_answers(case):
    found = read(case["answer"], case["format"], GOLDEN["tools"], prompt_end=case["prompt_end"], finish=case["finish"])
    calls = [
        {"status": call.status}
        | ({"name": call.name, "arguments": call.arguments} if call.status in READ else {})
        | ({"id": call.id} if call.id else {})
        for call in found.calls
    ]
    # as JSON: True equals 1 in Python
    assert json.dumps(calls) == json.dumps(case["calls"])
    assert (found.text, found.thought) == (case["text"], case["thought"])
    if "say" in case:
        (action,) = ActionConfig(format="native").accept(found, case["answer"]).actions
        assert action == Action("say", {"text": case["say"]}, case["answer"])


WHOLE = {
    "hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "lfm": "<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
    "deepseek": '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    "deepseek_v3": '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    "glm": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
    "gemma4": "<|tool_call>call:f{a:1}<tool_call|>",
    "minimax": '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>',
    "muse": '<atem:invoke name="f">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>',
    "kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
    "phi_tags": '<|tool_call|>{"name": "f", "arguments": {"a": 1}}<|/tool_call|>',
}
"""A call in each format with a closing mark."""
BARE = {
    "llama_json": '{"name": "f", "parameters": {"a": 1}}',
    "pythonic": "[f(a=1)]",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": 1}',
    "mistral_list": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    "phi": 'functools[{"name": "f", "arguments": {"a": 1}}]',
}
"""A call in each format that ends with its JSON or list."""


def test_every_format_has_a_call():
    assert {*WHOLE, *BARE} == set(CALL_FORMATS)


@pytest.mark.parametrize("format", [*WHOLE, *BARE])
def test_a_call_is_read_in_its_own_format_and_is_an_error_in_all_others(format):
    text = (WHOLE | BARE)[format]
    (call,) = read(f"Hm.\n{text}", format).calls
    assert (call.status, call.name, call.arguments) == ("ok", "f", {"a": 1})
    for other in CALL_FORMATS:
        if other != format and {other, format} != {"deepseek", "deepseek_v3"}:
            found = read(text, other)
            assert [call.status for call in found.calls] != ["ok"], other
            assert found.calls, f"{other} takes a call of {format} for an answer"


@pytest.mark.parametrize("format", WHOLE)
def test_a_call_without_its_closing_mark_is_cut_or_unclosed(format):
    text = WHOLE[format]
    start = text[: text.rindex("<")].rstrip()
    assert statuses(start, format, finish="length") == ["cut"]
    assert statuses(start, format) == ["unclosed"]
    # a good call after it is read all the same
    assert statuses(f"{start}\n{text}", format) == ["unclosed", "ok"]


@pytest.mark.parametrize("format", BARE)
def test_a_bare_call_may_go_on_if_the_response_was_cut(format):
    assert statuses(BARE[format], format, finish="length") == ["cut"]
    assert statuses(BARE[format][:-1], format) == ["unclosed"]
    assert statuses(BARE[format], format, finish="stop") == ["ok"]


def test_statuses():
    call = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'.format
    for text, expected, told in (
        (call('{"a": "x"}'), "bad_arguments", "the argument a of f is 'x'; expected integer"),
        (call('{"a": true}'), "bad_arguments", "the argument a of f is True; expected integer"),
        (call("[1]"), "bad_arguments", "the arguments of f are a list; expected an object"),
        (call('{"a": NaN}'), "invalid_json", "NaN is no number of JSON"),
        (call('{"a": 1, "a": 2}'), "invalid_json", "an object has a key twice"),
        (call("{}")[:-12] + " {}</tool_call>", "invalid_json", "unexpected text after the JSON: '{}'"),
        ('<tool_call>{"arguments": {}}</tool_call>', "missing_name", "the call has no name"),
        ('<tool_call>{"name": "g"}</tool_call>', "unknown_tool", "there is no tool 'g'; the tools are: f"),
        ("Look: <function=f>", "invalid_json", "a call begins with '<function=f>'"),
    ):
        (found,) = read(text).calls
        assert (found.status, told in found.detail) == (expected, True), (text, found)
        assert expected in STATUSES
    assert [c.arguments for c in read(call('"{\\"a\\": 3.0}"')).calls] == [{"a": 3}]
    needs = tool("f", a="integer")
    needs["function"]["parameters"]["required"] = ["a"]
    (found,) = read(call("{}"), tools=[needs]).calls
    assert (found.status, found.detail) == ("bad_arguments", "f lacks the argument a")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "invalid_json"),
        ("qwen_xml", "<tool_call>\n{}\n</tool_call>", "invalid_json"),
        ("qwen_xml", "<tool_call></tool_call>", "missing_name"),
        ("glm", "<tool_call>f <arg_key>a</arg_key></tool_call>", "invalid_json"),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", "invalid_json"),
        ("pythonic", "[f(1)]", "invalid_json"),
        ("harmony", "<|channel|>commentary to=functions.f {}", "invalid_json"),
        ("mistral", "[TOOL_CALLS]f", "invalid_json"),
        ("kimi", '<|tool_call_begin|>f<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', "invalid_json"),
        ("llama_json", '<|python_tag|>print("x")', "invalid_json"),
        ("llama_json", '{"name": "f", "parameters": {bad}}', "invalid_json"),
    ],
)
def test_a_started_call_is_never_what_is_said(format, text, expected):
    found = read(text, format)
    assert [call.status for call in found.calls] == [expected]
    assert ActionConfig(format="native", on_parse_error="noop").accept(found, text).error == expected


def test_one_bad_call_of_a_list_leaves_the_others():
    assert statuses("[f(a=1), f(1), f(s='a, [b')]", "pythonic") == ["ok", "invalid_json", "ok"]
    assert statuses('[TOOL_CALLS][{"name": "f"}, {"name": }, {"name": "f"}]', "mistral_list") == [
        "ok",
        "invalid_json",
        "ok",
    ]
    two = '{"name": "f", "parameters": {"a": 1}}; {"name": "f", "parameters": {"b": {"name": "x"}}}<|eom_id|>'
    assert [call.arguments for call in read(two, "llama_json").calls] == [{"a": 1}, {"b": {"name": "x"}}]


def test_marks_inside_strings_are_text():
    text = '<tool_call>{"name": "f", "arguments": {"s": "</tool_call><tool_call>"}}</tool_call>'
    assert read(text).calls == (ToolCall("ok", "f", {"s": "</tool_call><tool_call>"}),)


@pytest.mark.parametrize(
    ("format", "opened", "closed"),
    [
        ("hermes", "<think>", "</think>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("gemma4", "<|channel>thought\n", "<channel|>"),
        ("harmony", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ("muse", " to=self<|message|>", "<|eom|><|start|>assistant to=f<|message|>"),
    ],
)
def test_calls_inside_thoughts_are_skipped(format, opened, closed):
    call = (WHOLE | BARE)[format]
    found = read(f"{opened}Maybe {call}{closed}{call}", format)
    assert (len(found.calls), found.text, found.thought[:5]) == (1, "", "Maybe")
    found = read(f"{opened}Maybe {call}", format)
    assert (found.calls, found.text, found.unfinished) == ((), "", True)
    assert ActionConfig(format="native").accept(found, "").error == "unfinished_thought"
    found = read(f"Maybe {call}{closed}It is 3.", format, prompt_end=f"<assistant>{opened}")
    assert (found.calls, found.text.endswith("It is 3."), found.unfinished) == ((), True, False)


def test_values_follow_the_schema():
    many = tool("f", n="number", l="array", o="object", s="string", ok="boolean")
    many["function"]["parameters"]["properties"]["m"] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    tags = {"n": "2.5", "l": "[1, 2]", "o": "{'a': 1}", "s": "[1]", "ok": "TRUE", "m": "null", "other": "7"}
    text = "".join(f"<parameter={key}>{value}</parameter>" for key, value in tags.items())
    (call,) = read(f"<tool_call><function=f>{text}</function></tool_call>", "qwen_xml", [many]).calls
    assert call.arguments == {"n": 2.5, "l": [1, 2], "o": {"a": 1}, "s": "[1]", "ok": True, "m": None, "other": "7"}
    assert call.status == "ok"


@pytest.mark.parametrize(
    ("schema", "given", "kept"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, '"celsius"', "celsius"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, '"a"', "a"),
        ({"anyOf": [{"const": "a"}, {"type": "integer"}]}, '"a"', "a"),
        ({"anyOf": [{}, {"type": "null"}]}, "[1]", [1]),
        ({"nullable": True}, "1", 1),
        ({"$ref": "#/$defs/Level"}, '"2"', 2),
        ({"allOf": [{"$ref": "#/$defs/Level"}]}, '"2"', 2),
        ({"$ref": "#/$defs/Itself"}, "[1]", [1]),
        ({"$ref": "#/$defs/a~1b"}, '"true"', True),
        ({"$ref": "elsewhere.json"}, '"2"', "2"),
    ],
)
def test_references_values_and_unions_of_a_schema_say_the_types(schema, given, kept):
    f = tool("f")
    itself = {"anyOf": [{"$ref": "#/$defs/Itself"}, {"type": "null"}]}
    values = {"Unit": {"enum": ["celsius"]}, "Level": {"enum": [1, 2]}, "Itself": itself, "a/b": {"type": "boolean"}}
    f["function"]["parameters"] |= {"properties": {"x": schema}, "$defs": values}
    (call,) = read(f'<tool_call>{{"name": "f", "arguments": {{"x": {given}}}}}</tool_call>', tools=[f]).calls
    assert (call.status, call.arguments) == ("ok", {"x": kept})


def test_values_that_a_reference_excludes_are_bad_arguments():
    f = tool("f")
    level = {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]}
    f["function"]["parameters"] |= {"properties": {"x": level}, "$defs": {"Level": {"type": "integer"}}}
    (call,) = read('<tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>', tools=[f]).calls
    assert (call.status, call.detail) == ("bad_arguments", "the argument x of f is 'a'; expected integer or null")


def test_none_is_null_where_the_schema_allows_it():
    f = tool("f", s="string")
    f["function"]["parameters"]["properties"]["n"] = {"type": ["integer", "null"]}
    text = "<tool_call><function=f><parameter=n>None</parameter><parameter=s>None</parameter></function></tool_call>"
    (call,) = read(text, "qwen_xml", [f]).calls
    assert (call.status, call.arguments) == ("ok", {"n": None, "s": "None"})


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "Alice"}',
        'The author is {"name": "Alice"}.',
        '[{"name": "Alice"}, {"name": "Bob"}]',
        '{"answer": {"name": "Alice"}}',
        '{"answer": {"name": "f", "parameters": {"a": 1}}}',
        '{"type": "object", "name": "Alice"}',
        '{"parameters": {"a": 1}, "name": "Alice"}',
    ],
)
def test_an_answer_in_json_is_no_call(answer):
    for format in ("llama_json", "hermes"):
        found = read(f"{answer}<|eot_id|>", format)
        assert (found.calls, found.text) == ((), answer)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"name": "f"}', "ok"),
        ('{"type": "function", "function": "f", "parameters": {"a": 1}}', "ok"),
        ('{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', "ok"),
        ('Set {1: 2}: {"name": "f", "parameters": {"o": {"name": "g", "parameters": {}}}}', "ok"),
        ('{"name": "g", "parameters": {}}', "unknown_tool"),
        ('{"parameters": {"a": 1}, "name": "f"}', "invalid_json"),
        ('<|python_tag|>{"city": "x"}', "invalid_json"),
    ],
)
def test_what_llama_means_as_a_call_is_one(text, status):
    (call,) = read(text, "llama_json").calls
    assert (call.status, call.name) == (status, {"ok": "f", "unknown_tool": "g"}.get(status, ""))


def test_half_of_a_character_in_a_call_is_unreadable():
    call = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'.format
    for arguments in (r'{"s": "cafe \ud83d"}', r'{"o": {"\udc00": 1}}', r'"{\"s\": \"\\ud83d\"}"'):
        (found,) = read(call(arguments)).calls
        assert (found.status, "has half of a character" in found.detail) == ("invalid_json", True)
    assert statuses(r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>') == ["invalid_json"]
    assert statuses(call(r'{"s": "\ud83d\ude00"}')) == ["ok"]


def test_tools_take_larger_numbers_and_deeper_values_than_screens():
    deep = {"query": {"bool": {"must": [{"bool": {"should": [{"match": {"title": {"query": "x"}}}]}}]}}}
    body = json.dumps({"a": 1767225600000000000, "b": deep})
    assert statuses(f'<tool_call>{{"name": "f", "arguments": {body}}}</tool_call>') == ["ok"]
    text = "<parameter=a>1767225600000000000</parameter>"
    assert statuses(f"<tool_call><function=f>{text}</function></tool_call>", "qwen_xml") == ["ok"]
    for number in ("1e999", "1" * 400):
        assert statuses(f'<tool_call>{{"name": "f", "arguments": {{"a": {number}}}}}</tool_call>') == ["invalid_json"]
        assert statuses(f"[f(a={number})]", "pythonic") == ["invalid_json"]


@pytest.mark.parametrize("format", ["hermes", "deepseek", "deepseek_v3", "kimi", "harmony", "phi_tags"])
def test_no_arguments_may_be_written_as_nothing(format):
    for nothing in ('""',) if format in ("hermes", "phi_tags") else ("", "\n"):
        (call,) = read(WHOLE[format].replace('{"a": 1}', nothing), format).calls
        assert (call.status, call.name, call.arguments) == ("ok", "f", {})


@pytest.mark.parametrize("format", ["hermes", "qwen_xml", "llama_json", "mistral"])
def test_the_end_of_a_thought_inside_an_argument_is_text(format):
    text = (WHOLE | BARE)[format].replace('"a": 1', '"s": "a </think> b"')
    text = text.replace("<parameter=a>\n1", "<parameter=s>\na </think> b")
    found = read(f"Hm.\n{text}", format)
    assert [(call.status, call.arguments) for call in found.calls] == [("ok", {"s": "a </think> b"})]
    # a thought that only ends, with a call in it
    found = read(f"Maybe {text.replace('</think>', '')}</think>No.", format)
    assert (found.calls, found.text) == ((), "No.")


def test_replies_run_the_good_calls_and_other_settings_run_none():
    text = "".join(WHOLE["hermes"].replace("1", body) for body in ("1", "bad", "3"))
    config = ActionConfig(format="native")
    found = config.accept(read(text), text)
    assert [action.arguments for action in found.actions] == [{"a": 1}, {"a": 3}]
    assert [call.status for call in found.calls] == ["ok", "invalid_json", "ok"]
    assert (found.error, found.note) == ("invalid_json", "")
    for on_error in ("noop", "terminate"):
        config.on_parse_error = on_error
        found = config.accept(read(text), text)
        assert (found.actions, found.calls, found.error) == ((), (), "invalid_json")
        assert found.note.startswith("The answer could not be read: the JSON cannot be read")
    config = ActionConfig(format="native", max_actions=1)
    found = config.accept(read(text), text)
    assert [call.status for call in found.calls] == ["ok", "invalid_json", "too_many"]
    assert len(found.actions) == 1
    found = config.accept(read(text, finish="length"), text, cut=True)
    assert (found.actions, found.calls, found.error) == ((), (), "cut")


def test_defaults_follow_from_tools():
    config = ActionConfig()
    config.settle(tools=False)
    assert (config.name, config.limit, config.after_error, config.format) == ("json", 1, "terminate", None)
    config.settle(tools=True)
    assert (config.name, config.limit, config.after_error, config.format) == ("native", 64, "reply", "native")
    assert config.manual == ""
    with pytest.raises(ValueError, match=r"set conversation\.tools"):
        config.settle(tools=False)
    for options, told in (
        ({"format": "native", "strict": True}, r"actions\.strict has no effect with actions\.format native"),
        ({"format": "tool_call", "on_parse_error": "reply"}, "the format is tool_call; use noop"),
        (
            {"format": "tool_call", "max_invalid": 2},
            r"max_invalid has no effect without actions\.on_parse_error: reply",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            ActionConfig(**options).settle(tools=True)


@pytest.mark.parametrize("format", CALL_FORMATS)
def test_long_answers_take_linear_time(format):
    head = (WHOLE | BARE)[format]
    for part in (head, head[: len(head) // 2], "<think>", "{", '"', "[f(", "<parameter=a>", "<arg_key>a</arg_key>"):
        began = time.process_time()
        read(part * (20_000 // len(part)), format)
        assert time.process_time() - began < 2.0, part
