"""Actions as other models and benchmarks write them, UI-TARS, pyautogui, tool calls, as the actions of `mmrl.gui`.

Points stay in the model's coordinates. Readers and writers are as in `action_formats`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mmrl.agents.environments.action_formats import (
    SAY,
    Found,
    NamedAction,
    UnreadableError,
    actions_in,
    check_value,
    decode_json,
    parse_call,
    read_calls,
    write_calls,
)

MOST_PRESSES = 64
"""Presses of a key in one call of pyautogui."""
TOOL_OPEN, TOOL_CLOSE = "<tool_call>", "</tool_call>"
NUMBER = r"[-+]?\d{1,9}(?:\.\d{1,9})?"
NUMBERS = re.compile(NUMBER)
CODE_LINE = re.compile(r"^[ \t]*(?:(?:pyautogui|time)\.\w+\(.*|WAIT|DONE|FAIL)[ \t]*$", re.MULTILINE)


def read_tool_calls(text: str, strict: bool) -> Found:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a row; without one, what is said.

    Strict: nothing but white space between and behind the calls, and a closing tag each.
    """
    first, *pieces = text.split(TOOL_OPEN)
    if not pieces:
        return "", [(SAY, {"text": text})]
    actions: list[NamedAction] = []
    for piece in pieces:
        body, closing, rest = piece.partition(TOOL_CLOSE)
        if strict and (not closing or rest.strip()):
            if not closing:
                raise UnreadableError("malformed", "a <tool_call> is not closed")
            raise UnreadableError("extra_text", f"unexpected text after a call: {rest.strip()[:40]!r}")
        body = body.strip()
        value, end = decode_json(body)
        if body[end:].strip():
            raise UnreadableError("malformed", f"a <tool_call> holds more than one object: {body[end:].strip()[:40]!r}")
        actions += actions_in({"action": value}, strict)[1]
    return first.strip(), actions


def write_tool_calls(thought: str, actions: Sequence[NamedAction]) -> str:
    """The thought, and each action as a tool call; `say` alone is its text."""
    if [(name, [*arguments]) for name, arguments in actions] == [(SAY, ["text"])] and not thought:
        return str(actions[0][1]["text"])
    named = [{"name": name, "arguments": dict(given)} for name, given in actions]
    calls = [json.dumps(each, ensure_ascii=False, allow_nan=False) for each in named]
    return "\n".join([*([thought] if thought else []), *(f"{TOOL_OPEN}\n{call}\n{TOOL_CLOSE}" for call in calls)])


def read_ui_tars(text: str, strict: bool) -> Found:
    """Read `Thought: ...` and `Action: click(start_box='(x,y)')` of UI-TARS, also with `point='<point>x y</point>'`.

    The content of `finished` becomes the argument `answer` of `finish`. Actions of phones keep their names; arguments
    that an action does not have are handed on, so that the environment names them.

    Source: bytedance/UI-TARS codes/ui_tars/prompt.py (COMPUTER_USE_DOUBAO, MOBILE_USE_DOUBAO) and action_parser.py.
    """
    thought, calls = read_calls(text, strict)
    return thought, [_from_ui_tars(name, arguments) for name, arguments in calls]


def write_ui_tars(thought: str, actions: Sequence[NamedAction]) -> str:
    """The same, with `start_box` and `end_box`."""
    return write_calls(thought, [_to_ui_tars(name, arguments) for name, arguments in actions])


def _from_ui_tars(name: str, arguments: Mapping[str, Any]) -> NamedAction:
    if name not in UI_TARS:
        raise UnreadableError("wrong_shape", f"{name} is no action of UI-TARS, which has {', '.join(UI_TARS)}")
    own, given = UI_TARS[name], dict(arguments)
    found: dict[str, Any] = {}
    places: dict[str, tuple[str, ...]] = {"start" if own == "drag" else "point": ("start_box", "start_point", "point")}
    if own == "drag":
        places["end"] = ("end_box", "end_point")
    for argument, peers in places.items():
        peer = next((peer for peer in peers if peer in given), None)
        if peer is not None:
            found[argument] = _point(given.pop(peer))
    content = given.pop("content", None)
    if own in ENDS and content not in (None, ""):
        found["answer"] = content
    elif own not in ENDS and content is not None:
        found["text"] = content
    # arguments that are left over go to the environment, which names them in its message
    return own, found | given


