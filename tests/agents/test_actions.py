import random
import re
import time

import pytest

from mmrl.agents.environments.environment import (
    FORMATS,
    PARSE_ERRORS,
    Action,
    ActionConfig,
    find_format,
    parse_answer,
    write_answer,
)
from mmrl.errors import UserError
from mmrl.fields import check_config

# Answer, then what strict and tolerant reading find: name and arguments of each action, or an error.
JSON = [
    ('{"thoughts": "t", "action": "up"}', [("up", {})], [("up", {})]),
    (' {"action": 3}\n', [("3", {})], [("3", {})]),
    ('{"action": {"name": "click", "arguments": {"x": 1}}}', [("click", {"x": 1})], [("click", {"x": 1})]),
    ('{"action": "click", "arguments": {"x": 1}}', [("click", {"x": 1})], [("click", {"x": 1})]),
    ('{"action": ["up", "down"]}', [("up", {}), ("down", {})], [("up", {}), ("down", {})]),
    ('{"action": ["a", "b", "c"]}', "too_many", [("a", {}), ("b", {})]),
    ('{"action": "click", "coordinate": [1, 2]}', "wrong_shape", [("click", {"coordinate": [1, 2]})]),
    ('{"name": "click", "arguments": {"x": 1}}', "wrong_shape", [("click", {"x": 1})]),
    ('{"action": {"action": "click", "x": 1}}', "wrong_shape", [("click", {"x": 1})]),
    ('{"action": {"name": "click", "args": {"x": 1}}}', "wrong_shape", [("click", {"x": 1})]),
    ('Sure!\n```json\n{"action": "up"}\n```', "no_action", [("up", {})]),
    ('a set {x} and {"box": [1]} then {"action": "up"}', "no_action", [("up", {})]),
    ('{"action": "up"} {"action": "down"}', "extra_text", [("up", {})]),
    ('{"action": "up"} done', "extra_text", [("up", {})]),
    ('{"action": "up"', "malformed", "malformed"),
    ("{'action': 'up'}", "malformed", "no_action"),
    ("up", "no_action", "no_action"),
    ('{"thoughts": "t"}', "wrong_shape", "no_action"),
    ('{"thoughts": 3, "action": "up"}', "wrong_shape", [("up", {})]),
    ('{"action": true}', "wrong_shape", "wrong_shape"),
    ('{"action": null}', "wrong_shape", "wrong_shape"),
    ('{"action": ""}', "wrong_shape", "wrong_shape"),
    ('{"action": 1.5}', "wrong_shape", "wrong_shape"),
    ('{"action": {"name": true}}', "wrong_shape", "wrong_shape"),
    ('{"action": {"name": "click", "arguments": [1]}}', "wrong_shape", "wrong_shape"),
    ('{"action": "%s"}' % ("x" * 201), "wrong_shape", "wrong_shape"),
    ('{"action": "up", "action": "down"}', "duplicate", "duplicate"),
    ('{"action": {"name": "click", "arguments": {"x": NaN}}}', "bad_number", "bad_number"),
    ('{"action": {"name": "click", "arguments": {"x": -Infinity}}}', "bad_number", "bad_number"),
    ('{"action": {"name": "click", "arguments": {"x": 1e999}}}', "bad_number", "bad_number"),
    (r'{"action": {"name": "say", "arguments": {"x": "\ud83d"}}}', "malformed", "malformed"),
    (r'{"action": {"name": "say", "arguments": {"\ud83d": 1}}}', "malformed", "malformed"),
    ('{"action": {"name": "click", "arguments": {"x": 1%s}}}' % ("0" * 30), "bad_number", "bad_number"),
    ('{"action": {"name": "x", "arguments": {"y": ' + "[" * 9 + "]" * 9 + "}}}", "too_deep", "too_deep"),
    ('{"action": ' + "[" * 3000 + "1" + "]" * 3000 + "}", "too_deep", "too_deep"),
    ('<think>{"action": "down"}</think>{"action": "up"}', [("up", {})], [("up", {})]),
    ('<think>{"action": "down"}', "unfinished_thought", "unfinished_thought"),
    ("<think>t</think>  ", "empty", "empty"),
    ("", "empty", "empty"),
]
CALL = [
    ("Thought: t\nAction: click(start_box='(10,20)')", *[[("click", {"start_box": "(10,20)"})]] * 2),
    ("Action: wait()", [("wait", {})], [("wait", {})]),
    ("Action: a(x=-1.5, y=[1, (2, 'b')], z={'k': None}, w=True)",
     *[[("a", {"x": -1.5, "y": [1, [2, "b"]], "z": {"k": None}, "w": True})]] * 2),
    ("Action: a(\n  x=1,\n  y=2\n)", [("a", {"x": 1, "y": 2})], [("a", {"x": 1, "y": 2})]),
    ("Action: a(x=1)\n\nb(y='2')", [("a", {"x": 1}), ("b", {"y": "2"})], [("a", {"x": 1}), ("b", {"y": "2"})]),
    ("Action: a()\nb()", "malformed", [("a", {}), ("b", {})]),
    ("Action: a()\n\nb()\n\nc()", "too_many", [("a", {}), ("b", {})]),
    ("Action: a()\n\nThat should do.", "malformed", [("a", {})]),
    ("Action: a()\nAction: b()", "no_action", [("b", {})]),
    ("I click.\nAction: a()", "extra_text", [("a", {})]),
    ("I click.\n```\na(x=1)\n```", "no_action", [("a", {"x": 1})]),
    (r"Action: type(content='it\'s\n')", [("type", {"content": "it's\n"})], [("type", {"content": "it's\n"})]),
    ("Action: type(content='it's')", "malformed", [("type", {"content": "it's"})]),
    ("Action: type(content='it's', x='1')", "malformed", "malformed"),
    ("Action: click(10, 20)", "wrong_shape", "wrong_shape"),
    ("Action: click(**{'x': 1})", "malformed", "malformed"),
    ("Action: click(x=1, x=2)", "duplicate", "duplicate"),
    ("Action: click(x={'a': 1, 'a': 2})", "duplicate", "duplicate"),
    ("Action: click(x={1: 2})", "wrong_shape", "wrong_shape"),
    ("Action: click(x=1e999)", "bad_number", "bad_number"),
    ("Action: click(x=nan)", "malformed", "malformed"),
    ("Action: click(x=__import__('os').system('touch /tmp/no'))", "malformed", "malformed"),
    ("Action: click(x=f'{1}')", "malformed", "malformed"),
    ("Action: click(x=1).y", "malformed", "malformed"),
    ("Action: click(x=1)(y=2)", "malformed", "malformed"),
    ("Action: click(x=2**9)", "malformed", "malformed"),
    ("Action: click(x=1j)", "malformed", "malformed"),
    ("Action: click(x=b'a')", "malformed", "malformed"),
    ("Action: click(x=1 y=2)", "malformed", "malformed"),
    ("Action: click(x=1", "malformed", "malformed"),
    ("Action: click", "malformed", "malformed"),
    ("Action: click(x='\0')", "malformed", [("click", {"x": "\0"})]),
    ("Action: click(x=" + "[" * 12 + "]" * 12 + ")", "too_deep", "too_deep"),
    ("Action: click(x='" + "a" * 20_000 + "')", "too_long", "too_long"),
    ("Nothing to do.", "no_action", "no_action"),
]  # fmt: skip
TAG = [
    ("It is above. <action>up</action>", [("up", {})], [("up", {})]),
    ("<action> 3 </action>\n", [("3", {})], [("3", {})]),
    ("<action>move up</action>", [("move up", {})], [("move up", {})]),
    ("<action>click(x=1)</action>", [("click", {"x": 1})], [("click", {"x": 1})]),
    ("<action>a</action> <action>b</action>", [("a", {}), ("b", {})], [("a", {}), ("b", {})]),
    ("<action>a</action> or <action>b</action>", "extra_text", [("a", {}), ("b", {})]),
    ("<action>a</action>" * 3, "too_many", [("a", {}), ("a", {})]),
    ("<action>a</action> done", "extra_text", [("a", {})]),
    ("<ACTION>'a'</Action>", "no_action", [("a", {})]),
    ("<action>a", "malformed", [("a", {})]),
    ("<action></action>", "wrong_shape", "wrong_shape"),
    ("<action>a\nb</action>", "wrong_shape", "wrong_shape"),
    ("<action>click(x=1, x=1)</action>", "duplicate", "duplicate"),
    ("</action>", "no_action", "no_action"),
    ("<think>a</think>b<action>c</action>", [("c", {})], [("c", {})]),
]
TOOLS = [
    ('<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', *[[("a", {"x": 1})]] * 2),
    ('t\n<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>', *[[("a", {}), ("b", {})]] * 2),
    ('<tool_call>{"name": "a"}', "malformed", [("a", {})]),
    ('<tool_call>{"name": "a"}</tool_call> done', "extra_text", [("a", {})]),
    ('<tool_call>{"name": "a"} {}</tool_call>', "malformed", "malformed"),
    ("<tool_call>a()</tool_call>", "malformed", "malformed"),
    ("the answer is 4", *[[("say", {"text": "the answer is 4"})]] * 2),
]
UI_TARS = [
    ("Thought: t\nAction: click(start_box='(10,20)')", *[[("click", {"point": [10, 20]})]] * 2),
    ("Action: click(start_box='<|box_start|>(10,20)<|box_end|>')", *[[("click", {"point": [10, 20]})]] * 2),
    ("Action: left_double(point='<point>10 20</point>')", *[[("double_click", {"point": [10, 20]})]] * 2),
    ("Action: right_single(start_box='[10, 20, 30, 40]')", *[[("right_click", {"point": [20, 30]})]] * 2),
    ("Action: drag(start_box='(1,2)', end_box='(3,4)')", *[[("drag", {"start": [1, 2], "end": [3, 4]})]] * 2),
    ("Action: type(content='a b')", *[[("type", {"text": "a b"})]] * 2),
    ("Action: hotkey(key='ctrl c')", *[[("key", {"key": "ctrl c"})]] * 2),
    (
        "Action: scroll(start_box='(1,2)', direction='down')",
        *[[("scroll", {"point": [1, 2], "direction": "down"})]] * 2,
    ),
    ("Action: wait()", *[[("wait", {})]] * 2),
    ("Action: finished(content='it is 4')", *[[("finish", {"answer": "it is 4"})]] * 2),
    ("Action: finished()", *[[("finish", {})]] * 2),
    ("Action: finished(content='')", *[[("finish", {})]] * 2),
    ("Action: call_user()", *[[("fail", {})]] * 2),
    ("Action: call_user(content='which one?')", *[[("fail", {"answer": "which one?"})]] * 2),
    ("Action: long_press(point='<point>10 20</point>')", *[[("long_press", {"point": [10, 20]})]] * 2),
    ("Action: open_app(app_name='Maps')", *[[("open_app", {"app_name": "Maps"})]] * 2),
    ("Action: press_back()", *[[("press_back", {})]] * 2),
    ("Action: press_home()", *[[("press_home", {})]] * 2),
    # what an action does not have is handed on, and the environment names it
    ("Action: click(start_box='(1,2)', end_box='(3,4)')", *[[("click", {"point": [1, 2], "end_box": "(3,4)"})]] * 2),
    ("Action: wait(time=5)", *[[("wait", {"time": 5})]] * 2),
    ("Action: click(start_box='(10)')", "wrong_shape", "wrong_shape"),
    ("Action: fly()", "wrong_shape", "wrong_shape"),
]
PYAUTOGUI = [
    ("```python\npyautogui.click(x=10, y=20)\n```", *[[("click", {"point": [10, 20]})]] * 2),
    ("pyautogui.click(10, 20, clicks=2)", *[[("double_click", {"point": [10, 20]})]] * 2),
    ("pyautogui.click(10, 20, button='right')", *[[("right_click", {"point": [10, 20]})]] * 2),
    ("pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4, duration=1)", *[[("drag", {"start": [1, 2], "end": [3, 4]})]] * 2),
    ("pyautogui.moveTo(1, 2)\npyautogui.click()", *[[("click", {"point": [1, 2]})]] * 2),
    (
        "pyautogui.moveTo(1, 2)\npyautogui.scroll(-5)",
        *[[("scroll", {"direction": "down", "amount": 5, "unit": "clicks", "point": [1, 2]})]] * 2,
    ),
    (
        "pyautogui.moveTo(9, 9)\npyautogui.click(1, 2)\npyautogui.dragTo(3, 4)",
        *[[("click", {"point": [1, 2]}), ("drag", {"start": [1, 2], "end": [3, 4]})]] * 2,
    ),
    (
        "pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4)\npyautogui.hscroll(2)",
        *[
            [
                ("drag", {"start": [1, 2], "end": [3, 4]}),
                ("scroll", {"direction": "right", "amount": 2, "unit": "clicks", "point": [3, 4]}),
            ]
        ]
        * 2,
    ),
    ("pyautogui.press('tab', presses=2)", *[[("key", {"key": ["tab", "tab"]})]] * 2),
    ("pyautogui.press('tab', presses=10**9)", "malformed", "malformed"),
    ("pyautogui.press('tab', presses=1000000)", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, clicks=3)", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, clicks=2, button='right')", "wrong_shape", "wrong_shape"),
    ("pyautogui.write('a b', interval=0.1)", *[[("type", {"text": "a b"})]] * 2),
    ("pyautogui.hotkey('ctrl', 'c')", *[[("key", {"key": "ctrl+c"})]] * 2),
    ("pyautogui.press(['tab', 'enter'])", *[[("key", {"key": ["tab", "enter"]})]] * 2),
    ("pyautogui.write(['a', 'enter'])", *[[("key", {"key": ["a", "enter"]})]] * 2),
    ("pyautogui.scroll(-5)", *[[("scroll", {"direction": "down", "amount": 5, "unit": "clicks"})]] * 2),
    ("pyautogui.vscroll(3)", *[[("scroll", {"direction": "up", "amount": 3, "unit": "clicks"})]] * 2),
    ("pyautogui.hscroll(-3)", *[[("scroll", {"direction": "left", "amount": 3, "unit": "clicks"})]] * 2),
    ("pyautogui.click(1, 2, button='middle')", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, 1, 0.0, 'middle')", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, button=3)", "wrong_shape", "wrong_shape"),
    ("pyautogui.middleClick(1, 2)", "wrong_shape", "wrong_shape"),
    ("pyautogui.doubleClick(1, 2, button='right')", "wrong_shape", "wrong_shape"),
    ("pyautogui.doubleClick(1, 2, button='middle')", "wrong_shape", "wrong_shape"),
    ("pyautogui.rightClick(1, 2, button='left')", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, clicks=True)", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, times=2)", "wrong_shape", "wrong_shape"),
    ("pyautogui.click(1, 2, duration=0.5, tween='linear', button='primary')", *[[("click", {"point": [1, 2]})]] * 2),
    ("pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4, button='right')", "wrong_shape", "wrong_shape"),
    ("pyautogui.moveTo(1, 2)\npyautogui.dragTo(3, 4, mouseDownUp=False)", "wrong_shape", "wrong_shape"),
    ("pyautogui.hotkey('ctrl', 'c', interval=0.1)", *[[("key", {"key": "ctrl+c"})]] * 2),
    ("pyautogui.hotkey('ctrl', keys='c')", "wrong_shape", "wrong_shape"),
    ("pyautogui.keyDown('ctrl')", "wrong_shape", "wrong_shape"),
    ("import pyautogui\npyautogui.rightClick(1, 2)", *[[("right_click", {"point": [1, 2]})]] * 2),
    (
        "pyautogui.click(1, 2)\nx = 3\npyautogui.press('a')",
        "extra_text",
        [("click", {"point": [1, 2]}), ("key", {"key": "a"})],
    ),
    ("time.sleep(1)", *[[("wait", {"seconds": 1})]] * 2),
    ("Done.\nDONE", *[[("finish", {})]] * 2),
    ("pyautogui.click(__import__('os').getpid(), 2)", "malformed", "malformed"),
    ("pyautogui.click(1)", "wrong_shape", "wrong_shape"),
    ("pyautogui.screenshot()", "wrong_shape", "wrong_shape"),
    ("pyautogui.moveTo(1, 2)", "no_action", "no_action"),
    ("click(1, 2)", "no_action", "no_action"),
]
ROWS = [
    (format, *row)
    for format, rows in (
        *(("json", JSON), ("call", CALL), ("tag", TAG), ("tool_call", TOOLS)),
        *(("ui_tars", UI_TARS), ("pyautogui", PYAUTOGUI)),
    )
    for row in rows
]


