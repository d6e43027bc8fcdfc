"""Objectives that compare the rows of a group by their likelihood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.blocks.advantage import GroupMean, GroupMeanStd, group_count, group_extremes, group_sum
from mmrl.core.blocks.clip import (
    LOG_RATIO_LIMIT,
    BoundedClip,
    Loss,
    PpoClip,
    Ratio,
    SequenceProductRatio,
    StepClip,
    clip_indicators,
    clipped_loss,
)
from mmrl.core.loss import (
    PolicyOutputs,
    SequenceMean,
    masked_mean,
    masked_sum,
    required,
)
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

MOVED, ROWS_PER_DECISION = "divergence_old", "rows_per_decision"
"""Keys of `Rollouts.extras` (B,): divergence from the old policy and rows per decision, of an optimiser step."""


@dataclass(frozen=True)
class Discriminative(StepClip):
    """Raises the scores of good rows above those of bad rows of the same group, near the policy before the update.

    The score s of a row is the mean of its log-probabilities or ratios; rows with a positive advantage are good, with a
    negative one bad. The loss of a group is tau log mean_bad exp(s / tau) - mean_good s, so that the bad rows of the
    highest score count most, and 0 without either. Nothing is clipped: where the mean divergence d from the old policy
    exceeds a limit, penalty (d - limit) d is added, the factor without a gradient. d is a mean over an optimiser step,
    in the public code over a micro-batch.

    Source: DisCO, arXiv 2505.12366, and DRPO, arXiv 2510.04474 (`length_scale`); Optimization-AI/DisCO and
        Optimization-AI/DRPO verl/verl/trainer/ppo/core_algos.py.
    """

    kind = "discriminative"
    compares_rows = True
    surveys = True
    score: str = rare(choice("logp", ("logp", "ratio")))
    """Quantity whose mean over a row is the row's score: log-probabilities or importance ratios."""
    temperature: float = rare(bounded(10.0, above=0))
    """Temperature for comparing scores (tau in the papers): 10 for log-probabilities, 1 for ratios."""
    length_scale: float | None = rare(bounded(None, above=0))
    """Length scale in tokens: a good row this much longer gets 1/e of the weight (DRPO: 0.1 of the longest response);
    null: equal weights."""
    limit: float = rare(bounded(1e-4, at_least=0))
    """Divergence (nats per decision) that is not penalised."""
    penalty: float = rare(bounded(1000.0, at_least=0))
    """Penalty coefficient for divergence above `limit`."""

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; all decisions of a group carry the group's loss."""
        mask, group = rollouts.loss_mask, rollouts.group
        scores = masked_mean(outputs.logp if self.score == "logp" else log_ratio.exp(), mask)
        sign = masked_sum(advantage.detach(), mask)
        good, bad = sign > 0, sign < 0
        kept = self._weights(mask.sum(1).to(scores.dtype), group, good)
        loss = _log_mean_exp(scores / self.temperature, group, bad) * self.temperature
        loss = loss - group_sum(kept * scores, group, len(group))[group]
        loss = torch.where((group_count(group, good) > 0) & (group_count(group, bad) > 0), loss, 0.0)[:, None]
        if not rollouts.extras.keys() >= {MOVED, ROWS_PER_DECISION}:
            # without a survey of the optimiser step these rows alone are the step
            rollouts = self.settle([self.survey(log_ratio, advantage, mask)], rollouts)
        divergence, rate = (rollouts.extras[key].to(loss.dtype)[:, None] for key in (MOVED, ROWS_PER_DECISION))
        # from detached sums: the factor has no gradient, `moved` has
        factor = self.penalty * (divergence - self.limit).clamp(min=0)
        # rows weigh by their length, because the divergence is a mean over all decisions
        moved = torch.where(mask > 0, -log_ratio, 0.0) * mask.sum(1, keepdim=True) * rate
        beyond = (divergence > self.limit).to(loss.dtype).expand_as(moved)
        return loss + factor * moved, {"policy/beyond_divergence_limit": beyond}

    def survey(self, log_ratio: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
        """Sum of the divergences, number of decisions, number of rows."""
        found = (-log_ratio.detach().sum(), mask.sum(), mask.any(1).sum())
        return torch.stack([number.double() for number in found])

    def settle(self, parts: Sequence[Tensor], rollouts: Rollouts) -> Rollouts:
        moved, decisions, rows = torch.stack([part.cpu() for part in parts]).sum(0).tolist() if parts else (0.0, 1, 0.0)
        found = {MOVED: moved / max(decisions, 1), ROWS_PER_DECISION: rows / max(decisions, 1)}
        added = {key: torch.full_like(rollouts.reward, value) for key, value in found.items()}
        return rollouts.replace(extras=rollouts.extras | added)

    def _weights(self, length: Tensor, group: Tensor, good: Tensor) -> Tensor:
        """Weights (B,) of the good rows, which sum to 1 in each group."""
        weight = good.to(length.dtype)
        if self.length_scale is not None:
            shortest = group_extremes(length, group, good, len(group))[0][group]
            weight = torch.where(good, ((shortest - length) / self.length_scale).exp(), 0.0)
        # a group without good rows: 0 / tiny = 0
        return weight / group_sum(weight, group, len(group))[group].clamp(min=torch.finfo(weight.dtype).tiny)

    def formula(self) -> str:
        tau, score = f"{self.temperature:g}", "logp_it" if self.score == "logp" else "r_it"
        weighted = "" if self.length_scale is None else f", weighted by exp(-length / {self.length_scale:g})"
        return (
            f"[{tau} log mean_bad exp(s / {tau}) - mean_good s{weighted}] + {self.penalty:g} (d - {self.limit:g})+ d, "
            f"s_i = mean_t {score}, good: A_i > 0, bad: A_i < 0, d = mean (logp_old - logp)"
        )

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if ratio.kind != "token":
            yield f"clip '{self.kind}' takes means over a row itself, but ratio is '{ratio.kind}'. Use ratio 'token'."


def _log_mean_exp(x: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Logarithm of the mean of exp(x) (B,) over the valid rows of each row's group; 0 if there is none."""
    size = len(group)
    # subtracted before exp, or large scores would overflow
    highest = group_extremes(x.detach(), group, valid, size)[1]
    highest = torch.where(highest.isfinite(), highest, 0.0)[group]
    total = group_sum(torch.where(valid, (torch.where(valid, x, highest) - highest).exp(), 0.0), group, size)[group]
    # log 0 would put NaN into the gradient even where it is not used
    return torch.where(total > 0, total, 1.0).log() + highest - group_count(group, valid).clamp(min=1).to(x.dtype).log()


@dataclass(frozen=True)
class JointPairs(BoundedClip):
    """Clipped surrogate on the ratio of each pair of rows of a group, with half the difference of their advantages.

    A pair's ratio is that of its rows' ratios, so that what all answers to a question have in common cancels. A row's
    loss is the mean over its pairs, with itself first.

    Source: P3O (joint clipping), arXiv 2310.00212.
    """

    kind = "joint_pairs"
    compares_rows = True

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; each decision of a row carries the row's loss."""
        mask, group = rollouts.loss_mask, rollouts.group
        valid = mask.any(1)
        others = ~torch.eye(len(group), dtype=torch.bool, device=group.device)
        pairs = (group[:, None] == group) & valid[:, None] & valid & others
        # ratio sequence_product: every decision of a row has the row's ratio
        rows, value = log_ratio[:, 0], masked_mean(advantage.detach(), mask)
        # exp of a whole row's log-ratio may overflow
        moved = (rows[:, None] - rows).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        better = (value[:, None] - value) / 2
        loss = torch.maximum(-better * moved, -better * moved.clamp(1.0 - self.low, 1.0 + self.high))
        number = pairs.sum(1).clamp(min=1)
        loss = torch.where(pairs, loss, 0.0).sum(1) / number
        beyond = pairs & ((moved - moved.clamp(1.0 - self.low, 1.0 + self.high)).detach() * better > 0)
        return loss[:, None].expand_as(mask), {
            "policy/clip_fraction": (beyond.sum(1) / number)[:, None].expand_as(mask)
        }

    def formula(self) -> str:
        return (
            f"mean_j max(-A_ij r_ij, -A_ij clip(r_ij, {1 - self.low:g}, {1 + self.high:g})), r_ij = r_i / r_j, A_ij = "
            "(A_i - A_j) / 2, over the other rows j of g"
        )

    def conflicts(self, ratio: Ratio) -> Iterator[str]:
        if not ratio.row_gradient:
            yield f"clip '{self.kind}' compares whole rows, but ratio is '{ratio.kind}'. Use ratio 'sequence_product'."


@dataclass(frozen=True)
class GroupPreference(BoundedClip):
    """Clipped surrogate, plus a preference of the group's better rows over its worse ones.

    With s = beta sum_t (logp_t - logp_ref_t) of a row, rows above the group's mean reward w and those below l, the
    second part is -log sigmoid(mean s_w - mean s_l) + variance Var(s_w), 0 for a group without either.

    Source: GEPO in OORL, arXiv 2505.12723, of its paper alone; Var has the divisor n.
    """

    kind = "group_preference"
    reads_sum = True
    compares_rows = True
    needs: ClassVar[frozenset[str]] = frozenset({"logp_ref"})
    coef: float = rare(bounded(0.01, at_least=0))
    """Weight of the preference."""
    beta: float = rare(bounded(0.1, above=0))
    """Scale of the log-ratio to the reference."""
    variance: float = rare(bounded(1.0, at_least=0))
    """Weight of the variance of the better rows' scores."""

    def of_rollouts(self, log_ratio: Tensor, outputs: PolicyOutputs, advantage: Tensor, rollouts: Rollouts) -> Loss:
        """See `Clip`; each decision carries the preference of its group."""
        loss = clipped_loss(log_ratio, advantage, self.low, self.high)
        indicators = clip_indicators(log_ratio.exp(), self.low, self.high, signed=advantage.detach())
        return loss + self.coef * self.preference(outputs.logp, rollouts)[rollouts.group, None], indicators

    def preference(self, logp: Tensor, rollouts: Rollouts) -> Tensor:
        """Loss (N,) of each group."""
        mask = rollouts.loss_mask
        group = rollouts.group
        groups = rollouts.num_groups
        reference = required(rollouts.logp_ref, "rollouts.logp_ref", "the reference scores the answers").detach()
        score, valid = self.beta * masked_sum(logp - reference, mask), mask.any(1)

        def mean(x: Tensor, rows: Tensor) -> Tensor:
            number = group_sum(rows.to(x), group, groups)
            return group_sum(x.where(rows, 0.0), group, groups) / number.clamp(min=1)

        level = mean(rollouts.reward.to(score), valid)[group]
        good, bad = valid & (rollouts.reward > level), valid & (rollouts.reward < level)
        ahead = mean(score, good) - mean(score, bad)
        spread = mean((score - mean(score, good)[group]).square(), good)
        both = (group_sum(good.long(), group, groups) > 0) & (group_sum(bad.long(), group, groups) > 0)
        return torch.where(both, self.variance * spread - torch.nn.functional.logsigmoid(ahead), 0.0)

    def formula(self) -> str:
        preference = f"-log sigmoid(mean s_w - mean s_l) + {self.variance:g} var(s_w)"
        scores = (
            f"s = {self.beta:g} sum_t (logp_t - logp_ref_t), w above and l below the mean reward of g, var with ddof 0"
        )
        return f"max(-A_it r_it, -A_it {self.clipped()}) + {self.coef:g} [{preference}], {scores}"


ROWS: tuple[Objective, ...] = (
    Objective(
        "p3o_separate",
        GroupMean(),
        PpoClip(),
        SequenceMean(),
        ratio=SequenceProductRatio(),
        claim="policy gradients on reward differences of a pair ignore the rewards' offset (each ratio clipped)",
        citation="Wu et al., P3O, arXiv 2310.00212, separate clipping (clip 0.2)",
        verified="hand computation",
        differs="groups may have more than the paper's two rows, whose advantages are (R_1 - R_2) / 2 and its negative",
    ),
    Objective(
        "p3o_joint",
        GroupMean(),
        JointPairs(),
        SequenceMean(),
        ratio=SequenceProductRatio(),
        claim="policy gradients on reward differences of a pair ignore the rewards' offset (joint ratio clipped)",
        citation="Wu et al., P3O, arXiv 2310.00212, joint clipping (clip 0.2)",
        verified="hand computation",
        differs="the mean over all pairs of a group, each in both orders, where the paper has one pair",
    ),
    Objective(
        "gepo",
        GroupMeanStd(),
        GroupPreference(),
        SequenceMean(),
        claim="a preference of a group's better answers to its worse ones adds a finer signal to unit-test rewards",
        citation="Wu et al., OORL with GEPO, arXiv 2505.12723 (weights 0.01 and 1)",
        verified="hand computation",
        differs="combined with GRPO, not REINFORCE++; the paper states neither beta nor the divisor of the variance",
    ),
    Objective(
        "disco",
        GroupMean(),
        Discriminative(),
        SequenceMean(),
        claim="scoring right answers above wrong ones removes GRPO's bias by question difficulty",
        citation="Li et al., DisCO, arXiv 2505.12366; constants of its scripts/train/run_disco_logL_1.5b_8k.sh",
        verified="Optimization-AI/DisCO at bd2b07812934",
        differs="rows above their group's mean are good and those below bad, which is 1 and 0 for binary rewards; the "
        "code reports another value with the same gradient, and takes the divergence of a micro-batch",
    ),
    Objective(
        "decoupled_reward",
        GroupMean(),
        # 0.1 of the paper's longest answer
        Discriminative(length_scale=819.2),
        SequenceMean(),
        claim="length rewards normalised among right answers alone shorten them without making any of them negative",
        citation="DRPO, arXiv 2510.04474; constants of its run_drpo_1.5b_8k.sh (lambda 0.1 of 8,192 tokens)",
        verified="Optimization-AI/DRPO at 405f70268c79",
        differs="as disco",
    ),
)
