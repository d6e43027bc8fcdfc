"""Rewards of single steps on screens by the public code of GUI-R1 and UI-R1, on borders, radii, words and formats."""

import json
import os
import re
import runpy
from datetime import datetime
from itertools import product
from typing import Any

from tests.golden.make.peers import Clone, Made

GUI_R1 = "ritzz-ai/GUI-R1", "d43eea2f1c52356077034ff2524642fc05e06c6a", "verl/utils/reward_score/r1gui.py"
UI_R1 = "lll6gg/UI-R1", "2fe9bf00c8aae85fcedaf56eb3e2780dbfe8075e", "src/ui_r1/src/open_r1/grpo_json_action_coord.py"
SCREEN = [1000, 800]
BOX = [100, 200, 300, 240]
"""Left, top, right, bottom in pixels of both images."""
SPOT = [500, 400]
NONE = "no input text"


def answer(action: str, x: float = -100, y: float = -100, text: str = NONE, key: str = "point") -> str:
    """A response as the prompts ask for it."""
    step: dict[str, Any] = {"action": action, key: [x, y]} | ({"input_text": text} if key == "point" else {})
    return f"<think>so</think><answer>{[step]}</answer>"


def row(text: str, action: str, **expected: Any) -> dict[str, Any]:
    return {"text": text, "action": action, "original_wh": SCREEN, "model_wh": SCREEN, **expected}


def gui_r1_cases() -> list[dict[str, Any]]:
    """Responses and expected steps for GUI-R1."""
    edges = product((99, 100, 101, 299, 300, 301), (199, 200, 201, 239, 240, 241))
    cases = [row(answer("click", x, y), "click", bbox=BOX) for x, y in edges]
    # 84^2 + 112^2 = 140^2
    near = [(500, 400), (640, 400), (639, 400), (584, 512), (583, 512), (500, 260), (500, 261), (599, 499), (598, 499)]
    cases += [row(answer("click", x, y), "click", point=SPOT) for x, y in near]
    words = ["a", "b", "c", "d", "e", "f"]
    for found, expected, common in product(range(4), range(1, 5), range(4)):
        if common <= min(found, expected):
            said = " ".join([*words[:common], *(f"x{place}" for place in range(found - common))])
            cases.append(row(answer("type", text=said), "type", input_text=" ".join(words[:expected])))
    texts = [
        ("Shang", "shanghai"),
        ("[A b]", "a B"),
        ("up", "UP"),
        ("down", "up"),
        ("left", "LEFT"),
        ("a a b", "b c d"),
    ]
    cases += [
        row(answer(name, text=said), name, input_text=told) for name in ("type", "scroll") for said, told in texts
    ]
    cases += [
        row(answer(said), told) for said, told in (("enter", "ENTER"), ("wait", "enter"), ("press_back", "click"))
    ]
    cases += [row(answer("select"), "select", input_text="a"), row(answer("open_app", text="Maps"), "open_app")]
    good = "[{'action': 'enter', 'point': [-100, -100], 'input_text': 'no input text'}]"
    shapes = [
        *(good, f"<think>a</think> \n<answer>{good}</answer>", f"<think></think><answer> {good}\n</answer>"),
        *(f"<answer>{good}</answer>", f"<think>a</think><answer>{good}</answer> ", f"<think>a<answer>{good}</answer>"),
        *(f"<think>a</think><answer>{body}</answer>" for body in ("[]", good[1:-1], good[:-1], "none", f"{good} x")),
        *(f"<think>a</think><answer>{good.replace('[-100, -100]', to)}</answer>" for to in ("[1.5, 2]", "[1]", "None")),
        f"<think>a</think><answer>{good.replace('-100, -100', '1, 2, 3, 4')}</answer>",
        f"<think>a</think><answer>{good.replace(chr(39), chr(34))}</answer>",
        f"<think>a</think><answer>{good.replace('enter', 'close/delete')}</answer>",
        "<think>a</think><answer>[{'action': 'enter', 'point': [1, 2]}]</answer>",
        "<think>a</think><answer>[{'action': 'enter', 'input_text': 'a'}]</answer>",
    ]
    cases += [row(text, "close/delete" if "close" in text else "enter") for text in shapes]
    first, second = ({"action": "click", "point": [1, 2]}, {"action": "x", "point": [200, 220]})
    odd = [
        str([first | {"input_text": "a"}, second | {"input_text": ""}]),
        "[{'action': 'click', 'point': (200, 220), 'input_text': 'a'}]",
    ]
    return cases + [row(f"<think>a</think><answer>{body}</answer>", "click", bbox=BOX) for body in odd]


