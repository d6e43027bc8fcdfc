"""Points in a model's response: how they are written, and two parsers that never raise.

`reference` is exactly the rule of InfiGUI-G1's public reward; `robust` also reads the formats of other models. Neither
guesses the meaning of a number from its size: the coordinate space is the caller's.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.errors import UserError, did_you_mean
from mmrl.gui.grounding.coords import CoordinateSpace, Point
from mmrl.rewards.answers import final_part
from mmrl.rewards.reward_loading import load_function

LOGGER = logging.getLogger("mmrl")
THINK, END_THINK = "<think>", "</think>"
LONGEST = 100_000
"""Maximum characters of a response that `robust` reads; no sampler produces more."""
MOST_SPANS = 256
"""Maximum number of bracketed parts of a response that `robust` tries."""


@dataclass(frozen=True)
class ParsedPoints:
    """The points of one response, in the model's order of preference."""

    points: tuple[Any, ...] = ()
    """Pairs of numbers in the model's space; after `reference` a pair may hold any JSON value."""
    kind: str = ""
    """Format of the points: a key of an object (point_2d, bbox_2d, coordinate), pairs, or one of `TEXT_FORMS`; empty
    without points."""
    error: str = ""
    """Key of `ANSWER_ERRORS`; empty for a usable response."""

    @property
    def ok(self) -> bool:
        """Whether there are points, including a refusal."""
        return self.error in ("", "refusal")


def parse_answer(text: str, mode: str = "robust", *, no_think: bool = False, max_answers: int = 0) -> ParsedPoints:
    """Read the points of a response.

    Args:
        text: the decoded answer.
        mode: "reference", "robust", or a `module:function` that returns the points of a text without its thinking.
        no_think: whether the answer is expected without a think block. `robust` removes a block in any case and does
            not require one; `reference` refuses an answer without the block, unless this is set.
        max_answers: more points are the error too_many; 0 is no limit.

    Returns:
        Points or an error; never raises for any text.

    Raises:
        UserError: there is no such parser.
    """
    if ":" in mode:
        found = _function_answer(text, mode)
    elif mode in PARSERS:
        found = PARSERS[mode](text, no_think)
    else:
        hint = did_you_mean(mode, PARSERS)
        raise UserError(f"unknown parser '{mode}'; {hint}available: {', '.join(PARSERS)}, or a module:function")
    if max_answers and len(found.points) > max_answers:
        return ParsedPoints(error="too_many")
    return found


def _function_answer(text: str, name: str) -> ParsedPoints:
    """The points that a user's function finds; one that raises found none."""
    # the cut bounds the work on a huge answer
    answer = final_part(text[:LONGEST])
    if answer is None:
        return ParsedPoints(error="no_think")
    function = load_function(name, what="parser")
    try:
        return _points_of([list(point) for point in function(answer)])
    except UserError:
        raise
    except Exception as error:
        # ValueError is how a function says that there is no point; anything else is a mistake in it
        if not isinstance(error, ValueError):
            _warn_of_function(name, type(error).__name__, str(error)[:200])
        return ParsedPoints(error="function")


@functools.cache
def _warn_of_function(name: str, kind: str, message: str) -> None:
    """Say once that a function raised something that means a mistake in it."""
    LOGGER.warning("%s raised %s: %s; such responses count as unreadable", name, kind, message)


def without_think(text: str, asked: bool = False) -> bool:
    """Whether to read a response without a think block: none was `asked` for, and it does not begin with one.

    A model that thinks unasked, as where its chat template opens the block, is read behind its thought.
    """
    return not asked and not text.startswith(THINK)


def answer_text(points: Sequence[Point], space: CoordinateSpace, labels: Sequence[str] | None = None) -> str:
    """Points as Qwen2.5-VL writes them: a JSON list of {"point_2d": [x, y]}, integers except for fractions."""
    fractions = space in (CoordinateSpace.REL1, CoordinateSpace.REL1_YX)
    pairs = [[round(number, 4) if fractions else round(number) for number in point] for point in points]
    if labels is None:
        return json.dumps([{"point_2d": pair} for pair in pairs])
    return json.dumps([{"label": label, "point_2d": pair} for label, pair in zip(labels, pairs, strict=True)])