def found(text, format, strict):
    parsed = parse_answer(text, format, strict=strict, max_actions=2)
    assert (parsed.error is None) == bool(parsed.actions)
    assert parsed.error is None or parsed.error in PARSE_ERRORS
    assert all(action.text == text for action in parsed.actions)
    return parsed.error or [(action.name, action.arguments) for action in parsed.actions]


@pytest.mark.parametrize(("format", "text", "strict", "tolerant"), ROWS, ids=lambda value: str(value)[:40])
def test_what_an_answer_means(format, text, strict, tolerant):
    assert found(text, format, True) == strict
    assert found(text, format, False) == tolerant


def test_every_error_is_reached():
    codes = {code for _, _, *both in ROWS for code in both if isinstance(code, str)}
    assert codes == set(PARSE_ERRORS)


@pytest.mark.parametrize("format", FORMATS)
def test_examples_are_read_in_both_modes(format):
    example = FORMATS[format].example
    assert found(example, format, True) == found(example, format, False)
    assert isinstance(found(example, format, True), list)


def test_thoughts_are_the_text_around_the_action():
    thoughts = {
        "json": '<think>first</think>{"thoughts": "then", "action": "up"}',
        "call": "first</think>Thought: then\nAction: up()",
        "tag": "<think>first</think>then <action>up</action>",
    }
    assert {parse_answer(text, format).thought for format, text in thoughts.items()} == {"first\nthen"}


