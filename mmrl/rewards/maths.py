"""Reward for mathematical answers, compared by math-verify; for worker processes only.

math-verify times itself with signals, which raise outside a main thread, and sympy can take forever, so the
suite calls this module in worker processes and nowhere else.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from mmrl.rewards.answers import Chat, gold_text, normalise, read_answer, read_number

# Their warning that a timeout is off is meant: the worker's own limit holds.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DELIMITERS = re.compile(r"\$|\\\(|\\\)|\\\[|\\\]")
MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)")
TWO_NUMBERS = re.compile(r"\d\s+[\d.]")
TEXT_COMMAND = re.compile(r"\\[A-Za-z]+\s*\{[A-Za-z\s]*\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|exp|log|max|min|sqrt")
ONLY_TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?!\w)")
DEGREES = re.compile(r"\s*(?:°|\^\s*\{?\s*(?:\\circ|o)(?![A-Za-z])\s*\}?)")
FRACTION = re.compile(r"[¼-¾⅐-⅞↉]")
_UNIT = r"(?:k?g|mg|lbs?|oz|[kcdmµ]?m|in|ft|yd|mi|mph|s|sec|min|hr?|m?[lL]|k?[NJWVA]|K|k?Hz|k?Pa|rad|units?)"
_POWER = r"(?:\s*\^\s*\{?\s*-?\d\s*\}?|[²³])?"
WITH_UNIT = re.compile(rf"(?P<number>[\d.,\s/eE+−-]*\d)\s*(?P<unit>{_UNIT}{_POWER}(?:\s*/\s*{_UNIT}{_POWER})?)")


def maths_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    several: str = "wrong",
    require_block: bool = True,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the answer is mathematically equal to the right one.

    Source: huggingface/Math-Verify; hiyouga/EasyR1 examples/reward_function/math.py.
    """
    if several not in ("wrong", "last"):
        raise ValueError(f"math: several is {several!r}; expected wrong or last")
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        # parsed once for all responses to a question
        expected = gold_text(gold)
        wanted = _parse_gold(expected)
        found = read_answer(completion, prompt, require_block=require_block, several=several)
        rewards.append(float(found is not None and _equal(expected, wanted, found)))
    return rewards


def _equal(expected: str, wanted: tuple[Any, ...], found: str) -> bool:
    text = ONLY_TEXT.fullmatch(expected)
    if text is not None:
        given = ONLY_TEXT.fullmatch(found)
        if normalise(text[1]) == normalise(given[1] if given is not None else found):
            return True
    # an answer that cannot be parsed is wrong, not a failure
    parsed = _parse(found)
    if parsed and verify(list(wanted), list(parsed), timeout_seconds=None):
        return True
    # only next to a number is "m" a unit; in a polynomial it is a variable
    (value, unit), (number, other) = _measured(expected), _measured(found)
    return value is not None and sum(map(str.isalpha, unit)) != 1 and value == number and other in ("", unit or other)


def _measured(text: str) -> tuple[Fraction | None, str]:
    """A number and the unit behind it; None if there is anything else."""
    text = DEGREES.sub("", DELIMITERS.sub(" ", text)).strip()
    found = WITH_UNIT.fullmatch(text)
    number, unit = (found["number"], found["unit"]) if found is not None else (text, "")
    plain = re.search(r"[^\W\d_]|\\", SCIENTIFIC.sub("", number)) is None
    return read_number(number) if plain else None, "".join(unit.split())


@lru_cache(maxsize=4096)
def _parse_gold(text: str) -> tuple[Any, ...]:
    parsed = _parse(text)
    if not parsed:
        raise ValueError(
            f"the reference answer {text[:60]!r} cannot be parsed as mathematics; use exact or choice for such rows"
        )
    return parsed


def _parse(text: str) -> tuple[Any, ...]:
    """Parse a whole answer; nothing when it is text, several numbers in a row, or not mathematics."""
    # "1 1/2" is one and a half, where LaTeX would multiply
    text = FRACTION.sub(_as_quotient, DELIMITERS.sub(" ", text).strip().rstrip(".").strip())
    text = MIXED.sub(r"\1\\frac{\2}{\3}", DEGREES.sub(r"^\\circ ", SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text))).strip()
    bare = TEXT_COMMAND.sub("", text)
    if any(FUNCTION.fullmatch(word) is None for word in WORD.findall(bare)):
        # Words would be read as products of letters ("four" = f*o*u*r): take the one number among them.
        value = None if "\\" in text or "=" in text else read_number(text)
        if value is None:
            return ()
        text = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    # two numbers in a row would be multiplied
    if not text or TWO_NUMBERS.search(text):
        return ()
    # the worker's own limit holds, so math-verify sets no signal
    found = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)
    # text that math-verify keeps as it is equals itself and nothing else
    return tuple(value for value in found if not isinstance(value, str))


def _as_quotient(match: re.Match[str]) -> str:
    """` 3/4` for ¾, apart from a number before it."""
    return " " + unicodedata.normalize("NFKC", match[0]).replace("⁄", "/")