def answer_tokens(labels: Sequence[str]) -> tuple[str, ...]:
    """Parts of labelled answers that should be one token each in a tiny tokenizer.

    A number then directly follows the token of its label, so that a random model learns to find an element by its label
    in one step of attention instead of two.
    """
    parts = ('[{"label": "', ']}, {"label": "', "]}]", ", ")
    return (*parts, *(f'{label}", "point_2d": [' for label in labels), *map(str, range(1001)))


def split_think(text: str) -> str | None:
    """The text after the single think block that opens a response; None if the block is malformed or missing.

    Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`extract_think_format`).
    """
    if not text.startswith(THINK) or text.count(THINK) != 1 or text.count(END_THINK) != 1:
        return None
    thought, _, rest = text[len(THINK) :].partition(END_THINK)
    return rest.strip() if thought.strip() and rest.strip() else None


def _reference(text: str, no_think: bool) -> ParsedPoints:
    """Read the first bracket and its balanced partner as JSON; one bad item invalidates the list.

    Source: InfiXAI/InfiGUI-G1 recipe/infigui-g1/reward_fn.py (`_extract_verifiable_answer`).
    """
    answer = text if no_think else split_think(text)
    if answer is None:
        return ParsedPoints(error="no_think")
    # as in the public code: brackets are counted without regard to quotes
    start = answer.find("[")
    end = _partner(answer, start) if start >= 0 else -1
    value = _json(answer[start : end + 1]) if end >= 0 else NOTHING
    if not isinstance(value, list):
        return ParsedPoints(error="not_json")
    if not value:
        return ParsedPoints(error="empty")
    pairs = [item.get("point_2d") if isinstance(item, dict) else None for item in value]
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return ParsedPoints(error="wrong_shape")
    return ParsedPoints(tuple(map(tuple, pairs)), "point_2d")  # type: ignore[arg-type]