LONG = {
    "brackets": "(" * 100_000,
    "braces": "{" * 100_000,
    "spaced braces": "{ " * 50_000,
    "nested objects": '{"a":' * 20_000,
    "nested lists": '{"action": ' + "[1," * 33_000,
    "escaped quotes": '{\\"' * 33_000,
    "broken objects": '{"a":"' * 16_000,
    "a long text": '{"action": "' + "x" * 100_000,
    "digits": '{"action": 1' + "0" * 100_000 + "}",
    "minus signs": "Action: f(x=" + "-" * 19_000,
    "deep lists": "Action: f(x=" + "[" * 19_000,
    "backslashes": "Action: f(x='" + "\\" * 19_001 + "')",
    "quotes": "Action: f(x='" + "'" * 19_000 + "')",
    "calls": "f()\n" * 25_000,
    "closed lines": "Action:" + " )\n" * 33_000,
    "open tags": "<action>" * 12_000,
    "tags": "<action>x</action>" * 5_500,
    "thinking": "<think>" * 14_000,
    "lines": "\n" * 100_000,
    "words": "x " * 50_000,
    "half a pair": "\ud800" * 100_000,
}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_answers_take_linear_time(text, format):
    begin = time.process_time()
    for strict in (True, False):
        found(text, format, strict)
    assert time.process_time() - begin < 5.0, "milliseconds where it is linear, minutes where it is not"


