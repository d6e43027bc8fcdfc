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

from mmrl.rewards.answers import (
    MAX_ANSWER_CHARS,
    Chat,
    completion_text,
    final_answer,
    final_part,
    gold_text,
    without_prompt,
)
from mmrl.rewards.number import read_number

__all__ = ["maths_reward"]

# Their warning that a timeout is off is meant: the worker's own limit holds.
logging.getLogger("math_verify").setLevel(logging.ERROR)

DELIMITERS = re.compile(r"\$|\\\(|\\\)|\\\[|\\\]")
MIXED = re.compile(r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)")
TWO_NUMBERS = re.compile(r"\d\s+[\d.]")
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
FUNCTIONS = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "exp",
        "sqrt",
        "max",
        "min",
    ]
)


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

    Args:
        prompts: B questions; a repetition of the question is cut out of the response.
        completions: B responses; read is the answer block, else \boxed{...}.
        answer: B right answers in LaTeX or plain notation.
        several: What different answer blocks or boxes are: "wrong", or "last" (the last counts, as in EasyR1).
        require_block: False also reads all that follows the thinking when there is no block and no box.

    Returns:
        B numbers, 0 or 1.

    Raises:
        ValueError: A right answer cannot be parsed; it is never taken for solved.

    Source: huggingface/Math-Verify; hiyouga/EasyR1 examples/reward_function/math.py.
    """
    from math_verify import verify

    rewards = []
    for prompt, completion, gold in zip(prompts, completions, answer, strict=True):
        wanted = _parse_gold(gold_text(gold))
        text = without_prompt(completion_text(completion), prompt)
        found = final_answer(text, several=several)
        if found is None and not require_block and "answer>" not in text and "\\boxed" not in text:
            found = final_part(text)
        given = _parse(found) if found and len(found) <= MAX_ANSWER_CHARS else ()
        rewards.append(float(bool(given) and verify(list(wanted), list(given), timeout_seconds=None)))
    return rewards


@lru_cache(maxsize=4096)
def _parse_gold(text: str) -> tuple[Any, ...]:
    parsed = _parse(text)
    if not parsed:
        raise ValueError(
            f"the right answer {text[:60]!r} cannot be parsed as mathematics; use exact or choice for such rows"
        )
    return parsed


def _parse(text: str) -> tuple[Any, ...]:
    """Parse a whole answer; nothing when it is text, several numbers in a row, or not mathematics."""
    from math_verify import LatexExtractionConfig, parse

    text = MIXED.sub(r"\1\\frac{\2}{\3}", DELIMITERS.sub(" ", text).strip().rstrip(".").strip())
    words = [word for word in WORD.findall(re.sub(r"\\[A-Za-z]+\s*\{[A-Za-z\s]*\}", "", text)) if word not in FUNCTIONS]
    if words:
        # Words would be read as products of letters ("four" = f*o*u*r): take the one number among them.
        value = None if "\\" in text or "=" in text else read_number(text)
        if value is None:
            return ()
        text = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    if not text or TWO_NUMBERS.search(text):
        return ()
    found = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]
    return tuple(value for value in found if not isinstance(value, str))
