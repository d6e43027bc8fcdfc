"""Intervals for the numbers a run reports: one proportion, one mean, a paired difference, a ratio of costs, clusters.

An accuracy over n questions is a proportion (Wilson); the score of a method over seeds is a mean (Student t);
two methods on the same seeds are compared by their paired difference, what they cost by the geometric mean of their
ratios; several samples of one question are not independent, so n-sample accuracy resamples whole questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

SHARES = ("accuracy/", "success/")
"""Evaluation metrics that are shares of tasks, shown in per cent."""
HEADLINES = (*SHARES, "score/")
"""Evaluation metrics that say how good a policy is; by default the first of them decides which checkpoint is best."""

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


class RatioInterval(NamedTuple):
    """Geometric mean of ratios that may be known by bounds only.

    `ratio`, `low` and `high` are NaN unless every ratio is known; `at_least` and `at_most` bound the geometric mean
    in any case, by 0 and infinity where nothing is known on that side.
    """

    ratio: float
    low: float
    high: float
    n: int
    at_least: float
    at_most: float


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of a proportion, sensible at 0, at n and for small n.

    Args:
        successes: Number of successes, 0 to n; fractional counts are accepted.
        n: Number of trials; 0 gives (0, 1), nothing is known.
        confidence: Two-sided coverage in (0, 1).

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
    """
    if len(a) != len(b):
        raise ValueError(f"pairs need equal lengths, got {len(a)} and {len(b)} values")
    difference = _finite(a) - _finite(b)
    return PairedDifference(*mean_interval(difference.tolist(), confidence), int((difference > 0).sum()))


def first_reach(costs: Sequence[float], values: Sequence[float], target: float) -> tuple[float, float]:
    """Bounds of the cost at which a curve, straight between its points, first reaches a target.

    The curve and its running maximum reach a target at the same cost, so none is taken. A maximum over the points
    before they are joined would move the crossing of a segment that begins in a dip to a cheaper place, on the
    strength of a value that was lost again.

    Args:
        costs: (n,) finite numbers that never fall, n at least 1.
        values: (n,) values at these costs, the larger the better; NaN reaches nothing and is joined over.
        target: The value to reach.

    Returns:
        (c, c) where it is reached between two points; (0, cost of the first point) where the first one has it
        already; (last cost, infinity) where it is never reached.
    """
    cost, value = _curve(costs, values)
    known = np.isfinite(value)
    cost, value, spent = cost[known], value[known], float(cost[-1])
    reached = np.flatnonzero(value >= target)
    if reached.size == 0:
        return spent, math.inf
    end = int(reached[0])
    if end == 0:
        return 0.0, float(cost[0])
    share = (target - value[end - 1]) / (value[end] - value[end - 1])
    crossing = float(cost[end - 1] + share * (cost[end] - cost[end - 1]))
    return crossing, crossing


def value_at(costs: Sequence[float], values: Sequence[float], cost: float) -> float:
    """Value of a curve, straight between its points, at one cost.

    Args:
        costs: (n,) finite numbers that never fall, n at least 1.
        values: (n,) values at these costs; NaN is joined over.
        cost: Where to read the curve.

    Returns:
        The value; NaN outside the first and last known point.
    """
    grid, value = _curve(costs, values)
    known = np.isfinite(value)
    if not known.any():
        return math.nan
    return float(np.interp(cost, grid[known], value[known], left=math.nan, right=math.nan))


def ratio_bounds(above: tuple[float, float], below: tuple[float, float]) -> tuple[float, float]:
    """Bounds of a quotient of two costs that are known by bounds.

    Returns:
        (low, high); (0, infinity) where a cost is exactly 0, where the ratio is undefined.
    """
    if above[1] == 0 or below[1] == 0:
        return 0.0, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    high = math.inf if below[0] == 0 else above[1] / below[0]
    return low, high


def ratio_interval(bounds: Sequence[tuple[float, float]], confidence: float = 0.95) -> RatioInterval:
    """Geometric mean of positive ratios with the Student-t interval of the mean of their logarithms.

    Args:
        bounds: (low, high) of each ratio, equal where it is known.
        confidence: Two-sided coverage in (0, 1).

    Raises:
        ValueError: No ratios, or bounds that are NaN or in the wrong order.
    """
    pairs = np.asarray(bounds, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not (pairs[:, 0] <= pairs[:, 1]).all():
        raise ValueError(f"expected (low, high) with low <= high for each ratio, got {list(bounds)}")
    with np.errstate(divide="ignore"):
        logs = np.log(pairs)
    at_least, at_most = (float(np.exp(side.mean())) for side in logs.T)
    if not np.isfinite(logs).all() or (pairs[:, 0] < pairs[:, 1]).any():
        return RatioInterval(math.nan, math.nan, math.nan, len(pairs), at_least, at_most)
    mean, low, high, n = mean_interval(logs[:, 0].tolist(), confidence)
    return RatioInterval(math.exp(mean), math.exp(low), _exp(high), n, at_least, at_most)


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


def _exp(value: float) -> float:
    """Exponential that is infinite where the number has no room, as the interval of two unequal ratios may be."""
    return math.exp(value) if value < 700 else math.inf


def _curve(costs: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    cost, value = _finite(costs), np.asarray(values, dtype=np.float64)
    if cost.shape != value.shape:
        raise ValueError(f"a curve needs a value a cost, got shapes {cost.shape} and {value.shape}")
    if (np.diff(cost) < 0).any():
        raise ValueError(f"costs never fall along a run, got {cost.tolist()}")
    return cost, value


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"expected a non-empty list of numbers, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    return array