def test_whatever_is_written_does_not_raise():
    pieces = [
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "\\",
        ":",
        ",",
        "(",
        ")",
        "=",
        "action",
        "name",
        "Action:",
        "<action>",
        "\n",
    ]
    pieces += ["</action>", "<think>", "</think>", "1", "-", "NaN", "true", " ", "f", "\0", "\ud800", "```", "ü"]
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 30)))
        for format in FORMATS:
            for strict in (True, False):
                found(text, format, strict)


def test_too_long_answers_are_not_read():
    assert found("x" * 1_000_001, "tag", False) == "too_long"


def test_configuration_reads_as_it_says():
    config = ActionConfig("tag", strict=True)
    assert config.parse("<action>a</action>").actions[0].name == "a"
    assert config.parse("<action>a</action><action>b</action>").error == "too_many"
    for bad in (ActionConfig("xml"), ActionConfig(max_actions=0), ActionConfig(on_parse_error="retry")):
        with pytest.raises(ValueError, match=re.escape("is ")):
            check_config(bad)


POINT = {"point": [10, 20]}


@pytest.mark.parametrize("format", ["tool_call", "ui_tars", "pyautogui"])
def test_demonstrations_in_the_formats_of_other_models(format):
    for name, arguments in (("click", POINT), ("double_click", POINT), ("type", {"text": "it's \\n 4"}), ("wait", {})):
        text = write_answer([Action(name, arguments)], format, "look")
        assert found(text, format, True) == [(name, arguments)]
    more = {
        "ui_tars": [("finish", {"answer": "4"}), ("long_press", POINT), ("drag", {"start": [1, 2], "end": [3, 4]})],
        "pyautogui": [
            *(("scroll", {"direction": way, "amount": 3, "unit": "clicks"}) for way in ("up", "down", "left", "right")),
            ("scroll", {"direction": "down", "amount": 2, "unit": "clicks", "point": [1, 2]}),
            ("drag", {"start": [1, 2], "end": [3, 4]}),
            ("key", {"key": ["tab", "enter"]}),
            ("wait", {"seconds": 2}),
        ],
    }
    for name, arguments in more.get(format, ()):
        assert found(write_answer([Action(name, arguments)], format), format, True) == [(name, arguments)]
    if format != "tool_call":
        with pytest.raises(ValueError, match="fly"):
            write_answer([Action("fly", {})], format)


