"""How well a progress reward agrees with another measure of progress, such as a simulator's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

FEWEST_RANKED = 3


def rank_agreement(reward: ArrayLike, progress: ArrayLike, group: ArrayLike) -> float:
    """Agreement of rewards with another measure of progress on the order of a group's failures.

    Group-normalised advantages keep the order within a group but not the level of its rewards, so the order is what
    makes a latent useful.

    Args:
        reward: (F,) rewards of failures; NaN for those without one.
        progress: (F,) a hand-written measure, such as a simulator's dense reward; NaN where unknown.
        group: (F,) labels of their groups.

    Returns:
        Spearman's rank correlation, mean over groups weighted by their failures; groups with fewer than 3 of them, or
        whose values are all equal, do not count. NaN if no group counts.
    """
    from scipy.stats import spearmanr

    mine, other, labels = np.asarray(reward, np.float64), np.asarray(progress, np.float64), np.asarray(group)
    known = np.isfinite(mine) & np.isfinite(other)
    found, weights = [], []
    for label in np.unique(labels):
        rows = known & (labels == label)
        if rows.sum() >= FEWEST_RANKED and np.ptp(mine[rows]) > 0 and np.ptp(other[rows]) > 0:
            found.append(float(spearmanr(mine[rows], other[rows]).statistic))
            weights.append(int(rows.sum()))
    return float(np.average(found, weights=weights)) if found else float("nan")


def advantage_correlation(mine: ArrayLike, other: ArrayLike, progress: ArrayLike, failed: ArrayLike) -> float:
    """Correlation of advantages with those of another measure of progress.

    Rank agreement looks at the order of a state's failures only; this also asks how much more the better ones count,
    and how the failures stand beside the successes.

    Args:
        mine: (B,) advantages of rows; NaN for rows without one.
        other: (B,) advantages that the other measure would give.
        progress: (B,) the other measure itself.
        failed: (B,) 1 for a failure, 0 for a success.

    Returns:
        Pearson's correlation. NaN where either is constant, or where the measure is the same for all failures.
    """
    columns = np.asarray([mine, other, progress, failed], np.float64)
    first, second, told, lost = columns[:, np.isfinite(columns).all(0)]
    told = told[lost > 0]
    if not len(told) or not (np.ptp(told) > 0 and np.ptp(first) > 0 and np.ptp(second) > 0):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])
