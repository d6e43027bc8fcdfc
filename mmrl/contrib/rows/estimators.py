"""Objectives of papers whose core is an estimator, or a reward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from mmrl.core.blocks.advantage import (
    Advantage,
    GroupEstimator,
    GroupMean,
    GroupMeanStd,
    group_center,
    group_count,
    group_extremes,
    group_mean_std,
    group_sum,
)
from mmrl.core.blocks.clip import Loss, PpoClip, StepClip, clip_indicators, clipped_loss
from mmrl.core.blocks.divergence import K3
from mmrl.core.blocks.filter import DropGroups, ResampleGroups
from mmrl.core.blocks.turns import Weight, quantile
from mmrl.core.loss import FixedLength, PolicyOutputs, SequenceMean, SequenceSum, TokenMean, masked_mean, required
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_WEIGHT = 1e6
"""Bound on BNPO's weight, which is infinite if the fitted density is 0."""

GROUP_ADVANTAGE, OWN_WEIGHT = "group_advantage", "own_weight"
"""Keys of `Rollouts.extras` (B,): COPO's advantage of a group among all groups, and the weight of a row's own
advantage."""


def group_means(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mean (B,) of the valid x (B,) in each row's group, 0 without one; exactly x if these are all equal."""
    size = len(group)
    mean = group_sum(torch.where(valid, x, 0.0), group, size) / group_sum(valid.to(x.dtype), group, size).clamp(min=1)
    low, high = group_extremes(x, group, valid, size)
    # rounding moves a mean of equal numbers, and an optimiser makes a whole step of a tiny gradient
    return torch.where(high >= low, torch.minimum(torch.maximum(mean, low), high), mean)[group]


@dataclass(frozen=True)
class BetaNormalised(GroupEstimator):
    """Reward minus group mean, divided by the density of a Beta distribution at that mean.

    The distribution is fitted to the mean rewards p of all groups of the step by their mean m and variance v, so that
    groups of a rare difficulty weigh more. Rewards are mapped to [0, 1] first.

    Source: BNPO, arXiv 2506.02864; changyi7231/BNPO recipe/bnpo/src/bnpo_ray_trainer.py.
    """

    kind = "beta_normalised"
    low: float = rare(0.0)
    """Minimum reward; lower values are clipped to it."""
    high: float = rare(1.0)
    """Maximum reward; higher values are clipped to it."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        share = ((reward - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        # a row alone in its group is compared with nothing
        compared = valid & (group_count(group, valid) > 1)
        mean = group_means(share, group, compared)
        # one mean a group, however many rows it has, as the distribution is one of questions
        fitted = _beta(mean.new_zeros(len(group)).scatter(0, group, mean)[group[compared].unique()])
        density = fitted.log_prob(mean).exp()
        return group_center(share, group, compared) * (1.0 / density).clamp(max=LARGEST_WEIGHT)

    def rule(self) -> str:
        return (
            f"(s_i - p_g) / Beta(p_g; a, b), s = (R - {self.low:g}) / {self.high - self.low:g}, p_g = mean_g s, "
            "c = (m (1 - m) / v - 1) / 3, a = max(1 + c m, 1), b = max(1 + c (1 - m), 1), m and v = mean and var of p "
            "over all g, var with ddof 1"
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
    # parameters below 1 would put infinite density at 0 and 1
    return torch.distributions.Beta((1 + factor * mean).clamp(min=1), (1 + factor * (1 - mean)).clamp(min=1))


@dataclass(frozen=True)
class VirtualBest(GroupEstimator):
    """Reward minus mean, divided by the standard deviation, of the group plus a virtual response with the best reward.

    So a group of n failures has a gradient, too: with reward 0, each has the advantage -1 / sqrt(n + 1).
    Source: NGRPO, arXiv 2509.18851; nangongrui-ngr/NGRPO verl/trainer/ppo/core_algos.py.
    """

    kind = "virtual_best"
    reads_sum = True  # the virtual response has one best reward, not one for each term
    best: float = rare(1.0)
    """Reward of the virtual response that is added to the group."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        size = len(group)
        several = group_sum(valid.long(), group, size) > 1
        joined = group_mean_std(
            torch.cat([reward, reward.new_full((size,), self.best)]),
            # one virtual row for each group number; those of missing groups are not valid
            torch.cat([group, torch.arange(size, device=group.device)]),
            eps=self.eps,
            valid=torch.cat([valid, several]),
        )
        return joined[:size]

    def rule(self) -> str:
        joined = f"R' = the rewards of g and {self.best:g}"
        return f"(R_i - mean_g R') / (std_g R' + {self.eps:g}), {joined}, std with ddof 1"


def upper_half(metric: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Mask (B,) of the valid rows in the upper half of their group by `metric` (B,); a middle row is in it."""
    size = len(group)
    # two stable sorts: by group, and by the metric inside each
    order = torch.argsort(metric, stable=True)
    # rows without a score go behind all groups
    order = order[torch.argsort(torch.where(valid, group, size)[order], stable=True)]
    number = group_sum(valid.long(), group, size)
    place = torch.empty_like(order).scatter(0, order, torch.arange(size, device=order.device))
    # places in the sort minus the rows of the groups before
    return valid & (place - (number.cumsum(0) - number)[group] >= number[group] // 2)


@dataclass(frozen=True)
class Regrouped(Advantage):
    """Compares each row with the other half of its group (split by a metric), and with its own half.

    A group with one scored row gets 0.

    Source: CANON, arXiv 2509.23962, eq. 5 and 8; biuboomc/CANON verl/trainer/ppo/core_algos.py.
    """

    needs = frozenset({"samples"})
    metric: ClassVar[str]
    """Name of the metric that splits the group, for the formula."""
    scaled: ClassVar[str]
    """Half in which alpha multiplies the row's own reward; in the other half it multiplies the other half's mean."""
    inter: float = rare(bounded(1.0, at_least=0, at_most=1))
    """Weight of the comparison with the other half; the rest is the comparison within the half (the paper's mu: 1 or
    0.5)."""
    alpha: float = rare(bounded(1.0, at_least=0))
    """Factor that favours one half of the group; 1 treats both equally."""
    beta: float = rare(0.0)
    """Bonus for the upper half and penalty for the lower half."""

    @property
    def reads_sum(self) -> bool:  # type: ignore[override]
        """The bonus is added once, not once for each reward."""
        return self.beta != 0

    def halved_by(self, rollouts: Rollouts) -> Tensor:
        """The metric (B,)."""
        raise NotImplementedError

    def __call__(self, rollouts: Rollouts) -> Tensor:
        reward, group, valid = rollouts.reward, rollouts.group, rollouts.scored
        upper = upper_half(self.halved_by(rollouts), group, valid)
        high, low = (group_means(reward, group, half) for half in (upper, valid & ~upper))
        own, other = torch.where(upper, high, low), torch.where(upper, low, high)
        scaled = upper if self.scaled == "upper" else ~upper
        # alpha in the favoured half, 1 in the other
        factor = 1.0 + (self.alpha - 1.0) * scaled.to(reward.dtype)
        bonus = self.beta * (2.0 * upper.to(reward.dtype) - 1.0)
        # `1 + alpha - factor` is the other one of the two
        inter = factor * reward - (1.0 + self.alpha - factor) * other + bonus
        rows = self.inter * inter + (1.0 - self.inter) * (reward - own)
        return spread(torch.where(group_count(group, valid) > 1, rows, 0.0), rollouts)

    def formula(self) -> str:
        x, y = ("a ", "") if self.scaled == "upper" else ("", "a ")
        return (
            f"A_it = {self.inter:g} B_i + {1 - self.inter:g} (R_i - mean R of its half); halves of g by {self.metric}, "
            f"a = {self.alpha:g}, B_i = {x}R_i - {y}mean_lower R + {self.beta:g} in the upper, "
            f"{y}R_i - {x}mean_upper R - {self.beta:g} in the lower"
        )


@dataclass(frozen=True)
class RegroupedByEntropy(Regrouped):
    """CANON by the mean entropy of a row's decisions; alpha below 1 favours rows of high entropy."""

    kind = "regrouped_by_entropy"
    compares = "scores"
    needs = frozenset({"samples", "entropy_old"})
    metric = "mean entropy"
    scaled = "lower"

    def halved_by(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", f"advantage '{self.kind}' halves groups by it")
        return masked_mean(entropy, rollouts.mask)


@dataclass(frozen=True)
class RegroupedByLength(Regrouped):
    """CANON by the number of a row's decisions; alpha below 1 favours short rows."""

    kind = "regrouped_by_length"
    compares = "decisions"
    metric = "length"
    scaled = "upper"

    def halved_by(self, rollouts: Rollouts) -> Tensor:
        return rollouts.lengths


@dataclass(frozen=True)
class BudgetTarget(Advantage):
    """GRPO's advantage, plus how far rows with the same token budget earn more than that budget's baseline.

    A row of budget b may earn 4 cos(pi b / length), what the reward `budget` pays for a right answer of b tokens.

    Source: HBPO, arXiv 2507.15844; ZJU-REAL/HBPO verl/trainer/ppo/core_algos.py.
    """

    kind = "budget_target"
    reads_sum = True
    needs = frozenset({"samples", "budgets"})
    weight: float = rare(bounded(1.0, at_least=0))
    """Coefficient of the second term (1 in the paper; the released code adds it twice)."""
    length: float = rare(bounded(8192.0, above=0))
    """Half period of the cosine in tokens."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`; a row alone in its group gets the second term only."""
        budget = extra(rollouts, "budget", self.kind).to(rollouts.reward.dtype)
        reward, group, valid = rollouts.reward, rollouts.group, rollouts.scored
        # rows of a group with equal budgets, renumbered from 0
        shared = torch.stack([group.to(budget.dtype), budget], 1).unique(dim=0, return_inverse=True)[1]
        target = 4.0 * torch.cos(math.pi * budget / self.length)
        rows = group_mean_std(reward, group, eps=self.eps, valid=valid)
        return spread(rows + self.weight * (group_means(reward, shared, valid) - target), rollouts)

    def formula(self) -> str:
        return (
            f"A_it = (R_i - mean_g R) / (std_g R + {self.eps:g}) + {self.weight:g} (mean of R in g with the budget b_i "
            f"- 4 cos(pi b_i / {self.length:g})), std with ddof 1"
        )


def semantic_entropy(
    answer: Tensor, group: Tensor, valid: Tensor, logp: Tensor | None = None, *, over_clusters: bool = False
) -> Tensor:
    """Entropy (B,) in nats of the meanings of each row's group.

    Args:
        answer: (B,) int64, rows of a group with the same meaning share a number.
        group: (B,) int64, 0..N-1.
        valid: (B,) bool, rows that take part.
        logp: (B,) log-likelihoods in nats, usually means over tokens; p(meaning) is then its rows' fraction of the
            group's likelihood. None counts rows.
        over_clusters: Averages -log p(meaning) over meanings, a Monte Carlo estimate, not weighted by p(meaning).

    Source: Farquhar et al., Nature 630 (2024); jlko/semantic_uncertainty semantic_entropy.py.
    """
    # rows of a group with the same meaning, renumbered from 0
    cluster = torch.stack([group, answer], 1).unique(dim=0, return_inverse=True)[1]
    likelihood = torch.zeros_like(answer, dtype=torch.float64) if logp is None else logp.double()
    likelihood = torch.where(valid, likelihood, -math.inf)
    # relative to the likeliest row, as exp would underflow
    largest = torch.full_like(likelihood, -math.inf).scatter_reduce(0, group, likelihood, "amax")[group]
    mass = torch.where(valid, (likelihood - largest).exp(), 0.0)
    size = len(group)
    share = group_sum(mass, cluster, size)[cluster] / group_sum(mass, group, size)[group]
    # a row of each meaning, or all rows by their likelihood: both sums run over meanings
    weight = valid / group_count(cluster, valid).clamp(min=1) if over_clusters else mass
    surprise = torch.where(valid, -share.clamp(min=torch.finfo(share.dtype).tiny).log(), 0.0)
    total = group_sum(weight * surprise, group, size) / group_sum(weight, group, size).clamp(min=1e-300)
    return total[group]


@dataclass(frozen=True)
class ConsistencyBlend(StepClip):
    """Blend of two clipped surrogates: a row's own advantage, and its group's advantage among all groups.

    The own one counts where the answers of the group differ, the other one where they agree. So a group that agrees on
    one answer has a gradient, for or against that answer.

    Gradient: none through the weight and both advantages.

    Source: COPO, arXiv 2508.04138; hijih/copo-code verl/trainer/ppo/core_algos.py compute_policy_loss_with_global.
    """

    kind = "consistency_blend"
    reads_sum = True
    needs = frozenset({"samples", "answers"})
    without_advantage = True
    low: float = bounded(0.2, at_least=0, at_most=1)
    """The ratio is bounded below by 1 - low."""
    high: float = bounded(0.2, at_least=0)
    """The ratio is bounded above by 1 + high."""
    dual: float | None = rare(bounded(3.0, above=1))
    """Bound c on the losses -A c for negative advantages; null disables it."""
    steepness: float = rare(bounded(5.0, above=0))
    """Coefficient of the response entropy inside the sigmoid (gamma in the paper, k in the code)."""
    threshold: float = rare(bounded(1.0, at_least=0))
    """Entropy in bits of a group's responses at which both advantages have equal weight (rho in the paper, b in the
    code)."""
    zeros: str = rare(choice("global", ("global", "blended")))
    """How rows with reward 0 learn: only from the group's advantage ("global", soft-with-zero in the code), or like all
    others ("blended", only-soft in the code)."""
    consistent: bool = rare(False)
    """Multiply a group's mean reward by 1 - (1 - 1 / n) H / log2 n; if all n responses differ, the factor is 1 / n."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation over groups."""

    def constants(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Advantage of each row's group among all groups (B,), and weight of the row's own one (B,)."""
        reward = rollouts.reward
        group = rollouts.group
        valid = rollouts.scored
        bits = semantic_entropy(extra(rollouts, "answer", self.kind), group, valid).to(reward.dtype) / math.log(2)
        mean, count = group_means(reward, group, valid), group_count(group, valid).to(reward.dtype)
        if self.consistent:
            # one row alone has entropy 0, and log2 1 would divide by 0
            mean = mean * (1.0 - (1.0 - 1.0 / count.clamp(min=1)) * bits / count.clamp(min=2).log2())
        # all groups in one, each with one row: equal numbers of rows must not matter
        among = group_mean_std(mean, torch.zeros_like(group), eps=self.eps, valid=_first_rows(group, valid))
        weight = torch.sigmoid(self.steepness * (bits - self.threshold))
        if self.zeros == "global":
            weight = torch.where(reward != 0, weight, 0.0)
        # the other rows of `among` are 0, so the sum is the group's one number
        return {GROUP_ADVANTAGE: group_sum(among, group, len(group))[group], OWN_WEIGHT: weight}

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; the group's advantage and the weight come from `constants`."""
        level, weight = (extra(rollouts, name, self.kind)[:, None] for name in (GROUP_ADVANTAGE, OWN_WEIGHT))
        level = torch.where(rollouts.loss_mask > 0, level, 0.0).to(log_ratio.dtype)
        weight = weight.nan_to_num().to(log_ratio.dtype)
        own, other = (clipped_loss(log_ratio, a, self.low, self.high, self.dual) for a in (advantage, level))
        blended = weight * advantage + (1.0 - weight) * level
        return weight * own + (1.0 - weight) * other, clip_indicators(
            log_ratio.exp(), self.low, self.high, signed=blended.detach()
        )

    def formula(self) -> str:
        capped = "" if self.dual is None else f", where A < 0 at most -{self.dual:g} A"
        zeros = ", 0 where R_i = 0" if self.zeros == "global" else ""
        share = " (1 - (1 - 1 / n) H_g / log2 n)" if self.consistent else ""
        inside = f"clip(r_it, {1 - self.low:g}, {1 + self.high:g})"
        return (
            f"[w_i L(A_it) + (1 - w_i) L(A_g)], L(A) = max(-A r_it, -A {inside}){capped}, A_g = (m_g - mean m) / "
            f"(std m + {self.eps:g}), m_g = mean_g R{share}, w_i = sigmoid({self.steepness:g} (H_g - "
            f"{self.threshold:g})){zeros}, H_g = entropy in bits of the answers in g, std with ddof 1"
        )


def _first_rows(group: Tensor, valid: Tensor) -> Tensor:
    """Mask (B,) with the first valid row of each group."""
    place = torch.arange(len(group), device=group.device)
    first = torch.full_like(place, len(group)).scatter_reduce(0, group, torch.where(valid, place, len(group)), "amin")
    return valid & (place == first[group])


@dataclass(frozen=True)
class EntropyDamped(Advantage):
    """Reward minus group mean, smaller if the responses of the group differ in meaning.

    Equal final answers mean the same; `recipe: semantic_entropy` asks a model which do.

    Source: SEED-GRPO, arXiv 2505.12346; entropies as in jlko/semantic_uncertainty semantic_entropy.py.
    """

    kind = "entropy_damped"
    compares = "scores"
    needs = frozenset({"samples", "answers"})
    alpha: float = rare(bounded(0.5, at_least=0, at_most=1))
    """Strength of the damping: with linear, the fraction of the advantage lost by a group whose n responses all
    differ."""
    function: str = rare(choice("linear", ("linear", "exponential")))
    """Damping factor for entropy H: 1 - alpha H / log n, or exp(-alpha H / log n)."""
    estimate: str = rare(choice("likelihood", ("likelihood", "monte_carlo", "counts")))
    """How to estimate the entropy over meanings. "likelihood": probabilities from the group's length-normalised
    likelihoods, entropy weighted by them; "monte_carlo": the same probabilities, plain mean over meanings; "counts":
    probabilities from the fraction of rows."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        reward = rollouts.reward
        group = rollouts.group
        valid = rollouts.scored
        logp = None if self.estimate == "counts" else masked_mean(rollouts.logp_old.detach(), rollouts.mask)
        answer, means = extra(rollouts, "answer", self.kind), self.estimate == "monte_carlo"
        entropy = semantic_entropy(answer, group, valid, logp, over_clusters=means).to(reward.dtype)
        # log 1 = 0 would divide; a single row has entropy 0 anyway
        share = self.alpha * entropy / group_count(group, valid).clamp(min=2).to(reward.dtype).log()
        # a mean over meanings may exceed log n
        factor = (1.0 - share).clamp(min=0) if self.function == "linear" else (-share).exp()
        return spread(group_center(reward, group, valid) * factor, rollouts)

    def formula(self) -> str:
        share = f"{self.alpha:g} H_g / log n_g"
        factor = f"(1 - {share})" if self.function == "linear" else f"exp(-{share})"
        how = {"likelihood": ", by likelihood", "monte_carlo": ", a mean over them", "counts": ""}[self.estimate]
        return f"A_it = {factor} (R_i - mean_g R), H_g = entropy of the answers in g{how}"


@dataclass(frozen=True)
class EarlyCode(Advantage):
    """GRPO's advantage, plus a bounded bonus for correct responses that use code earlier than others of the group.

    Source: ASPO in Understanding Tool-Integrated Reasoning, arXiv 2508.19201.
    """

    kind = "early_code"
    compares = "decisions"
    reads_sum = True
    needs = frozenset({"samples", "code_starts"})
    delta: float = rare(bounded(-2.0, at_most=0))
    """Change of the advantage per mean length of delay; negative because earlier code should earn more."""
    bound: float = rare(bounded(0.7, at_least=0))
    """Maximum bonus as a fraction of the advantage's size (k in the paper)."""
    solved: float = rare(1.0)
    """Minimum reward of a correct response."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        start = extra(rollouts, "code_start", self.kind)
        reward = rollouts.reward
        group = rollouts.group
        valid = rollouts.scored
        coded = valid & (start >= 0) & (reward >= self.solved)
        rows = group_mean_std(reward, group, eps=self.eps, valid=valid)
        length = group_means(rollouts.lengths.to(reward.dtype), group, coded).clamp(min=1)
        bonus = self.delta * group_center(start.to(reward.dtype), group, coded) / length
        return spread(
            # relative to the row's own advantage, so the bonus never changes its sign
            rows + torch.minimum(torch.maximum(bonus, -self.bound * rows.abs()), self.bound * rows.abs()),
            rollouts,
        )

    def formula(self) -> str:
        return (
            f"A_it = a_i + clip({self.delta:g} (p_i - mean p) / mean length, -{self.bound:g} |a_i|, {self.bound:g} "
            f"|a_i|) in rows with code and R_i >= {self.solved:g}, p = where its code starts, means over such rows of "
            f"g; a_i elsewhere; a_i = (R_i - mean_g R) / (std_g R + {self.eps:g}), std with ddof 1"
        )


def spread(rows: Tensor, rollouts: Rollouts) -> Tensor:
    """Advantages (B, T) of rows (B,), 0 for decisions that are not trained."""
    return torch.where(rollouts.loss_mask > 0, rows[:, None], 0.0)


def extra(rollouts: Rollouts, name: str, kind: str) -> Tensor:
    """Data (B,) that a block needs; raises ValueError if they are missing."""
    return required(rollouts.extras.get(name), f"rollouts.extras['{name}']", f"'{kind}' reads it")


STEPS = "steps"
KEPT_ROWS = "kept_rows"
"""Key of `Rollouts.extras` (B,): 1 for rows that `DownSampled` keeps; present if it has selected rows."""


def max_variance_rows(values: list[float], number: int) -> list[int]:
    """Indices of the `number` values with the largest variance: some of the lowest and some of the highest.

    Source: Xu et al., Not All Rollouts are Useful, arXiv 2504.13818, theorem 1.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])

    def chosen(low: int) -> list[int]:
        return order[:low] + order[len(order) - (number - low) :]

    def spread(low: int) -> float:
        found = [values[index] for index in chosen(low)]
        mean = sum(found) / len(found)
        return sum((x - mean) ** 2 for x in found)

    # the optimum takes some lowest and some highest values, so only their split is searched
    return chosen(max(range(number + 1), key=spread))


@dataclass(frozen=True)
class DownSampled(Weight):
    """Learns from the rows of each group whose rewards vary most, and in these from decisions with high |A| H.

    H is the entropy before the update. The other rows and decisions leave the mask, so that all averages run over what
    is kept. Rows leave before the policy scores them, and pass it neither forward nor backward; of the kept rows, the
    policy computes distributions of the kept decisions only. Advantages compare all rows of a group.

    Advantages that only shift and scale the rewards of a group vary most in the same rows.

    Source: D3S, arXiv 2509.22115.
    """

    kind = "down_sampled"
    thins = True
    needs = frozenset({"samples", "entropy_old"})
    rows: float = rare(bounded(0.5, above=0, at_most=1))
    """Initial fraction of a group's rows to keep (at least 2 rows)."""
    decisions: float = rare(bounded(0.2, above=0, at_most=1))
    """Initial fraction of the kept rows' decisions to keep."""
    relax_steps: int = rare(bounded(0, at_least=0))
    """Steps over which both fractions grow linearly to 1; 0 keeps them constant."""

    def state(self) -> Tally:
        """Steps so far."""
        return Tally()

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Weight`; what is kept weighs 1, the rest leaves the mask."""
        return rollouts.loss_mask

    def thinned(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Rollouts whose mask keeps the rows of this step."""
        chosen = self._rows(rollouts, self._relaxed(self.rows, state)).to(rollouts.mask.device)
        return rollouts.replace(mask=rollouts.mask * chosen[:, None], extras=rollouts.extras | {KEPT_ROWS: chosen})

    def observe(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Rollouts whose mask keeps the decisions of this step, which it counts."""
        entropy = required(rollouts.entropy, "rollouts.entropy", f"weight '{self.kind}' selects by it")
        advantage = required(rollouts.advantage, "rollouts.advantage", "weights are computed after advantages")
        # rows that the trainer has not thinned, such as those of a single call
        rollouts = rollouts if KEPT_ROWS in rollouts.extras else self.thinned(rollouts, state)
        mask, score = rollouts.loss_mask, advantage.abs() * entropy
        # the quantile runs over kept rows only
        mask = mask * (score >= quantile(score, mask, 1.0 - self._relaxed(self.decisions, state)))
        state[STEPS] += 1
        return rollouts.replace(mask=mask, advantage=torch.where(mask > 0, advantage, 0.0))

    def _relaxed(self, share: float, state: Any) -> float:
        """The fraction of this step."""
        return share + (1.0 - share) * (min(state[STEPS] / self.relax_steps, 1.0) if self.relax_steps else 0.0)

    def _rows(self, rollouts: Rollouts, share: float) -> Tensor:
        """(B,) 1 for the rows that are kept, 0 for the others."""
        values = rollouts.reward.tolist()
        members: dict[int, list[int]] = {}
        for row, group in enumerate(rollouts.host.group.tolist()):
            if math.isfinite(values[row]):
                members.setdefault(group, []).append(row)
        kept = torch.zeros(len(values), dtype=rollouts.mask.dtype)
        for found in members.values():
            # one row alone has no variance
            number = min(len(found), max(2, round(share * len(found))))
            kept[[found[index] for index in max_variance_rows([values[row] for row in found], number)]] = 1.0
        return kept

    def formula(self) -> str:
        grows = f", both growing to all over {self.relax_steps} steps" if self.relax_steps else ""
        return (
            f"trained are the {100 * self.decisions:g}% of highest |A_it| H_it of the decisions of those "
            f"{100 * self.rows:g}% of a group's rows whose R_i vary most{grows}; u_it = 1"
        )


ROWS: tuple[Objective, ...] = (
    Objective(
        "bnpo",
        BetaNormalised(),
        PpoClip(high=0.28, dual=10.0),
        SequenceSum(),
        claim="normalising by a Beta distribution fitted to the policy's success rates lowers the gradient's variance",
        citation="Xiao et al., BNPO, arXiv 2506.02864; clip 0.2/0.28 and dual clip 10 of its recipe/bnpo/run.sh",
        verified="changyi7231/BNPO at a9c51b984828",
        differs="several rewards are summed first, without the paper's advantage decomposition; where all group means "
        "are equal, the code divides 0 by 0 and the row weighs them by 1",
    ),
    Objective(
        "ngrpo",
        VirtualBest(),
        PpoClip(low=0.16, high=0.24),
        TokenMean(),
        filter=DropGroups(high=1.0),
        claim="a virtual right answer added to each group gives groups that are all wrong a signal",
        citation="NGRPO, arXiv 2509.18851; clip 0.16/0.24 and groups that all succeed left out as in its script",
        verified="nangongrui-ngr/NGRPO at e7a380415a64",
    ),
    Objective(
        "canon_entropy",
        RegroupedByEntropy(),
        PpoClip(high=0.28, dual=3.0),
        FixedLength(8192),
        claim="comparing high-entropy with low-entropy answers rewards the better kind without presuming which it is",
        citation="CANON, arXiv 2509.23962, eq. 5 and 8; constants of its scripts/setups.sh",
        verified="biuboomc/CANON at 7d6f814fb71f",
        differs="mu is constant, without the paper's schedules; 8192 becomes the longest answer of the sampler",
    ),
    Objective(
        "canon_length",
        RegroupedByLength(),
        PpoClip(high=0.28, dual=3.0),
        FixedLength(8192),
        claim="comparing long answers with short ones rewards the better kind without presuming which it is",
        citation="CANON, arXiv 2509.23962, eq. 5 and 8, by length; constants of its scripts/setups.sh",
        verified="biuboomc/CANON at 7d6f814fb71f",
        differs="mu is constant, without the paper's schedules; 8192 becomes the longest answer of the sampler",
    ),
    Objective(
        "hbpo",
        BudgetTarget(),
        PpoClip(high=0.28, dual=3.0),
        TokenMean(),
        claim="subgroups with different token budgets teach a model to fit its reasoning length to the question",
        citation="HBPO, arXiv 2507.15844; clip 0.2/0.28 and dual clip 3 as in its code",
        verified="ZJU-REAL/HBPO at 5c8991d66483",
        differs="the code adds the budget's term twice and fails on groups of one; the loss alone: several budgets in "
        "one group belong to recipe hbpo",
    ),
    Objective(
        "copo",
        GroupMeanStd(),
        ConsistencyBlend(),
        SequenceMean(),
        claim="an advantage over the whole batch gives groups of equal rewards a signal",
        citation="Han et al., COPO, arXiv 2508.04138; constants of its verl/run_copo.sh (k 5, b 1, soft-with-zero)",
        verified="hijih/copo-code at f66883fb8927, verl/trainer/ppo/core_algos.py",
        differs="a row alone in its group has the own advantage 0, where the code gives it its reward",
    ),
    Objective(
        "seed_grpo",
        EntropyDamped(),
        PpoClip(),
        TokenMean(),
        claim="smaller updates on questions whose answers disagree in meaning (semantic entropy) raise accuracy",
        citation="Chen et al., SEED-GRPO, arXiv 2505.12346, with its linear function",
        verified="hand computation; entropies: jlko/semantic_uncertainty at a8d9aa8cecd5",
        differs="equal final answers mean the same, unless recipe semantic_entropy asks a model; likelihoods are of a "
        "token on average, and fractions of the group; alpha 0.5 is ours: no public code states one; no focal function",
    ),
    Objective(
        "aspo_tir",
        EarlyCode(),
        PpoClip(high=0.28),
        TokenMean(),
        claim="a bounded bonus added to the advantage makes a model call tools earlier without lowering accuracy",
        citation="ASPO in Understanding Tool-Integrated Reasoning, arXiv 2508.19201 (delta -2, k 0.7)",
        verified="hand computation",
    ),
    Objective(
        "d3s",
        GroupMeanStd(),
        PpoClip(high=0.28),
        TokenMean(),
        weight=DownSampled(),
        claim="training on the samples of highest advantage variance and the most important tokens learns faster",
        citation="D3S, arXiv 2509.22115, on DAPO's loss",
        verified="hand computation",
        differs="the rows of largest variance are those of each group, as in the paper's intra-group form; the shares "
        "are ours, as no public code states them, and grow with weight.relax_steps",
    ),
    Objective(
        "selfplay_winrate",
        GroupMean(),
        PpoClip(),
        TokenMean(),
        claim="win rates against the policy's own answers replace a trained reward model",
        citation="Swamy et al., SPO, arXiv 2401.04056, with the reward winrate",
        verified="hand computation",
        differs="the paper leaves the policy gradient open; this is PPO's clip on rewards minus their group's mean",
    ),
    Objective(
        "fapo",
        GroupMeanStd(),
        PpoClip(high=0.28, dual=10.0),
        TokenMean(),
        filter=ResampleGroups(),
        claim="penalising right answers reached by wrong steps makes reasoning more reliable",
        citation="FAPO, arXiv 2510.22543, with the reward flawless (DAPO with dual clip 10)",
        verified="hand computation",
        differs="DAPO's length penalty is a separate reward, `overlong`",
    ),
    Objective(
        "demo_regularised",
        GroupMean(),
        PpoClip(),
        TokenMean(),
        kl=K3(0.05, clamp=False),
        claim="a KL to a cloned policy provably lowers the number of samples, the more demonstrations the lower",
        citation="Tiapkin et al., Demonstration-Regularized RL, arXiv 2310.17303, starting from a cloned policy",
        verified="hand computation",
        differs="the paper leaves the policy gradient open and its 1 / eta, here 0.05, to the task",
    ),
)
