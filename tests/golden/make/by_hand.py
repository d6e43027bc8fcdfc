"""Formulas of papers without public code, in plain Python loops over lists of float64 numbers.

Nothing of the suite is used. `token_loss` and its gradient by the log-probabilities are written out as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

BY_HAND = "hand computation"
REPEATED = "repeated independently by somebody who had read neither this row's script nor its blocks"
Numbers = list[float]


def mean(xs: Sequence[float]) -> float:
    return math.fsum(xs) / len(xs)


def deviation(xs: Sequence[float]) -> float:
    return math.sqrt(math.fsum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) if len(xs) > 1 else 0.0


def standardised(xs: Sequence[float], eps: float = 1e-6) -> Numbers:
    return [(x - mean(xs)) / (deviation(xs) + eps) for x in xs]


def groups(inputs: dict[str, Any]) -> dict[int, list[int]]:
    """Rows of each group."""
    found: dict[int, list[int]] = {}
    for row, group in enumerate(inputs["group"]):
        found.setdefault(group, []).append(row)
    return found


def entropy(answers: Sequence[int]) -> float:
    """Entropy in nats of a list of answers."""
    shares = [answers.count(each) / len(answers) for each in set(answers)]
    return -math.fsum(p * math.log(p) for p in shares)


def spread(inputs: dict[str, Any], rows: Numbers) -> list[Numbers]:
    """The number of a row at each of its tokens."""
    return [[x * m for m in mask] for x, mask in zip(rows, inputs["mask"], strict=True)]


def clipped(low: float, high: float, dual: float = math.inf) -> Callable[[float, float], tuple[float, float]]:
    """Clipped loss of an advantage and a log-ratio, and its derivative by the log-ratio."""

    def loss(a: float, d: float) -> tuple[float, float]:
        ratio = math.exp(d)
        value, slope = -a * ratio, -a * ratio
        bounded = -a * min(max(ratio, 1 - low), 1 + high)
        if bounded > value:
            value, slope = bounded, 0.0
        return (-a * dual, 0.0) if a < 0 and value > -a * dual else (value, slope)

    return loss


def token_loss(inputs: dict[str, Any], rows: Numbers, loss: Callable[[float, float], tuple[float, float]]) -> dict:
    """Advantages, and the mean of the loss over all tokens with its gradient."""
    number = sum(map(sum, inputs["mask"]))
    total, gradient = 0.0, []
    for a, mask, new, old in zip(rows, inputs["mask"], inputs["logp"], inputs["logp_old"], strict=True):
        found = [loss(a, n - o) if m else (0.0, 0.0) for m, n, o in zip(mask, new, old, strict=True)]
        total += math.fsum(value for value, _ in found) / number
        gradient.append([slope / number for _, slope in found])
    return {"advantage": spread(inputs, rows), "loss": total, "gradient": gradient}


def by_hand(calls: str, **answer: Any) -> dict[str, Any]:
    """The recorded entry of a computation."""
    return {"program": BY_HAND, "calls": [calls, REPEATED], "relative": 1e-12} | answer
