"""A judge and a meta judge of countdown without models: criteria that are computed, added one after the other.

The rubric is a list of criteria, a line each. The judge gives the share that an answer meets, and the meta judge adds
the next criterion once most answers earn most of what there is, as MPO's does against answers that only please the
judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.rewards.answers import Chat, read_answer
from mmrl.vlm.toy.countdown import evaluate


def _value(answer: str | None) -> tuple[float, list[int]]:
    try:
        value, numbers = evaluate(answer or "")
    except ValueError:
        return float("nan"), []
    return float(value), sorted(numbers)


CRITERIA: dict[str, Callable[[str | None, str, int], bool]] = {
    "it has an answer": lambda answer, numbers, target: answer is not None,
    "the answer is an expression": lambda answer, numbers, target: bool(_value(answer)[1]),
    "it uses each number once": lambda answer, numbers, target: _value(answer)[1] == sorted(map(int, numbers.split())),
    "it has the target's value": lambda answer, numbers, target: _value(answer)[0] == target,
}
"""Checks of an answer, given numbers and target, from the weakest to the strongest."""


def judge(
    prompts: Sequence[Chat],
    completions: Sequence[Chat],
    *,
    rubric: Sequence[str],
    numbers: Sequence[str],
    target: Sequence[int],
    **_: Any,
) -> list[float]:
    """Share of the rubric's criteria that an answer meets."""
    scores = []
    for asked, said, text, given, goal in zip(prompts, completions, rubric, numbers, target, strict=True):
        checks = [CRITERIA[line](read_answer(said, asked), given, goal) for line in text.splitlines()]
        scores.append(sum(checks) / len(checks))
    return scores


def stricter(rubric: str, samples: Sequence[Mapping[str, Any]], *, enough: float = 0.7) -> str:
    """The rubric with the next criterion where the mean reward is at least `enough`."""
    missing = [line for line in CRITERIA if line not in rubric.splitlines()]
    mean = sum(sample["reward"] for sample in samples) / max(len(samples), 1)
    return f"{rubric}\n{missing[0]}" if missing and mean >= enough else rubric
