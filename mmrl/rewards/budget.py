"""Reward for right answers near a budget of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.rewards.answers import Chat, exact_reward
from mmrl.rewards.choice import choice_reward
from mmrl.rewards.number import number_reward

CHECKS: dict[str, Callable[..., list[float]]] = {
    "exact": exact_reward,
    "number": number_reward,
    "choice": choice_reward,
}


def right_answers(
    owner: str, check: str, prompts: Sequence[Chat], completions: Sequence[Chat], **options: Any
) -> list[float]:
    """1 for right answers by the reward that `check` names, as a part of the reward `owner`."""
    if check not in CHECKS:
        raise ValueError(f"{owner}: check is {check!r}; expected one of {', '.join(CHECKS)}")
    return CHECKS[check](prompts, completions, **options)


def budget_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    answer: Sequence[Any],
    completion_lengths: Sequence[int],
    budget: Sequence[int | None] | None = None,
    check: str = "exact",
    half_period: float = 8192,
    longest: int = 4096,
    **options: Any,
) -> list[float]:
    """Give a right answer of n tokens with the budget b the smaller of u(n) - |b - n| / longest and u(b).

    u(n) = 4 cos(pi n / half_period). Wrong answers, and those of more than `longest` tokens, get 0; a right answer
    without a budget gets u(n). `check` names the reward that says whether an answer is right, which gets the further
    options.

    Source: HBPO, arXiv 2507.15844; ZJU-REAL/HBPO rllm/rewards/math_reward.py.
    """
    right = right_answers("budget", check, prompts, completions, answer=answer, **options)
    given = [None] * len(right) if budget is None else budget
    rows = zip(right, completion_lengths, given, strict=True)
    return [_value(int(n), b, half_period, longest) if one == 1 else 0.0 for one, n, b in rows]


def _value(length: int, budget: int | None, half_period: float, longest: int) -> float:
    if length > longest:
        return 0.0
    earned = 4 * math.cos(math.pi * length / half_period)
    if budget is None:
        return earned
    return min(earned - abs(budget - length) / longest, 4 * math.cos(math.pi * budget / half_period))
