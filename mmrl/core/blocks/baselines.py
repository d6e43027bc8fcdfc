"""Baselines of other trainers; the common ones are in `mmrl/core/blocks/advantage.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import (
    Advantage,
    GroupEstimator,
    group_center,
    group_count,
    group_extremes,
    group_std,
    group_sum,
)
from mmrl.core.loss import required
from mmrl.core.returns import decision_rewards, returns_to_go
from mmrl.core.rollouts import COLLISION, Rollouts
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LengthWeightedMean(GroupEstimator):
    """Reward minus the length-weighted group mean, the minimum-variance baseline if gradients grow with length.

    Source: OPO, arXiv 2505.23585, eq. 8; volcengine/verl compute_opo_outcome_advantage.
    """

    kind = "length_weighted_mean"
    compares = "decisions"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        group, valid, size = rollouts.group, rollouts.scored, len(rollouts.group)
        centred = group_center(rollouts.reward, group, valid)  # exactly 0 where all rewards are equal
        # unscored rows take no part in the weighted mean
        length = torch.where(valid, rollouts.loss_mask.sum(1), 0.0).to(centred.dtype)
        total = group_sum(length, group, size).clamp(min=1)
        # the length-weighted mean of centred rewards is the same shift, without the rounding of large rewards
        rows = torch.where(valid, centred - (group_sum(length * centred, group, size) / total)[group], 0.0)
        if self.singleton == "keep":
            rows = torch.where(group_count(group, valid) > 1, rows, rollouts.reward)
        return torch.where(rollouts.loss_mask > 0, rows.detach()[:, None], 0.0)

    def rule(self) -> str:
        return "R_i - sum_g |o| R / sum_g |o|, |o| trained decisions of a row"


@dataclass(frozen=True)
class MeanNormalised(GroupEstimator):
    """Reward minus group mean, divided by the group mean, for rewards >= 0: rare successes weigh most.

    Source: MaxRL, arXiv 2602.02710; NovaSky-AI/SkyRL compute_maxrl_advantage.
    """

    kind = "mean_normalised"
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the mean."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        number = group_count(group, valid).clamp(min=1)
        # the sum over valid rows: an unscored reward is NaN
        mean = group_sum(torch.where(valid, reward, 0.0), group, len(group))[group] / number
        scaled = group_center(reward, group, valid) / (mean + self.eps)
        # a mean of at most 0 would flip the sign of every advantage, and the method is for rewards from 0 up
        return torch.where(mean > 0, scaled, 0.0)

    def rule(self) -> str:
        return f"(R_i - mean_g R) / (mean_g R + {self.eps:g}), 0 where mean_g R <= 0"


@dataclass(frozen=True)
class BestOfGroup(GroupEstimator):
    """The best row of a group gets its lead over the second best, all others get 0: the gradient of best-of-k.

    Source: pass@k policy optimisation, arXiv 2503.19595; volcengine/verl compute_grpo_passk_outcome_advantage.
    """

    kind = "best_of_group"
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        best = group_extremes(reward, group, valid, len(group))[1][group]
        first = valid & (reward == best)
        # with a tie for the best there is no lead: the best of k stays as good without either row
        alone = first & (group_count(group, first) == 1)
        # -inf if all rows are best, which the next line turns into 0
        second = group_extremes(reward, group, valid & ~first, len(group))[1][group]
        lead = torch.where(alone & second.isfinite(), best - second, 0.0)
        std = group_std(reward, group, valid) + self.eps
        # std is 0 only if all rewards are equal, and then the lead is 0 too
        return lead / torch.where(std > 0, std, 1.0)

    def rule(self) -> str:
        lead = f"(R_i - second best R of the group) / (std_g R + {self.eps:g})"
        return f"{lead} for the best row, 0 for all others, std with ddof 1"


@dataclass(frozen=True)
class GroupMeanLive(GroupEstimator):
    """Reward minus group mean, times all rows over the rows of groups whose rewards differ.

    Groups with equal rewards have no gradient; the factor keeps the size of the update as if they had one.

    Source: GPG, arXiv 2504.02546, section 3.
    """

    kind = "group_mean_live"

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        low, high = group_extremes(reward, group, valid, len(group))
        live = (valid & (high > low)[group]).sum().clamp(min=1)
        # scaled up by all scored rows over those that have a gradient
        return group_center(reward, group, valid) * valid.sum() / live

    def rule(self) -> str:
        return "(R_i - mean_g R) * rows / rows of groups with different rewards"


@dataclass(frozen=True)
class OptimalToken(Advantage):
    """Return minus the minimum-variance baseline at each position t of a group's rows.

    With the squared norm of the gradient of a decision's log-probability with respect to the logits,
    s_t = 1 - 2 p_t + sum p^2, and W_t = s_1 + ... + s_t,

        A_t = G_t - sum_g W_t G_t / sum_g W_t,

    where t counts trained decisions, so that tool output is skipped. Positions that only the longest row of a group
    reaches have no baseline.

    Source: OTB, arXiv 2602.07078; volcengine/verl compute_multi_turn_optimal_token_baseline_advantage.
    """

    kind = "optimal_token"
    compares = "scores"
    needs = frozenset({"samples", "probabilities", COLLISION})

    def __call__(self, rollouts: Rollouts) -> Tensor:
        collision = required(
            rollouts.extras.get(COLLISION),
            f"rollouts.extras['{COLLISION}']",
            "the policy must compute it before the update",
        )
        mask, group, (size, width) = rollouts.loss_mask, rollouts.group, rollouts.mask.shape
        returns = returns_to_go(decision_rewards(rollouts), mask, gamma=1.0)
        # squared norm of the logit gradient up to t; probabilities are those of the policy that sampled
        weight = torch.where(mask > 0, 1 - 2 * rollouts.logp_old.exp() + collision, 0.0).cumsum(1)
        # one bin for each group and number of trained decisions, so that rows are compared at the same t
        place = (group[:, None] * width + (mask.cumsum(1).long() - 1).clamp(min=0)).flatten()
        trained = mask.flatten() > 0

        def at_place(x: Tensor) -> Tensor:
            return group_sum(x.flatten().where(trained, 0.0), place, size * width)[place].view_as(mask)

        # from the lowest return on, so that the advantage is exactly 0 where all are equal
        low = group_extremes(returns.flatten(), place, trained, size * width)[0][place].view_as(mask)
        # differences to the lowest return: a weighted mean of equal numbers would round away from them
        above = returns - low
        centred = above - at_place(weight * above) / at_place(weight).clamp(min=1e-8)
        # alone at its place, a row keeps its whole return
        found = torch.where(at_place(mask) > 1, centred, returns)
        # but a group of one has no baseline at all, and learns nothing
        several = group_count(group, rollouts.scored) > 1
        return torch.where((mask > 0) & several[:, None], found, 0.0)

    def formula(self) -> str:
        return "A_it = G_it - sum_g W_t G_t / sum_g W_t, W_t = sum_k<=t (1 - 2 p_k + sum p^2), G return from t on"


GREEDY_REWARD = "greedy_reward"
"""Key of `Rollouts.extras`: (B,) reward of the greedy response to each row's task."""


@dataclass(frozen=True)
class GreedyBaseline(Advantage):
    """Reward minus the reward of the greedy response to the same task, which is sampled but not trained on.

    It works with one sample per task. Rows whose greedy response could not be scored get 0.

    Source: ReMax, arXiv 2310.10505, section 4; volcengine/verl compute_remax_outcome_advantage.
    """

    kind = "greedy_baseline"
    reads_sum = True
    needs = frozenset({"greedy"})

    def __call__(self, rollouts: Rollouts) -> Tensor:
        greedy = required(
            rollouts.extras.get(GREEDY_REWARD),
            f"rollouts.extras['{GREEDY_REWARD}']",
            "the recipe does not sample a greedy response",
        )
        rows = torch.where(rollouts.scored & greedy.isfinite(), rollouts.reward - greedy, 0.0)
        return torch.where(rollouts.loss_mask > 0, rows.detach()[:, None], 0.0)

    def formula(self) -> str:
        return "A_it = R_i - R of the greedy answer to the task"