def ui_r1_cases() -> list[dict[str, Any]]:
    """Responses and expected steps for UI-R1; the second half sees a smaller image."""
    edges = list(product((99, 100, 300, 301), (199, 200, 240, 241)))
    cases = [row(answer("click", x, y, key="coordinate"), "click", bbox=BOX) for x, y in edges]
    # the scale 1.25 of both sides is exact in binary, so that no rounding decides
    small = {"model_wh": [800, 640]}
    points = list(product((79, 80, 240, 241), (159, 160, 192, 193)))
    cases += [row(answer("click", x, y, key="coordinate"), "click", bbox=BOX) | small for x, y in points]
    said = [("scroll", "scroll"), ("scroll", "click"), ("Scroll", "scroll"), ("navigate_back", "navigate_back")]
    cases += [row(answer(found, 1, 1, key="coordinate"), told) for found, told in said]
    good = "[{'action': 'scroll', 'coordinate': [1, 2]}]"
    shapes = [
        f"<answer>{good}</answer>",
        f"<think>a</think>\n<answer>{good}</answer>",
        "<think>a</think><answer></answer>",
    ]
    odd = [good.replace("'scroll'", "scroll"), good.replace("'", '"')]
    shapes += [good, *(f"<think>a</think><answer>{body}</answer>" for body in odd)]
    return cases + [row(text, "scroll") for text in shapes]


def make(gui_r1: str, ui_r1: str) -> Made:
    first, second = Clone(gui_r1, *GUI_R1[:2]), Clone(ui_r1, *UI_R1[:2])
    return (
        "GUI-R1, arXiv 2504.10458; UI-R1, arXiv 2503.21620",
        {"gui_r1": gui_r1_cases(), "ui_r1": ui_r1_cases()},
        [_gui_r1(first), _ui_r1(second)],
        first,
        second,
    )


def _gui_r1(clone: Clone) -> dict[str, Any]:
    score = runpy.run_path(str(clone.path / GUI_R1[2]))["r1gui_compute_score"]
    found = [score(case["text"], _truth(case)) for case in gui_r1_cases()]
    parts = {"score": "overall", "format": "format", "accuracy": "accuracy"}
    numbers = {ours: [float(each[theirs]) for each in found] for ours, theirs in parts.items()}
    return {"program": clone.name, "calls": [f"{GUI_R1[2]}:r1gui_compute_score"], "relative": 1e-12} | numbers


def _truth(case: dict[str, Any]) -> str:
    box = case.get("bbox", case.get("point", [-100, -100]))
    return json.dumps({"action": case["action"], "gt_bbox": box, "input_text": case.get("input_text", NONE)})


def _ui_r1(clone: Clone) -> dict[str, Any]:
    # the file imports its trainer; these lines are the three rewards with what they call
    rewards = clone.lines(UI_R1[2], 73, 197, re=re, os=os, datetime=datetime)
    cases = ui_r1_cases()
    contents = [[{"content": case["text"]}] for case in cases]
    scales = [[a / b for a, b in zip(case["original_wh"], case["model_wh"], strict=True)] for case in cases]
    truths = [_solution(case) for case in cases]
    numbers = {
        "action": rewards.accuracy_reward_action(contents, truths, scales),
        "accuracy": rewards.accuracy_reward_coord(contents, truths, scales),
        "format": rewards.format_reward(contents),
    }
    names = ["accuracy_reward_action", "accuracy_reward_coord", "format_reward"]
    calls = [f"{UI_R1[2]}:{name}" for name in names]
    return {"program": clone.name, "calls": calls, "relative": 1e-12} | numbers


def _solution(case: dict[str, Any]) -> str:
    """The text that the public script makes of a row."""
    if "bbox" in case:
        return f"<answer>[{{'action': 'click' ,'coordinate': {case['bbox']} }}]</answer>"
    return f"<answer>[{{'action': '{case['action']}' ,'coordinate': [0,0,0,0]}}]</answer>"
