"""AEPO's reward by its public code, on hits and misses of every rank and on answers in every wrong shape."""

import contextlib
import io
import logging
import runpy
from itertools import product

from tests.golden.make.aepo import COMMIT, REPOSITORY
from tests.golden.make.peers import Clone, Made

FILE = "recipe/infigui-g1/reward_fn.py"
BOX = {"x1": 10, "y1": 20, "x2": 30, "y2": 40}
HIT, GOOD = [20, 30], '[{"point_2d": [20, 30]}]'
MISSES = [[100, 7], [203, 51], [151, 118], [340, 3], [77, 240]]
THINK = "<think>the blue one</think>"
ODD = [
    *("", "[]", "no list", "[1]", f"[1] {GOOD}", f"see [this]: {GOOD}", GOOD.replace('"', "'"), GOOD[:-1], f"x{GOOD}y"),
    *('[{"point_2d": ["20", "30"]}]', '[{"point_2d": [NaN, 30]}]', '[{"point_2d": [-5, 30]}]', '[{"point_2d": [20]}]'),
    *('[{"point_2d": null}]', '[{"point": [20, 30]}]', "[[20, 30]]", '{"point_2d": [20, 30]}', f"{GOOD} {GOOD}"),
    *('[{"point_2d": [20, 30]}, {"point_2d": ["a", 3]}]', '[{"point_2d": [99, "a"]}]', '[{"point_2d": [true, 30]}]'),
    *('[{"point_2d": [20, 30], "label": "]"}]', '[{"point_2d": [20, 30], "label": "[ok]"}]', "[null]", "[[]]"),
    *(f'[{{"point_2d": [{x}, {y}]}}]' for x, y in product((9.999, 10, 30, 30.001), (19, 20, 40, 41))),
    *(f'[{{"point_2d": [{"9" * n}, 30]}}]' for n in (400, 5000)),
    '[{"point_2d": [1, 1]}, {"point_2d": [2, 2]}, {"point_2d": ["a", 3]}]',
    '[{"point_2d": [1e308, 1]}, {"point_2d": [-1e308, 2]}, {"point_2d": [3, 1e308]}]',
    *(
        f'[{{"point_2d": {a}}}, {{"point_2d": {b}}}, {{"point_2d": {c}}}]'
        for a, b, c in (
            ([0, 0], [20, 30], [40, 60]),
            ([0, 0], [20, 30], [41, 60]),
            ([5, 5], [5, 5], [20, 30]),
            ([0.1, 0.1], [0.2, 0.2], [0.3, 0.3]),
            ([1, 9], [2, 9], [20, 30]),
            ([7, 1], [7, 2], [7, 3]),
        )
    ),
    *(f'[{{"point_2d": {a}}}, {{"point_2d": {b}}}]' for a, b in (([5, 5], [5, 5]), (HIT, HIT))),
]
BLOCKS = [
    "",
    THINK,
    f" {THINK}",
    "<think> </think>",
    "<think>a",
    f"{THINK}{THINK}",
    "</think><think>",
    f"{THINK}</think>",
]


def make(path: str) -> Made:
    clone = Clone(path, REPOSITORY, COMMIT)
    reward = runpy.run_path(str(clone.path / FILE))["aer_gui_reward_function"]
    logging.disable(logging.CRITICAL)  # it logs the answers that make it raise
    cases = [{"text": text, "no_think": no_think} for text, no_think in _texts()]
    with contextlib.redirect_stderr(io.StringIO()):
        found = [reward("point", case["text"], BOX, {"no_think": case["no_think"]}) for case in cases]
    peer = {"program": clone.name, "calls": [f"{FILE}:aer_gui_reward_function"], "relative": 1e-12}
    numbers = {key: [float(row[key]) for row in found] for key in found[0] if key != "pred"}
    return "AEPO, arXiv 2508.05731", {"box": BOX, "cases": cases}, [peer | numbers], clone


def _texts() -> list[tuple[str, bool]]:
    ranked = [_answer(n, k) for n in range(1, 6) for k in range(n + 1)]
    plain = [(text, True) for text in [*ranked, *ODD]]
    thought = [(block + text, False) for block in BLOCKS for text in (GOOD, "[]", "", "no list")]
    return plain + thought + [(THINK + GOOD, True), (f"{THINK}\n{GOOD}\n", False)]


def _answer(answers: int, rank: int) -> str:
    """Answers with only the one of the given rank inside; none for rank 0."""
    points = [HIT if place == rank else MISSES[place - 1] for place in range(1, answers + 1)]
    return str([{"point_2d": point} for point in points]).replace("'", '"')
