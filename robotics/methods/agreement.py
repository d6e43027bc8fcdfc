"""How well a progress reward agrees with another measure of progress, such as a simulator's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

FEWEST_RANKED = 3


def rank_agreement(reward: ArrayLike, progress: ArrayLike, group: ArrayLike) -> float:
    """Spearman's correlation of the rewards (F,) of failures with another measure of progress (F,), within groups (F,).

    Group-normalised advantages keep the order within a group but not the level of its rewards, so the order is what
    makes a latent useful. The mean over groups is weighted by their failures; groups with fewer than 3 of them, or
    whose values are all equal, do not count. NaN rows are left out; NaN if no group counts.
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
    """Pearson's correlation of advantages (B,) with those (B,) that another measure of progress (B,) would give.

    Rank agreement looks at the order of a state's failures only; this also depends on how much more the better ones
    count, and on how failures compare with successes. `failed` (B,) is 1 for a failure; NaN rows are left out. NaN
    where either side is constant, or where the measure is the same for all failures.
    """
    columns = np.asarray([mine, other, progress, failed], np.float64)
    first, second, measure, lost = columns[:, np.isfinite(columns).all(0)]
    measure = measure[lost > 0]
    if not len(measure) or not (np.ptp(measure) > 0 and np.ptp(first) > 0 and np.ptp(second) > 0):
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])