def _to_ui_tars(name: str, arguments: Mapping[str, Any]) -> NamedAction:
    peer = next((peer for peer, own in UI_TARS.items() if own == name), None)
    names = {"point": "start_box", "start": "start_box", "end": "end_box", "text": "content", "answer": "content"}
    if peer is None or set(arguments) - {*names, "key", "direction", "app_name"}:
        raise ValueError(f"UI-TARS has no action {name} with the arguments {', '.join(arguments)}")
    boxes = {key: f"({value[0]},{value[1]})" for key, value in arguments.items() if key in ("point", "start", "end")}
    return peer, {names.get(key, key): boxes.get(key, value) for key, value in arguments.items()}


def _point(value: Any) -> list[float]:
    """The point of a text with two numbers, or the middle of a box of four."""
    numbers = [float(n) if "." in n else int(n) for n in NUMBERS.findall(value)] if isinstance(value, str) else value
    if not isinstance(numbers, list) or len(numbers) not in (2, 4) or any(type(n) not in (int, float) for n in numbers):
        raise UnreadableError("wrong_shape", f"{str(value)[:60]!r} is neither a point nor a box")
    if len(numbers) == 2:
        return numbers
    x1, y1, x2, y2 = numbers
    return [(x1 + x2) / 2, (y1 + y2) / 2]


def read_pyautogui(text: str, strict: bool) -> Found:
    """Read calls of pyautogui, one a line and fenced or not, and OSWorld's WAIT, DONE and FAIL.

    Nothing is run: other lines of code are ignored, where strict they are an error. Arguments that only time the motion
    of the mouse or the keys (`duration`, `tween`, `interval`) change nothing; all others are handed on or refused.

    Source: xlang-ai/OSWorld mm_agents/prompts.py; asweigart/pyautogui pyautogui/__init__.py (names of arguments).
    """
    lines = list(CODE_LINE.finditer(text))
    if not lines:
        raise UnreadableError("no_action", "no line of the answer is a call of pyautogui, or WAIT, DONE or FAIL")
    thought, code = text[: lines[0].start()], text[lines[0].start() :]
    for other in code.splitlines() if strict else ():
        if other.strip() and not CODE_LINE.fullmatch(other) and other.strip() != "```":
            raise UnreadableError("extra_text", f"among the calls is {other.strip()[:40]!r}")
    actions: list[NamedAction] = []
    # the position that a later call without coordinates refers to
    moved: list[float] | None = None
    for line in lines:
        word = line[0].strip()
        if word in OSWORLD:
            actions.append((OSWORLD[word], {}))
            continue
        # the module's name is cut off: `pyautogui.click` and `time.sleep` alike
        name, values, given = parse_call(word.partition(".")[2])
        arguments = _named_arguments(name, values, given)
        if name == "moveTo":
            moved = _xy(name, arguments)
            continue
        for own, details in _from_pyautogui(name, arguments, moved):
            moved = details.get("end", details.get("point", moved))
            actions.append((own, details))
    if not actions:
        raise UnreadableError("no_action", "the answer only moves the mouse")
    return re.sub(r"```\w*\s*$", "", thought).strip(), actions


def write_pyautogui(thought: str, actions: Sequence[NamedAction]) -> str:
    """The thought, and the calls fenced."""
    lines = [_to_pyautogui(name, dict(arguments)) for name, arguments in actions]
    return "\n".join([*([thought] if thought else []), "```python", *lines, "```"])


