"""Reward for mathematical answers, compared by math-verify; for worker processes only.

math-verify times itself with signals, which raise outside a main thread, and sympy can take forever, so the
suite calls this module in worker processes and nowhere else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from mmrl.rewards.answers import Chat, gold_text, read_answer, read_number

# Their warning that a timeout is off is meant: the worker's own limit holds.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DELIMITERS = re.compile(r"\$|\\\(|\\\)|\\\[|\\\]")
MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)")
TWO_NUMBERS = re.compile(r"\d\s+[\d.]")
TEXT_COMMAND = re.compile(r"\\[A-Za-z]+\s*\{[A-Za-z\s]*\}")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
FUNCTION = re.compile(r"(?:arc)?(?:sin|cos|tan)h?|cot|csc|sec|exp|log|max|min|sqrt")


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
        wanted = _parse_gold(gold_text(gold))
        found = read_answer(completion, prompt, require_block=require_block, several=several)
        # an answer that cannot be parsed is wrong, not a failure
        given = _parse(found) if found else ()
        rewards.append(float(bool(given) and verify(list(wanted), list(given), timeout_seconds=None)))
    return rewards


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
    text = MIXED.sub(r"\1\\frac{\2}{\3}", DELIMITERS.sub(" ", text).strip().rstrip(".").strip())
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