def _partner(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`, brackets in JSON strings counted too; -1 without one."""
    depth = 0
    for match in re.finditer(r"[\[\]]", text[start:]):
        depth += 1 if match.group() == "[" else -1
        if depth == 0:
            return start + match.start()
    return -1


NOTHING = object()
"""Marks text that is not JSON; None is JSON."""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # ValueError: also integers of more digits than Python converts
        return NOTHING


def _robust(text: str, no_think: bool) -> ParsedPoints:
    """Read the first balanced list or object behind the thinking that holds points, else the first of `TEXT_FORMS`."""
    del no_think  # the block is removed where there is one
    answer = final_part(text[:LONGEST])
    if answer is None:
        return ParsedPoints(error="no_think")  # the block is never closed
    error = ""
    # outer before inner, so that a list is found before its first item
    for start, end in _spans(answer):
        value = _json(answer[start : end + 1])
        if value is not NOTHING:
            # a single object is a list of one
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, dict) and Y_FIRST in item for item in items):
                return ParsedPoints(error="wrong_shape")
            found = _points_of(items)
            if found.ok:
                return found
            # the first error is kept: it belongs to what the model most likely meant as its answer
            error = error or found.error
    for kind, pattern in TEXT_FORMS.items():
        written = pattern.search(answer)
        if written is not None:
            numbers = [float(number) for number in written.groups() if number is not None]
            # four numbers are a box, whose middle counts
            x, y = numbers if len(numbers) == 2 else [(numbers[i] + numbers[i + 2]) / 2 for i in (0, 1)]
            return ParsedPoints(((x, y),), kind, "refusal" if x < 0 and y < 0 else "")
    return ParsedPoints(error=error or "not_json")


def _spans(text: str) -> list[tuple[int, int]]:
    """Indices of the first opening brackets and braces with their partners, outer before inner."""
    opened: dict[str, list[int]] = {"]": [], "}": []}
    spans: list[tuple[int, int]] = []
    for match in re.finditer(r"[\[\]{}]", text):
        mark = match.group()
        if mark in "[{":
            opened["]" if mark == "[" else "}"].append(match.start())
        elif opened[mark]:
            spans.append((opened[mark].pop(), match.start()))
    return sorted(spans)[:MOST_SPANS]


def _points_of(value: list[Any]) -> ParsedPoints:
    """Read the points of a JSON list: objects, pairs, boxes of four numbers, or one pair or box."""
    if not value:
        return ParsedPoints(error="empty")
    if not any(isinstance(item, list | dict) for item in value):
        value = [value]
    points, kinds = [], []
    for item in value:
        kind, numbers = _numbers_of(item)
        if numbers is None:
            return ParsedPoints(error="wrong_shape")
        if not all(math.isfinite(number) for number in numbers):
            return ParsedPoints(error="non_finite")
        if len(numbers) == 4:  # halves first: the sum of two large numbers may be infinite
            x1, y1, x2, y2 = numbers
            numbers = (x1 / 2 + x2 / 2, y1 / 2 + y2 / 2)
        points.append(numbers)
        kinds.append(kind)
    refused = all(x < 0 and y < 0 for x, y in points)
    return ParsedPoints(tuple(points), kinds[0], "refusal" if refused else "")


def _numbers_of(item: Any) -> tuple[str, tuple[float, ...] | None]:
    """The key and the two or four numbers of an item; None if it has none."""
    if isinstance(item, list):
        # InternVL, GLM-V and UI-Venus write a box as four bare numbers
        return "pairs", _numbers(item, 4 if len(item) == 4 else 2)
    if isinstance(item, dict):
        for key, count in KEYS.items():
            if key in item:
                return key, _numbers(item[key], count)
    return "", None


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    if not isinstance(value, list) or len(value) != count:
        return None
    if any(isinstance(number, bool) or not isinstance(number, int | float) for number in value):
        return None
    try:
        return tuple(float(number) for number in value)
    except OverflowError:  # an integer beyond the largest float
        return (math.inf,) * count


KEYS = {"point_2d": 2, "coordinate": 2, "bbox_2d": 4}
"""Object keys that contain a point or a box, and their number of values."""
Y_FIRST = "box_2d"
"""Key of Gemini's and Gemma's boxes, whose y comes first. Its numbers alone would be read as a box with x first."""

GAP = r"\s{0,4}"
NUMBER = r"([-+]?\d{1,9}(?:\.\d{1,9})?)"
TWO = f"{NUMBER}{GAP},{GAP}{NUMBER}"
PAIR = rf"\({GAP}{TWO}{GAP}\)"
TEXT_FORMS: dict[str, re.Pattern[str]] = {
    "point": re.compile(rf"<point>{GAP}{NUMBER}[\s,]{{1,4}}{NUMBER}{GAP}</point>"),
    "start_box": re.compile(rf"start_box=['\"]?(?:<\|box_start\|>)?[(\[]{TWO}(?:{GAP},{GAP}{TWO})?[)\]]"),
    "box": re.compile(rf"{PAIR}{GAP},{GAP}{PAIR}"),
    "pyautogui": re.compile(
        rf"pyautogui\.\w{{1,20}}\({GAP}(?:x{GAP}={GAP})?{NUMBER}{GAP},{GAP}(?:y{GAP}={GAP})?{NUMBER}"
    ),
    "pair": re.compile(PAIR),
}
"""Points outside of JSON, tried in this order, a box as its centre: UI-TARS (point, start_box), the box tokens of
OS-Atlas and Qwen2-VL (which decoding may drop), pyautogui, and (x, y)."""

PARSERS: dict[str, Callable[[str, bool], ParsedPoints]] = {"reference": _reference, "robust": _robust}

ANSWER_ERRORS: dict[str, str] = {
    "no_think": "The think block is missing, not at the start, repeated, blank or never closed.",
    "empty": "The response is an empty list.",
    "not_json": "There is no bracketed list in valid JSON.",
    "wrong_shape": "A list was found, but an item is not a point or box of numbers.",
    "non_finite": "A coordinate is NaN or infinite.",
    "function": "The function that reads points raised an exception.",
    "too_many": "There are more points than max_answers.",
    "refusal": "All coordinates are negative, which means that the model considers the element absent.",
}
