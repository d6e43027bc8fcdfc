"""Reward by comparison: how often a judge prefers a response to the others to the same question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mmrl.rewards.answers import Chat
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
    """Give each response the mean probability that a judge prefers it to the others to the same question.

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