def _named_arguments(name: str, values: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    if name == "hotkey":
        _refuse_unknown(name, given, TIMING)
        # pyautogui takes both hotkey('ctrl', 'c') and hotkey(['ctrl', 'c'])
        keys = values[0] if len(values) == 1 and isinstance(values[0], list) else values
        return {"keys": [str(key) for key in keys]}
    if name not in PARAMETERS:
        raise UnreadableError(
            "wrong_shape", f"{name} is no action here; there are: {', '.join((*PARAMETERS, 'hotkey'))}"
        )
    known = PARAMETERS[name]
    if len(values) > len(known) or set(known[: len(values)]) & set(given):
        raise UnreadableError("wrong_shape", f"{name} takes {', '.join(known)}")
    _refuse_unknown(name, given, (*known, *TIMING))
    return dict(zip(known, values, strict=False)) | dict(given)


def _refuse_unknown(name: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    unknown = next((argument for argument in given if argument not in known), None)
    if unknown is not None:
        raise UnreadableError("wrong_shape", f"{name} takes no {unknown[:40]} here; it takes {', '.join(known)}")


def _from_pyautogui(name: str, given: Mapping[str, Any], moved: list[float] | None) -> list[NamedAction]:
    """The actions of a call; `moved` is the mouse position, as far as the answer states it."""
    stays = not {"x", "y"} & set(given)
    match name:
        case "click" | "doubleClick" | "rightClick":
            own = _clicks(name, given)
            return [(own, {"point": moved if moved is not None and stays else _xy(name, given)})]
        case "dragTo":
            if moved is None:
                raise UnreadableError("wrong_shape", "dragTo needs a moveTo before it, where the drag begins")
            if _button(name, given) != "left":
                raise UnreadableError("wrong_shape", "dragTo with another button than the left is no action here")
            return [("drag", {"start": moved, "end": _xy(name, given)})]
        case "write" | "typewrite":
            if isinstance(given.get("message"), list):  # names of keys
                return [("key", {"key": given["message"]})]
            return [("type", {"text": given.get("message")})]
        case "press":
            keys, presses = given.get("keys"), given.get("presses", 1)
            if type(presses) is not int or not 1 <= presses <= MOST_PRESSES:
                raise UnreadableError("wrong_shape", f"press takes 1 to {MOST_PRESSES} presses")
            pressed = (keys if isinstance(keys, list) else [keys]) * presses
            return [("key", {"key": pressed[0] if len(pressed) == 1 else pressed})]
        case "hotkey":
            return [("key", {"key": "+".join(given["keys"])})]
        case "scroll" | "vscroll" | "hscroll":
            amount = given.get("clicks")
            if not isinstance(amount, (int, float)) or isinstance(amount, bool):
                raise UnreadableError("wrong_shape", f"{name} takes a number of clicks")
            # positive clicks scroll up, or to the right
            ways = ("right", "left") if name == "hscroll" else ("up", "down")
            where = moved if stays else _xy(name, given)
            told = {"direction": ways[0] if amount > 0 else ways[1], "amount": abs(amount), "unit": "clicks"}
            return [("scroll", told | ({} if where is None else {"point": where}))]
    return [("wait", {"seconds": given.get("seconds")})]  # sleep


def _clicks(name: str, given: Mapping[str, Any]) -> str:
    """The action of a click; raises UnreadableError for buttons and numbers of clicks that are none."""
    clicks, button = given.get("clicks", 2 if name == "doubleClick" else 1), _button(name, given)
    own = CLICKS.get((button, clicks)) if type(clicks) is int else None
    if own is None:
        pressed = f"{name} with the {button} button, {str(clicks)[:20]} clicks,"
        raise UnreadableError("wrong_shape", f"{pressed} is no action here")
    return own


def _button(name: str, given: Mapping[str, Any]) -> str:
    button = given.get("button", "right" if name == "rightClick" else "left")
    if not isinstance(button, str) or button not in BUTTONS:
        raise UnreadableError("wrong_shape", f"{name} with the button {str(button)[:20]} is no action here")
    return BUTTONS[button]


def _to_pyautogui(name: str, given: dict[str, Any]) -> str:
    spoken = {own: word for word, own in OSWORLD.items()}
    if name in spoken and not given:
        return spoken[name]
    calls = {"click": "click", "double_click": "doubleClick", "right_click": "rightClick"}
    if name in calls and [*given] == ["point"]:
        return f"pyautogui.{calls[name]}(x={given['point'][0]!r}, y={given['point'][1]!r})"
    if name == "type" and [*given] == ["text"]:
        return f"pyautogui.write({given['text']!r})"
    if name == "scroll" and given.get("unit") == "clicks" and {"direction", "amount"} <= set(given):
        call = "scroll" if given["direction"] in ("up", "down") else "hscroll"
        clicks = given["amount"] if given["direction"] in ("up", "right") else -given["amount"]
        where = "".join(f", {key}={value!r}" for key, value in zip("xy", given.get("point", ()), strict=False))
        return f"pyautogui.{call}({clicks!r}{where})"
    if name == "drag" and {*given} == {"start", "end"}:
        (x, y), (to_x, to_y) = given["start"], given["end"]
        return f"pyautogui.moveTo({x!r}, {y!r})\npyautogui.dragTo({to_x!r}, {to_y!r})"
    if name == "wait" and [*given] == ["seconds"]:
        return f"time.sleep({given['seconds']!r})"
    if name == "key" and isinstance(given.get("key"), list) and len(given) == 1:
        return f"pyautogui.press({given['key']!r})"
    if name == "key" and [*given] == ["key"]:
        keys = str(given["key"]).split("+")
        return f"pyautogui.press({keys[0]!r})" if len(keys) == 1 else f"pyautogui.hotkey({', '.join(map(repr, keys))})"
    raise ValueError(f"pyautogui has no action {name} with the arguments {', '.join(given)}")


def _xy(name: str, given: Mapping[str, Any]) -> list[float]:
    point = [given.get("x"), given.get("y")]
    if isinstance(point[0], list) and point[1] is None:
        # pyautogui takes a pair instead of x
        point = point[0]
    if len(point) != 2 or any(type(number) not in (int, float) for number in point):
        raise UnreadableError("wrong_shape", f"{name} needs x and y")
    check_value(point)
    return point  # type: ignore[return-value]


UI_TARS = {
    "click": "click",
    "left_double": "double_click",
    "right_single": "right_click",
    "drag": "drag",
    "hotkey": "key",
    "type": "type",
    "scroll": "scroll",
    "wait": "wait",
    "finished": "finish",
    "call_user": "fail",
    "long_press": "long_press",
    "open_app": "open_app",
    "press_home": "press_home",
    "press_back": "press_back",
}
"""Actions of UI-TARS and those of `mmrl.gui`; those of phones are for environments that have them."""
ENDS = ("finish", "fail")
"""Actions that may have an answer."""
OSWORLD = {"WAIT": "wait", "DONE": "finish", "FAIL": "fail"}
BUTTONS = {"left": "left", "primary": "left", "right": "right", "secondary": "right", "middle": "middle"}
"""Buttons of the mouse by the names of pyautogui."""
CLICKS = {("left", 1): "click", ("left", 2): "double_click", ("right", 1): "right_click"}
"""Buttons and numbers of clicks, and their actions."""
TIMING = ("duration", "tween", "interval", "logScreenshot", "_pause")
"""Arguments of pyautogui that change no outcome."""
PARAMETERS = {
    "click": ("x", "y", "clicks", "interval", "button", "duration", "tween"),
    "doubleClick": ("x", "y", "interval", "button", "duration", "tween"),
    "rightClick": ("x", "y", "interval", "duration", "tween"),
    "moveTo": ("x", "y", "duration", "tween"),
    "dragTo": ("x", "y", "duration", "tween", "button"),
    "write": ("message", "interval"),
    "typewrite": ("message", "interval"),
    "press": ("keys", "presses", "interval"),
    "scroll": ("clicks", "x", "y"),
    "vscroll": ("clicks", "x", "y"),
    "hscroll": ("clicks", "x", "y"),
    "sleep": ("seconds",),
}
"""Functions of pyautogui, and time.sleep, with the names of their arguments in order."""
