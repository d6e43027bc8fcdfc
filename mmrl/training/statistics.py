"""Intervals for the numbers a run reports: one proportion, one mean, a paired difference, clusters.

An accuracy over n questions is a proportion (Wilson); the score of a method over seeds is a mean (Student t);
two methods on the same seeds are compared by their paired difference; several samples of one question are not
independent, so n-sample accuracy resamples whole questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

__all__ = [
    "MeanInterval",
    "PairedDifference",
    "cluster_bootstrap_interval",
    "difference_interval",
    "mean_interval",
    "paired_difference",
    "t_quantile",
    "wilson_interval",
]

_LARGE_DOF = 2000
_RESAMPLED_CELLS = 4_000_000  # indices held at once by the bootstrap, 32 MB


class MeanInterval(NamedTuple):
    """A mean with its two-sided interval; the interval is NaN for one value alone."""

    mean: float
    low: float
    high: float
    n: int


class PairedDifference(NamedTuple):
    """Mean of `a - b` over pairs with its interval, and how often `a` was strictly better."""

    mean: float
    low: float
    high: float
    n: int
    wins: int


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion, sensible at 0, at n and for small n.

    Args:
        successes: Number of successes, 0 to n; fractional counts are accepted.
        n: Number of trials; 0 gives (0, 1), nothing is known.
        confidence: Two-sided coverage in (0, 1).

    Returns:
        (low, high), both in [0, 1].

    Raises:
        ValueError: `successes` outside 0..n, or a confidence outside (0, 1).

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes must lie in 0..n, got successes={successes}, n={n}")
    z = _normal_quantile(confidence)
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low = 0.0 if successes == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + half) / scale)
    return low, high


def difference_interval(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """Difference `a - b` of two independent estimates from their own intervals.

    With Wilson intervals this is Newcombe's interval of a difference of proportions. For two evaluations on
    the same questions it is wider than need be, since their outcomes rise and fall together.

    Args:
        a: (value, low, high) of the first estimate.
        b: (value, low, high) of the second estimate at the same confidence.

    Returns:
        (a - b, low, high).

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method
        10; in general Zou and Donner 2008, "Construction of confidence limits about effect measures".
    """
    (value_a, low_a, high_a), (value_b, low_b, high_b) = a, b
    difference = value_a - value_b
    low = difference - math.hypot(value_a - low_a, high_b - value_b)
    high = difference + math.hypot(high_a - value_a, value_b - low_b)
    return difference, low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Mean of independent values with its Student-t interval.

    Args:
        values: (n,) finite numbers, n at least 1.
        confidence: Two-sided coverage in (0, 1).

    Returns:
        Mean, low, high and n; low and high are NaN for n = 1.

    Raises:
        ValueError: No values, or one that is not finite.
    """
    array = _finite(values)
    mean = float(array.mean())
    if array.size == 1:
        return MeanInterval(mean, math.nan, math.nan, 1)
    half = t_quantile(confidence, array.size - 1) * float(array.std(ddof=1)) / math.sqrt(array.size)
    return MeanInterval(mean, mean - half, mean + half, int(array.size))


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Mean of `a - b` over pairs that share a seed or a question, with its Student-t interval.

    Args:
        a: (n,) values of the method.
        b: (n,) values of the baseline in the same order.
        confidence: Two-sided coverage in (0, 1).

    Returns:
        The mean difference, its interval, the number of pairs and the pairs where `a` is strictly larger.

    Raises:
        ValueError: Different lengths, no pairs, or a value that is not finite.
    """
    if len(a) != len(b):
        raise ValueError(f"pairs need equal lengths, got {len(a)} and {len(b)} values")
    difference = _finite(a) - _finite(b)
    return PairedDifference(*mean_interval(difference.tolist(), confidence), int((difference > 0).sum()))


def cluster_bootstrap_interval(
    values_by_question: Sequence[Sequence[float]],
    rng: np.random.Generator,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over questions, each answered by several samples.

    Questions are drawn with replacement and keep all their samples, so samples that rise and fall together
    do not shrink the interval. Every question weighs the same, however many of its samples were scored.

    Args:
        values_by_question: One non-empty list of finite values per question.
        rng: Source of the draws; the same state gives the same interval.
        confidence: Two-sided coverage in (0, 1).
        resamples: Number of bootstrap means.

    Returns:
        (low, high).

    Raises:
        ValueError: No question, a question without values, or a value that is not finite.
    """
    _normal_quantile(confidence)
    means = np.array([_finite(values).mean() for values in values_by_question])
    if means.size == 0:
        raise ValueError("the bootstrap needs at least one question")
    chunk = max(1, _RESAMPLED_CELLS // means.size)
    drawn = [
        means[rng.integers(means.size, size=(min(chunk, resamples - start), means.size))].mean(axis=1)
        for start in range(0, resamples, chunk)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    return float(low), float(high)


def t_quantile(confidence: float, dof: int) -> float:
    """Half-width, in standard errors, of the two-sided Student-t interval.

    The closed form for whole degrees of freedom is inverted by bisection; above 2000 degrees the expansion
    about the normal quantile is exact to rounding.

    Args:
        confidence: Two-sided coverage in (0, 1).
        dof: Degrees of freedom, at least 1.

    Returns:
        t with P(|T| <= t) = confidence.

    Source: Abramowitz and Stegun, 26.7.3 to 26.7.5.
    """
    z = _normal_quantile(confidence)
    if dof < 1:
        raise ValueError(f"a t interval needs at least one degree of freedom, got {dof}")
    if dof > _LARGE_DOF:
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / dof + second / dof**2 + third / dof**3
    low, high = 0.0, math.pi / 2
    while high - low > 1e-16 * high and low < (middle := (low + high) / 2) < high:
        if _t_coverage(middle, dof) < confidence:
            low = middle
        else:
            high = middle
    return math.tan(high) * math.sqrt(dof)


def _t_coverage(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(angle)) for whole degrees of freedom."""
    cosine, sine = math.cos(angle), math.sin(angle)
    if dof % 2:
        steps = np.arange(1, (dof - 1) // 2, dtype=np.float64)
        factors = 2 * steps / (2 * steps + 1) * cosine**2
        series = cosine * (1 + float(np.cumprod(factors).sum())) if dof > 1 else 0.0
        return (angle + sine * series) * 2 / math.pi
    steps = np.arange(1, dof // 2, dtype=np.float64)
    factors = (2 * steps - 1) / (2 * steps) * cosine**2
    return sine * (1 + float(np.cumprod(factors).sum()))


def _normal_quantile(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"expected a non-empty list of numbers, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    return array
