"""Reward for a numeric answer within a tolerance."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from mmrl.rewards.answers import Chat, gold_text, read_answer

MAX_NUMBER_CHARS = 64
PERCENT = ("strip", "value")

_PLAIN = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_POWER = r"(?:[eE]([+-]?\d{1,3})(?!\w)|\s*(?:[x×*]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*\{?\s*([+-]?\d{1,3})\}?)?"
_UNSIGNED = rf"({_PLAIN}){_POWER}"
TOKEN = re.compile(
    rf"(?P<sign>[+-]\s?)?(?:\\[dt]?frac\s*\{{\s*(?P<top>-?\d+)\s*\}}\s*\{{\s*(?P<under>-?\d+)\s*\}}"
    rf"|(?<![\w.^])(?:(?P<whole>\d+)\s+(?=\d+\s*/\s*\d))?{_UNSIGNED}(?:\s*/\s*(?P<over>\d+(?:\.\d+)?))?)"
    r"(?P<percent>\s*\\?%)?"
)
BETWEEN = re.compile(r"\s*(?:[-+*/×÷,;:]|\\times|\\cdot|\\div)?\s*")
UNIT_POWER = re.compile(r"\b(units?|[cdmk]?m|ft|in|yd|mi|s)\s*(?:\^\{?-?\d\}?|[²³]|[23]\b)")
# The text without the numbers must be words, units and layout: no digit, power, root, factorial or function.
EXPRESSION = re.compile(r"[\d^√∛π∞]|\*\*|#\s*!|[A-Za-z]\(\s*#|\\(?!text|mathrm|\$|%|[,;!\s])")


def number_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    absolute: float = 1e-6,
    relative: float = 0.0,
    percent: str = "strip",
    require_block: bool = True,
    **_: Any,
) -> list[float]:
    r"""Give 1 when the response gives one number and it is the right one.

    Read are integers, decimals, thousands separators (1,234), fractions (3/4, 1 3/4, \frac{3}{4}), powers of
    ten (1.2e3, 1.2 x 10^3) and percentages, with words or units around them. Different numbers in the answer,
    or an expression that would have to be computed, get 0.
    """
    if percent not in PERCENT or absolute < 0 or relative < 0:
        raise ValueError(f"number: percent is one of {', '.join(PERCENT)}, tolerances are not negative")
    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        wanted = read_number(gold_text(gold), percent)
        if wanted is None:
            raise ValueError(f"the right answer {str(gold)[:60]!r} is not one number; try the reward math or exact")
        text = read_answer(completion, prompt, require_block=require_block)
        value = None if text is None else read_number(text, percent)
        allowed = max(Fraction(absolute), Fraction(relative) * abs(wanted))
        rewards.append(float(value is not None and abs(value - wanted) <= allowed))
    return rewards


def read_number(text: str, percent: str = "strip") -> Fraction | None:
    """Read the one number of a text exactly."""
    text = unicodedata.normalize("NFKC", UNIT_POWER.sub(r"\1", text)).replace("−", "-").replace("⁄", "/")
    matches = list(TOKEN.finditer(text))
    values = {_value(match, percent) for match in matches}
    listed = any(BETWEEN.fullmatch(text[a.end() : b.start()]) for a, b in pairwise(matches))
    if len(values) != 1 or listed or EXPRESSION.search(TOKEN.sub("#", text)):
        return None
    return values.pop()


def _value(match: re.Match[str], percent: str) -> Fraction | None:
    if len(match[0]) > MAX_NUMBER_CHARS:
        return None
    try:
        value = _magnitude(match)
    except (ValueError, ZeroDivisionError):
        return None
    if match["percent"] and percent == "value":
        value /= 100
    return -value if (match["sign"] or "").startswith("-") else value


def _magnitude(match: re.Match[str]) -> Fraction:
    if match["top"] is not None:
        return Fraction(int(match["top"]), int(match["under"]))
    plain, exponent, power = match.group(5, 6, 7)
    value = Fraction(plain.replace("{,}", "").replace(",", ""))
    value *= Fraction(10) ** int(exponent or power or 0)
    if match["over"] is not None:
        value /= Fraction(match["over"])
    return value + int(match["whole"] or 0)