@pytest.mark.parametrize("format", FORMATS)
def test_an_answer_that_was_cut_has_no_action_in_any_format(format):
    config = ActionConfig(format)
    assert config.parse(FORMATS[format].example).actions
    for length in range(len(FORMATS[format].example) + 1):
        parsed = config.parse(FORMATS[format].example[:length], cut=True)
        assert (parsed.actions, parsed.error) == ((), "cut")
    assert "cut" not in PARSE_ERRORS
    assert parsed.note.startswith("Nothing was executed: the answer was cut")


def test_a_users_function_reads_actions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def read(text, strict):\n    '''Answer with a number.'''\n"
        "    return 'because', [('move', {'by': int(text)})]\n"
    )
    name = f"{file}:read"
    check_config(ActionConfig(name))
    parsed = ActionConfig(name).parse("<think>so</think>3")
    assert (parsed.thought, [(a.name, a.arguments) for a in parsed.actions]) == ("so\nbecause", [("move", {"by": 3})])
    assert ActionConfig(name).parse("three").error == "no_action"
    assert find_format(name).manual == "Answer with a number."
    with pytest.raises(ValueError, match="but not write"):
        write_answer([Action("move", {"by": 3})], name)


def test_an_unknown_format_is_an_error_with_a_suggestion():
    with pytest.raises(UserError, match="unknown action format 'jsn'; did you mean 'json'"):
        find_format("jsn")


