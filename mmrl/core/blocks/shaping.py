"""Estimators of single papers: what one of them adds to the difference between a reward and its group's mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.core.blocks.advantage import (
    GroupEstimator,
    group_center,
    group_count,
    group_extremes,
    group_mean_std,
    group_sum,
)
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

LARGEST_WEIGHT = 1e6
"""Bound of BNPO's weight, which is infinite where the fitted density is 0."""


def group_means(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mean (B,) of the valid x (B,) in each row's group, 0 without one; exactly x where these are all equal."""
    size = len(group)
    mean = group_sum(torch.where(valid, x, 0.0), group, size) / group_sum(valid.to(x.dtype), group, size).clamp(min=1)
    low, high = group_extremes(x, group, valid, size)
    # rounding moves a mean of equal numbers, and an optimiser makes a whole step of a tiny gradient
    return torch.where(high >= low, torch.minimum(torch.maximum(mean, low), high), mean)[group]


@dataclass(frozen=True)
class BetaNormalised(GroupEstimator):
    """Reward minus group mean, over the density of a Beta distribution at that mean.

    The distribution is fitted to the mean rewards p of all groups of the step by their mean m and variance v, so that
    groups of a rare difficulty weigh more. Rewards are mapped to [0, 1] first.

    Source: BNPO, arXiv 2506.02864; changyi7231/BNPO recipe/bnpo/src/bnpo_ray_trainer.py.
    """

    kind = "beta_normalised"
    low: float = rare(0.0)
    """Smallest reward; less counts as this."""
    high: float = rare(1.0)
    """Largest reward; more counts as this."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        share = ((reward - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        compared = valid & (group_count(group, valid) > 1)
        mean = group_means(share, group, compared)
        fitted = _beta(mean.new_zeros(len(group)).scatter(0, group, mean)[group[compared].unique()])
        density = fitted.log_prob(mean).exp()
        return group_center(share, group, compared) * (1.0 / density).clamp(max=LARGEST_WEIGHT)

    def rule(self) -> str:
        return (
            f"(s_i - p_g) / Beta(p_g; a, b), s = (R - {self.low:g}) / {self.high - self.low:g}, p_g = mean_g s, "
            "c = (m (1 - m) / v - 1) / 3, a = max(1 + c m, 1), b = max(1 + c (1 - m), 1), m and v over the p of all g"
        )

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.low >= self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"


def _beta(shares: Tensor) -> torch.distributions.Beta:
    """BNPO's distribution for group means (N,): uniform where they have no variance."""
    one = shares.new_ones(())
    if len(shares) < 2 or float(shares.var()) == 0:
        return torch.distributions.Beta(one, one)
    mean = shares.mean()
    factor = (mean * (1 - mean) / shares.var() - 1) / 3
    return torch.distributions.Beta((1 + factor * mean).clamp(min=1), (1 + factor * (1 - mean)).clamp(min=1))


@dataclass(frozen=True)
class VirtualBest(GroupEstimator):
    """Reward minus mean, over deviation, of the group with one more answer that earned the best reward.

    A group that failed as a whole so has a gradient: -1 / sqrt(n + 1) for each of n failures of reward 0.

    Source: NGRPO, arXiv 2509.18851; nangongrui-ngr/NGRPO verl/trainer/ppo/core_algos.py.
    """

    kind = "virtual_best"
    best: float = rare(1.0)
    """Reward of the answer that is added."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        size = len(group)
        several = group_sum(valid.long(), group, size) > 1
        joined = group_mean_std(
            torch.cat([reward, reward.new_full((size,), self.best)]),
            torch.cat([group, torch.arange(size, device=group.device)]),
            eps=self.eps,
            valid=torch.cat([valid, several]),
        )
        return joined[:size]

    def rule(self) -> str:
        return f"(R_i - mean_g R') / (std_g R' + {self.eps:g}), R' = the rewards of g and {self.best:g}"


def upper_half(metric: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mask (B,) of the valid rows in the upper half of their group by `metric` (B,); a middle row is in it."""
    size = len(group)
    order = torch.argsort(metric, stable=True)
    order = order[torch.argsort(torch.where(valid, group, size)[order], stable=True)]
    number = group_sum(valid.long(), group, size)
    place = torch.empty_like(order).scatter(0, order, torch.arange(size, device=order.device))
    return valid & (place - (number.cumsum(0) - number)[group] >= number[group] // 2)


@dataclass(frozen=True)
class Regrouped(GroupEstimator):
    """Compares each row with the half of its group that has more, or less, of something, and with its own half.

    Source: CANON, arXiv 2509.23962, eq. 5 and 8; biuboomc/CANON verl/trainer/ppo/core_algos.py.
    """

    metric: ClassVar[str]
    """Name in the formula of what halves the group."""
    scaled: ClassVar[str]
    """Half whose own reward alpha multiplies; in the other half it multiplies the other mean."""
    inter: float = bounded(1.0, at_least=0, at_most=1)
    """Weight of the comparison with the other half; the rest compares inside the half (the paper's mu: 1 or 0.5)."""
    alpha: float = rare(bounded(1.0, at_least=0))
    """Factor that favours one half."""
    beta: float = rare(0.0)
    """Bonus of the upper half, and penalty of the lower one."""

    def halved_by(self, rollouts: Rollouts) -> Tensor:
        """The metric (B,)."""
        raise NotImplementedError

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`."""
        reward, group, valid = rollouts.reward, rollouts.group, rollouts.scored
        upper = upper_half(self.halved_by(rollouts), group, valid)
        means = [group_means(reward, group, half) for half in (upper, valid & ~upper)]
        own, other = torch.where(upper, *means), torch.where(upper, *reversed(means))
        scaled = upper if self.scaled == "upper" else ~upper
        factor = 1.0 + (self.alpha - 1.0) * scaled.to(reward.dtype)
        bonus = self.beta * (2.0 * upper.to(reward.dtype) - 1.0)
        inter = factor * reward - (1.0 + self.alpha - factor) * other + bonus
        rows = self.inter * inter + (1.0 - self.inter) * (reward - own)
        alone = reward if self.singleton == "keep" else 0.0
        rows = torch.where(group_count(group, valid) > 1, rows, alone)
        return torch.where(rollouts.loss_mask > 0, rows[:, None], 0.0)

    def rule(self) -> str:
        x, y = ("a ", "") if self.scaled == "upper" else ("", "a ")
        return (
            f"{self.inter:g} B_i + {1 - self.inter:g} (R_i - mean R of its half); halves of g by {self.metric}, a = "
            f"{self.alpha:g}, B_i = {x}R_i - {y}mean_lower R + {self.beta:g} in the upper, "
            f"{y}R_i - {x}mean_upper R - {self.beta:g} in the lower"
        )


@dataclass(frozen=True)
class RegroupedByLength(Regrouped):
    """CANON by the number of a row's decisions; alpha below 1 favours short rows."""

    kind = "regrouped_by_length"
    metric = "length"
    scaled = "upper"

    def halved_by(self, rollouts: Rollouts) -> Tensor:
        return rollouts.lengths
