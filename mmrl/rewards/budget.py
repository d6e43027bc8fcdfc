"""Rewards for correct responses near a token budget, and for responses that a judge prefers to the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mmrl.rewards.answers import Chat, choice_reward, exact_reward, number_reward
from mmrl.rewards.reward_loading import load_function

Judge = Callable[..., Sequence[float]]


def winrate_reward(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    judge: str | Judge,
    images: Sequence[Any] | None = None,
    **columns: Any,
) -> list[float]:
    """Mean probability that a judge prefers a response to the other responses to the same question.

    `judge` is a function or its `module:function`, called once for all pairs: judge(prompts=..., first=..., second=...,
    images=..., and the columns of the data) returns for each pair the probability, or 0 or 1, that the first response
    is the better one. Every pair is asked in both orders and averaged. A question with one response gives NaN, which
    counts as a failed reward, and so does a NaN of the judge.

    Source: Swamy et al., A Minimaximalist Approach to RLHF, arXiv 2401.04056.
    """
    function = load_function(judge) if isinstance(judge, str) else judge
    groups: dict[Any, list[int]] = {}
    shown = [()] * len(prompts) if images is None else images
    for row, (prompt, pictures) in enumerate(zip(prompts, shown, strict=True)):
        groups.setdefault((repr(prompt), *(each.tobytes() for each in pictures)), []).append(row)
    pairs = [(i, j) for rows in groups.values() for i in rows for j in rows if i != j]
    if not pairs:
        return [float("nan")] * len(prompts)
    lists = {name: value for name, value in columns.items() if isinstance(value, list) and len(value) == len(prompts)}
    given = {name: [value[i] for i, _ in pairs] for name, value in lists.items()} | {
        name: value for name, value in columns.items() if name not in lists
    }
    found = function(
        prompts=[prompts[i] for i, _ in pairs],
        first=[completions[i] for i, _ in pairs],
        second=[completions[j] for _, j in pairs],
        images=[shown[i] for i, _ in pairs],
        **given,
    )
    better = dict(zip(pairs, map(float, found), strict=True))
    if bad := [value for value in better.values() if not (0 <= value <= 1 or value != value)]:
        raise ValueError(f"winrate: the judge returned {bad[0]:g}; expected probabilities between 0 and 1")
    return [_rate(better, row, rows) for row, rows in _in_order(groups)]


def _in_order(groups: dict[Any, list[int]]) -> list[tuple[int, list[int]]]:
    return sorted((row, rows) for rows in groups.values() for row in rows)


def _rate(better: dict[tuple[int, int], float], row: int, rows: list[int]) -> float:
    others = [(better[row, other] + 1 - better[other, row]) / 2 for other in rows if other != row]
    return sum(others) / len(others) if others else float("nan")


CHECKS: dict[str, Callable[..., list[float]]] = {
    "exact": exact_reward,
    "number": number_reward,
    "choice": choice_reward,
}


def right_answers(
    owner: str, check: str, prompts: Sequence[Chat], completions: Sequence[Chat], **options: Any
) -> list[float]:
    """1 for responses that the reward `check` considers correct, as part of the reward `owner`."""
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
    piecewise: bool = False,
    **options: Any,
) -> list[float]:
    """Give a correct response of n tokens with budget b the minimum of u(n) - |b - n| / longest and u(b).

    u(n) = 4 cos(pi n / half_period). With `piecewise`, as in the paper, answers of up to b tokens get u(b) itself; the
    released code pays a short answer less, the farther it is below its budget. Wrong answers, and those of more than
    `longest` tokens, get 0; a right answer without a budget gets u(n). `check` names the reward that says whether an
    answer is right, which gets the further options.

    Source: HBPO, arXiv 2507.15844; ZJU-REAL/HBPO rllm/rewards/math_reward.py.
    """
    right = right_answers("budget", check, prompts, completions, answer=answer, **options)
    given = [None] * len(right) if budget is None else budget
    rows = zip(right, completion_lengths, given, strict=True)
    return [_value(int(n), b, half_period, longest, piecewise) if one == 1 else 0.0 for one, n, b in rows]


def _value(length: int, budget: int | None, half_period: float, longest: int, piecewise: bool) -> float:
    if length > longest:
        return 0.0
    earned = 4 * math.cos(math.pi * length / half_period)
    if budget is None:
        return earned
    allowed = 4 * math.cos(math.pi * budget / half_period)
    if piecewise and length <= budget:
        return allowed
    return min(earned - abs(budget - length) / longest, allowed)