def test_refused_arguments_are_named():
    named = {
        "pyautogui.click(1, 2, button='middle')": "middle",
        "pyautogui.click(1, 2, clicks=3)": "3 clicks",
        "pyautogui.doubleClick(1, 2, button='right')": "right button, 2",
        "pyautogui.click(1, 2, times=2)": "times",
        "pyautogui.middleClick(1, 2)": "middleClick",
    }
    for text, word in named.items():
        assert word in parse_answer(text, "pyautogui").detail


CLICK = {"name": "click", "parameters": {"properties": {"bid": {"type": "string"}, "button": {"type": "string"}}}}


@pytest.mark.parametrize("text", ["Action: {}", "I click. <action>{}</action>", '{{"action": "{}"}}'])
def test_arguments_without_names_are_named_by_the_tool_that_is_called(text):
    tools, format = [{"type": "function", "function": CLICK}], {"A": "call", "I": "tag", "{": "json"}[text[0]]

    def read(call, **options):
        return parse_answer(text.format(call), format, **options)

    for call, expected in (("click('12')", {"bid": "12"}), ("click('12', 'left')", {"bid": "12", "button": "left"})):
        (action,) = read(call, tools=tools).actions
        assert (action.name, action.arguments) == ("click", expected)
    (action,) = read("click('12', button='left')", tools=tools).actions
    assert action.arguments == {"bid": "12", "button": "left"}
    assert read("click('12', 'left', 3)", tools=tools).error == "wrong_shape"
    assert read("click('12', bid='13')", tools=tools).error == "duplicate"
    assert read("tap('12')", tools=tools).error == "wrong_shape"
    assert read("click('12')").error == "wrong_shape"
    assert read("click('12')", tools=tools, strict=True).error is not None or format == "json"
    config = ActionConfig(format)
    assert config.parse(text.format("click('12')"), tools=tools).actions[0].arguments == {"bid": "12"}
