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
"""Evaluation metrics that are fractions of tasks, shown in percent."""
HEADLINES = (*SHARES, "score/")
"""Evaluation metrics of a policy's quality; by default the first of them decides which checkpoint is best."""

PASS_AT = (2, 4, 8, 16, 32, 64)
"""Numbers of samples k for which pass@k is reported."""

VERDICTS = ("holds", "no effect within the margin", "inconclusive", "negative")
"""Outcomes of a comparison whose margin was fixed before it ran; see `verdict`."""

_RESAMPLED_CELLS = 4_000_000  # indices held at once by the bootstrap, 32 MB


class MeanInterval(NamedTuple):
    """A mean with its two-sided interval; the interval is NaN for a single value."""

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
    """Geometric mean of ratios that may only be known by bounds.

    `ratio`, `low` and `high` are NaN unless every ratio is known; `at_least` and `at_most` bound the geometric mean in
    any case, by 0 and infinity if nothing is known on that side.
    """

    ratio: float
    low: float
    high: float
    n: int
    at_least: float
    at_most: float


def wilson_interval(successes: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Score interval of `successes` (possibly fractional) in n trials; also valid at 0, at n and for small n.

    Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    if n < 0 or not 0 <= successes <= n:
        raise ValueError(f"successes must be in 0..n, got successes={successes}, n={n}")
    _check_confidence(confidence)
    # two-sided: half of what the confidence leaves on each side
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    # nothing was tried, so nothing is known
    if n == 0:
        return 0.0, 1.0
    share = successes / n
    # the centre is pulled towards 1/2, which keeps the interval inside 0 and 1
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # exactly 0 and 1 at the ends, which rounding would miss
    low = 0.0 if successes == 0 else max(0.0, (centre - half) / scale)
    high = 1.0 if successes == n else min(1.0, (centre + half) / scale)
    return low, high


def pass_at(right: Sequence[float]) -> dict[int, float]:
    """Probability that at least one of k answers drawn without replacement is correct, for k = 2, 4, ..., 64, up to n.

    Args:
        right: n answers to one question: 1 right, 0 wrong, NaN not scored; the last are left out.

    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv 2107.03374, eq. 1.
    """
    scored = [value for value in right if value == value]
    n, wrong = len(scored), sum(value != 1.0 for value in scored)
    # up to the number of samples asked for, so that every task has the same names; k beyond those scored is NaN
    sizes = [k for k in PASS_AT if k <= len(right)]
    # 1 - C(wrong, k) / C(n, k): the chance that a draw of k has only wrong ones
    return {k: 1.0 - math.comb(wrong, k) / math.comb(n, k) if k <= n else math.nan for k in sizes}


def difference_interval(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """Difference `a - b` of two independent estimates (value, low, high), with its interval.

    With Wilson intervals this is Newcombe's interval of a difference of proportions. For two evaluations on
    the same questions it is wider than need be, since their outcomes rise and fall together.

    Source: Newcombe 1998, "Interval estimation for the difference between independent proportions", method
        10; in general Zou and Donner 2008, "Construction of confidence limits about effect measures".
    """
    (value_a, low_a, high_a), (value_b, low_b, high_b) = a, b
    difference = value_a - value_b
    # distances from each estimate to the end that moves the difference this way
    low = difference - math.hypot(value_a - low_a, high_b - value_b)
    high = difference + math.hypot(high_a - value_a, value_b - low_b)
    return difference, low, high


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> MeanInterval:
    """Mean of n >= 1 independent finite values with its Student-t interval, which is NaN for n = 1."""
    array = _finite(values)
    mean = float(array.mean())
    if array.size == 1:
        return MeanInterval(mean, math.nan, math.nan, 1)
    half = t_quantile(confidence, array.size - 1) * float(array.std(ddof=1)) / math.sqrt(array.size)
    return MeanInterval(mean, mean - half, mean + half, int(array.size))


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """Mean of `a - b` over n pairs that share a seed or a question, with its Student-t interval."""
    if len(a) != len(b):
        raise ValueError(f"pairs need equal lengths, got {len(a)} and {len(b)} values")
    # differences first: what pairs share cancels
    difference = _finite(a) - _finite(b)
    return PairedDifference(*mean_interval(difference.tolist(), confidence), int((difference > 0).sum()))


def verdict(low: float, high: float, margin: float) -> str:
    """Return one of `VERDICTS` for the interval of a difference.

    An interval inside (-margin, margin) shows that there is no effect that matters, even where it excludes zero
    (equivalence test of two one-sided tests). Any other interval above zero holds, one below is negative, and one that
    contains zero is inconclusive.

    Args:
        low: Lower end of the interval; larger is better.
        high: Upper end.
        margin: Smallest difference that matters, positive.

    Returns:
        The verdict; "inconclusive" where an end is NaN.
    """
    if -margin < low and high < margin:
        return VERDICTS[1]
    return VERDICTS[0] if low > 0 else VERDICTS[3] if high < 0 else VERDICTS[2]


def first_reach(costs: Sequence[float], values: Sequence[float], target: float) -> tuple[float, float]:
    """Bounds of the cost at which a curve, linear between its n points, first reaches a target.

    Costs never fall; a larger value is better, NaN is joined over. Returns (c, c) if the target is reached between
    two points, (0, cost of the first point) if the first one has it already, (last cost, infinity) if it is never
    reached.
    """
    # No running maximum over the points: it would move the crossing of a segment that begins in a dip to a lower cost,
    # on the strength of a value that was lost again.
    cost, value = _curve(costs, values)
    # NaN is joined over by the line between its neighbours
    known = np.isfinite(value)
    cost, value, spent = cost[known], value[known], float(cost[-1])
    reached = np.flatnonzero(value >= target)
    if reached.size == 0:
        # reached only after more than the run has spent
        return spent, math.inf
    end = int(reached[0])
    if end == 0:
        # before the first point, at an unknown cost
        return 0.0, float(cost[0])
    share = (target - value[end - 1]) / (value[end] - value[end - 1])
    crossing = float(cost[end - 1] + share * (cost[end] - cost[end - 1]))
    return crossing, crossing


def value_at(costs: Sequence[float], values: Sequence[float], cost: float) -> float:
    """Value of a curve, linear between its n points, at a given cost; NaN outside the first and last known point."""
    grid, value = _curve(costs, values)
    known = np.isfinite(value)
    if not known.any():
        return math.nan
    return float(np.interp(cost, grid[known], value[known], left=math.nan, right=math.nan))


def ratio_bounds(above: tuple[float, float], below: tuple[float, float]) -> tuple[float, float]:
    """Bounds of a quotient of two costs known by (low, high); (0, infinity) if a cost is exactly 0."""
    # a ratio with 0 says nothing about its size
    if above[1] == 0 or below[1] == 0:
        return 0.0, math.inf
    low = 0.0 if math.isinf(below[1]) else above[0] / below[1]
    high = math.inf if below[0] == 0 else above[1] / below[0]
    return low, high


def ratio_interval(bounds: Sequence[tuple[float, float]], confidence: float = 0.95) -> RatioInterval:
    """Geometric mean of positive ratios, each (low, high), with the Student-t interval of their mean logarithm."""
    pairs = np.asarray(bounds, dtype=np.float64)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not (pairs[:, 0] <= pairs[:, 1]).all():
        raise ValueError(f"expected (low, high) with low <= high for each ratio, got {list(bounds)}")
    with np.errstate(divide="ignore"):
        # in logs, so that a half and a double average to 1
        logs = np.log(pairs)
    at_least, at_most = (float(np.exp(side.mean())) for side in logs.T)
    # a ratio that is only bounded has no interval; its bounds are averaged alone
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
    """
    # not scipy.stats.bootstrap, which draws other resamples from the same generator
    _check_confidence(confidence)
    # means first: each question weighs the same
    means = np.array([_finite(values).mean() for values in values_by_question])
    if means.size == 0:
        raise ValueError("the bootstrap needs at least one question")
    # in chunks, so that memory does not grow with questions times resamples
    chunk = max(1, _RESAMPLED_CELLS // means.size)
    drawn = [
        means[rng.integers(means.size, size=(min(chunk, resamples - start), means.size))].mean(axis=1)
        for start in range(0, resamples, chunk)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(drawn), [tail, 1 - tail])
    return float(low), float(high)


def mean_or_nan(values: Sequence[float]) -> float:
    """Mean of some numbers; NaN if there are none."""
    return float(np.mean(values)) if len(values) else math.nan


def with_interval(name: str, values: Sequence[Sequence[float]], rng: np.random.Generator | None) -> dict[str, float]:
    """Mean of some scores and its 95% interval; each task or initial state counts once, however often it ran.

    Args:
        name: of the metric.
        values: scores of each task or initial state, NaN where a sample could not be scored.
        rng: of a bootstrap over tasks, whose samples are not independent; None = Wilson's interval over tasks, for
            shares. Shares that are the same in all tasks have Wilson's too: their bootstrap has no width.

    Returns:
        name, name/low and name/high; NaN if there is no score.
    """
    # a task without a scored sample takes no part
    clusters = [scores for task in values if (scores := [value for value in task if value == value])]
    flat = [value for scores in clusters for value in scores]
    if not flat:
        return dict.fromkeys((name, f"{name}/low", f"{name}/high"), math.nan)
    # resampling equal numbers gives an interval of width 0, as if the rate were known exactly
    alike = name.startswith(SHARES) and len({sum(scores) / len(scores) for scores in clusters}) == 1
    if rng is None or alike:
        # successes scaled to the number of clusters, since repeats add no independent trials
        low, high = wilson_interval(sum(flat) * len(clusters) / len(flat), len(clusters))
    else:
        low, high = cluster_bootstrap_interval(clusters, rng)
    return {name: float(np.mean(flat)), f"{name}/low": low, f"{name}/high": high}


def t_quantile(confidence: float, dof: int) -> float:
    """Half-width, in standard errors, of the two-sided Student-t interval for a confidence in (0, 1)."""
    _check_confidence(confidence)
    if dof < 1:
        raise ValueError(f"a t interval needs at least one degree of freedom, got {dof}")
    # scipy takes long to import, and most programs need no interval
    from scipy import special

    return float(special.stdtrit(dof, 0.5 + confidence / 2))


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be strictly between 0 and 1, got {confidence}")


def _exp(value: float) -> float:
    """Exponential that is infinite instead of overflowing, as the interval of two very unequal ratios may."""
    return math.exp(value) if value < 700 else math.inf


def _curve(costs: Sequence[float], values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    cost, value = _finite(costs), np.asarray(values, dtype=np.float64)
    if cost.shape != value.shape:
        raise ValueError(f"a curve needs one value per cost, got shapes {cost.shape} and {value.shape}")
    if (np.diff(cost) < 0).any():
        raise ValueError(f"costs must not decrease along a run, got {cost.tolist()}")
    return cost, value


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"expected a non-empty list of numbers, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{int((~np.isfinite(array)).sum())} of {array.size} values are not finite")
    return array
