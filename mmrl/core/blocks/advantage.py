"""Rewards to advantages: a baseline, and what the difference to it is divided by.

Each estimator is a function on `(reward, group)`, and a block that applies it to `Rollouts`. Estimators that give
credit along a row (GAE, returns) are in `mmrl/core/blocks/credit.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from mmrl.core.block import Block
from mmrl.core.loss import masked_mean, masked_sum
from mmrl.core.returns import turn_means
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

if TYPE_CHECKING:
    from torch import Tensor

WHITEN_EPS = 1e-8


def group_sum(x: Tensor, group: Tensor, groups: int | None = None) -> Tensor:
    """Sum (N, ...) of x (B, ...) over the rows of each group (B,) int64, 0..N-1.

    Given the number of groups, or any larger one, the host need not wait for it.
    """
    number = _number_of_groups(group) if groups is None else groups
    # groups without a row stay 0; callers pass the number of rows, so that no host waits for the largest group
    return x.new_zeros(number, *x.shape[1:]).index_add(0, group, x)


def group_count(group: Tensor, valid: Tensor) -> Tensor:
    """Number (B,) int64 of valid (B,) bool rows in each row's group."""
    # back to one number a row
    return group_sum(valid.long(), group, len(group))[group]


def group_extremes(x: Tensor, group: Tensor, valid: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Minimum and maximum valid value of each of `groups` groups; +inf and -inf for groups without a valid row."""
    # infinities never win; a group without a valid row ends with low above high, which no caller takes for a
    # difference
    low, high = x.new_full((groups,), float("inf")), x.new_full((groups,), float("-inf"))
    return (
        low.scatter_reduce(0, group, torch.where(valid, x, float("inf")), "amin"),
        high.scatter_reduce(0, group, torch.where(valid, x, float("-inf")), "amax"),
    )


def group_center(reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Subtract from each reward the mean of the valid rewards of its group.

    Args:
        reward: (B,).
        group: (B,) int64, 0..N-1.
        valid: (B,) bool, rows that take part.

    Returns:
        (B,); exactly 0 in a group whose valid rewards are all equal, and on rows that are not valid.
    """
    size = len(group)  # there are no more groups than rows
    number = group_sum(valid.to(reward.dtype), group, size).clamp(min=1)
    # where, because an unscored row has the reward NaN
    mean = group_sum(torch.where(valid, reward, 0.0), group, size) / number
    # The mean of equal numbers may differ from them in the last bit, and dividing by the (then tiny) standard
    # deviation would turn that bit into an advantage.
    low, high = group_extremes(reward, group, valid, size)
    return torch.where(valid & (high > low)[group], reward - mean[group], 0.0)


def group_std(reward: Tensor, group: Tensor, valid: Tensor, ddof: int = 1) -> Tensor:
    """Return the standard deviation of the valid rewards of each row's group.

    Args:
        reward: (B,).
        group: (B,) int64, 0..N-1.
        valid: (B,) bool, rows that take part.
        ddof: Subtracted from the number of rows in the variance.

    Returns:
        (B,); 0 where too few rows are valid.
    """
    # of the centred values, so that equal rewards give exactly 0
    squares = group_sum(group_center(reward, group, valid) ** 2, group, len(group))[group]
    # clamped for groups with fewer rows than ddof, whose squares are 0 anyway
    return (squares / (group_count(group, valid) - ddof).clamp(min=1)).sqrt()


def masked_whiten(x: Tensor, mask: Tensor, eps_to: str = "variance") -> Tensor:
    """Normalise the masked values to mean 0 and (unbiased) variance 1, and set everything else to 0.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.
        eps_to: What 1e-8 is added to, see `whitening_factor`.

    Returns:
        (B, T); 0 everywhere if all masked values are equal.

    Source: volcengine/verl masked_whiten, eps 1e-8 in the root; it leaves values where the mask is 0.
    """
    number = mask.sum()
    # over decisions: a long row counts as often as it has decisions, as in verl
    mean = masked_sum(x, mask).sum() / number.clamp(min=1)
    variance = masked_sum((x - mean) ** 2, mask).sum() / (number - 1).clamp(min=1)
    return torch.where(mask > 0, (x - mean) * whitening_factor(variance, eps_to), 0.0)


def whitening_factor(variance: Tensor, eps_to: str) -> Tensor:
    """Factor that gives centred values variance 1."""
    if eps_to == "deviation":
        # inside the root it would dominate a spread below 1e-4, which whitening then would not bring to 1
        return 1.0 / (variance.sqrt() + WHITEN_EPS)
    return torch.rsqrt(variance + WHITEN_EPS)


def whitening(samples: str, eps_to: str = "variance") -> str:
    """Explain `whiten` in a formula, given its samples and whether 1e-8 is added to their variance or deviation."""
    divisor = f"sqrt(var x + {WHITEN_EPS:g})" if eps_to == "variance" else f"(std x + {WHITEN_EPS:g})"
    name = "var" if eps_to == "variance" else "std"
    return f"whiten(x) = (x - mean x) / {divisor} over all trained {samples}, {name} with ddof 1"


def _number_of_groups(group: Tensor) -> int:
    return int(group.max()) + 1 if len(group) else 0


SINGLETONS = ("zero", "keep")


def group_mean_std(
    reward: Tensor, group: Tensor, *, ddof: int = 1, eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """Reward minus group mean, over group standard deviation: (R - mean) / (std + eps).

    Args:
        reward: (B,) float.
        group: (B,) int64, 0..N-1.
        ddof: 1 divides the variance by n - 1 (DeepSeekMath, verl, TRL), 0 by n.
        eps: Added to the standard deviation.
        valid: (B,) bool, rows that take part; None takes all.

    Returns:
        (B,); 0 in groups whose rewards are all equal and on rows that do not take part.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    valid = _all_rows(reward, valid)
    # with eps 0, a group of equal rewards would divide 0 by 0
    std = group_std(reward, group, valid, ddof) + eps
    # the numerator is exactly 0 there, so that any divisor gives 0
    return group_center(reward, group, valid) / torch.where(std > 0, std, 1.0)


def group_mean(reward: Tensor, group: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Reward minus group mean; see `group_mean_std`.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    return group_center(reward, group, _all_rows(reward, valid))


def leave_one_out(reward: Tensor, group: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Reward minus the mean of the other rows of the group, n / (n - 1) times `group_mean`.

    Source: RLOO, arXiv 2402.14740, section 3.2.
    """
    valid = _all_rows(reward, valid)
    number = group_count(group, valid)
    # R_i - mean of the others = n / (n - 1) (R_i - mean of all), without a second pass over the group
    return group_center(reward, group, valid) * number / (number - 1).clamp(min=1)


def group_mean_global_std(
    reward: Tensor, group: Tensor, *, ddof: int = 0, eps: float = 1e-6, valid: Tensor | None = None
) -> Tensor:
    """Reward minus group mean, over the standard deviation of all rewards; see `group_mean_std`.

    Groups whose rewards hardly differ keep small advantages, which a division by their own spread would blow up.

    Source: Flow-GRPO, arXiv 2505.05470; yifan123/flow_grpo flow_grpo/stat_tracking.py with global_std.
    """
    valid = _all_rows(reward, valid)
    # one group of all rows: the spread is that of the batch, the mean that of the group
    std = group_std(reward, torch.zeros_like(group), valid, ddof) + eps
    return group_center(reward, group, valid) / torch.where(std > 0, std, 1.0)


def group_outcome_std(
    reward: Tensor,
    group: Tensor,
    *,
    solved: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Centre and scale outcomes as if they were the only reward; other rewards rank rows with equal outcomes.

        s_i = 1 where R_i >= solved, else 0
        A_i = (s_i - mean s + R_i - mean of R over rows with the outcome s_i) / (max(std s, floor) + eps)

    With partial rewards for failures, the standard deviation of all rewards shrinks the weight of a rare success, and
    where all fail it enlarges the smallest differences to full size. Here a success has the advantage that it has with
    success alone (3.75 for one of 16), and partial rewards only shift weight between failures. In a group of n rows of
    one outcome the floor is used, the deviation of n - 1 failures and one success: 1 / sqrt(n) with ddof 1.

    Args:
        reward: (B,) float.
        group: (B,) int64, 0..N-1.
        solved: Smallest reward of a success.
        ddof: 1 divides the variance by n - 1, 0 by n.
        eps: Added to the standard deviation.
        valid: (B,) bool, rows that take part; None takes all.

    Returns:
        (B,); 0 in groups whose rewards are all equal and on rows that do not take part.
    """
    valid = _all_rows(reward, valid)
    won = reward >= solved
    outcome = won.to(reward.dtype)
    # each row against the rows of its own outcome, so that a partial reward never outweighs an outcome
    within = group_center(reward, group, valid & won) + group_center(reward, group, valid & ~won)
    # at least 2: the floor is the deviation of one success among failures
    number = group_count(group, valid).clamp(min=2).to(reward.dtype)
    floor = ((number - 1) / (number * (number - ddof))).sqrt()
    # of outcomes, not rewards: partial rewards would shrink the advantage of a rare success
    std = torch.maximum(group_std(outcome, group, valid, ddof), floor)
    return (group_center(outcome, group, valid) + within) / (std + eps)


@dataclass(frozen=True)
class Advantage(Block):
    """Turns the rewards of all rows of a rollout step into advantages."""

    compares: ClassVar[str] = "rewards"
    """Which data of the other rows of its group, untrained ones included, a row's advantage uses: "rewards";
    "decisions", also the number or the rewards of decisions; or "scores", also log-probabilities or entropies."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Advantages (B, T), 0 if nothing is trained, without gradient."""
        raise NotImplementedError

    @property
    def level(self) -> str:
        """Scope of one advantage: "row", "turn" or "decision"."""
        return "row"


@dataclass(frozen=True)
class GroupEstimator(Advantage):
    """Compares the rewards of a group; all decisions of a row share its advantage."""

    needs = frozenset({"samples"})
    singleton: str = rare(choice("zero", SINGLETONS))
    """Advantage of a group with a single scored row: "zero" is 0, "keep" is its raw reward (verl)."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Advantage`."""
        reward, group, valid = rollouts.reward, rollouts.group, rollouts.scored
        rows = self.of_rows(reward, group, valid)
        if self.singleton == "keep":
            # a row that is alone in its group has nothing to be compared with
            rows = torch.where(group_count(group, valid) > 1, rows, self.alone(reward))
        # the same number for all decisions of a row, constant
        return torch.where(rollouts.loss_mask > 0, rows.detach()[:, None], 0.0)

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        """Advantages (B,) of rewards (B,) in groups (B,) int64, 0 on rows that are not valid (B,)."""
        raise NotImplementedError

    def alone(self, reward: Tensor) -> Tensor:
        """Advantages (B,) of rewards (B,) that are alone in their group, if singletons are kept."""
        return reward

    def rule(self) -> str:
        """Right-hand side of the formula."""
        raise NotImplementedError

    def formula(self) -> str:
        kept = "0" if self.singleton == "zero" else "its raw reward"
        return f"A_it = {self.rule()}; a group with one scored row gets {kept}"


@dataclass(frozen=True)
class GroupMeanStd(GroupEstimator):
    """Reward minus group mean, over the standard deviation of the group; see `group_mean_std`."""

    kind = "group_mean_std"
    ddof: int = rare(choice(1, (0, 1)))
    """1 divides the variance by n - 1 (DeepSeekMath, verl, TRL), 0 by n."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation (verl 1e-6; TRL, Flow-GRPO 1e-4)."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_mean_std(reward, group, ddof=self.ddof, eps=self.eps, valid=valid)

    def alone(self, reward: Tensor) -> Tensor:
        """See `GroupEstimator`; the standard deviation is taken as 1."""
        return reward / (1.0 + self.eps)

    def rule(self) -> str:
        return f"(R_i - mean_g R) / (std_g R + {self.eps:g}), std with ddof {self.ddof}"


@dataclass(frozen=True)
class GroupMean(GroupEstimator):
    """Reward minus group mean; see `group_mean`."""

    kind = "group_mean"

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_mean(reward, group, valid=valid)

    def rule(self) -> str:
        return "R_i - mean_g R"


@dataclass(frozen=True)
class LeaveOneOut(GroupEstimator):
    """Reward minus the mean of the other rows of the group; see `leave_one_out`."""

    kind = "leave_one_out"

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return leave_one_out(reward, group, valid=valid)

    def rule(self) -> str:
        return "R_i - mean of the other rows of the group"


@dataclass(frozen=True)
class GroupMeanBatchStd(GroupEstimator):
    """Reward minus group mean, whitened over all trained decisions.

    The whitening subtracts the mean over decisions, so groups with equal rewards come out near 0 but not at 0 when rows
    differ in length.

    Source: REINFORCE++-baseline, arXiv 2501.03262; volcengine/verl
        compute_reinforce_plus_plus_baseline_outcome_advantage.
    """

    kind = "group_mean_batch_std"

    def __call__(self, rollouts: Rollouts) -> Tensor:
        return masked_whiten(super().__call__(rollouts), rollouts.loss_mask)

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_mean(reward, group, valid=valid)

    def rule(self) -> str:
        return f"whiten(R_i - mean_g R), {whitening('decisions')}"


@dataclass(frozen=True)
class GroupMeanGlobalStd(GroupEstimator):
    """Reward minus group mean, over the standard deviation of all rewards; see `group_mean_global_std`."""

    kind = "group_mean_global_std"
    ddof: int = rare(choice(0, (0, 1)))
    """0 divides the variance by n (Flow-GRPO), 1 by n - 1 (TRL's scale_rewards="batch")."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation (Flow-GRPO, TRL 1e-4)."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_mean_global_std(reward, group, ddof=self.ddof, eps=self.eps, valid=valid)

    def rule(self) -> str:
        return f"(R_i - mean_g R) / (std of all R + {self.eps:g}), std with ddof {self.ddof}"


@dataclass(frozen=True)
class GroupOutcomeStd(GroupEstimator):
    """Outcomes centred and scaled as if they were the only reward, the rest as a tie-break; see `group_outcome_std`."""

    kind = "group_outcome_std"
    solved: float = rare(1.0)
    """Minimum reward of a success; lower rewards are failures."""
    ddof: int = rare(choice(1, (0, 1)))
    """1 divides the variance by n - 1, 0 by n."""
    eps: float = rare(bounded(1e-6, at_least=0))
    """Added to the standard deviation."""

    def of_rows(self, reward: Tensor, group: Tensor, valid: Tensor) -> Tensor:
        return group_outcome_std(reward, group, solved=self.solved, ddof=self.ddof, eps=self.eps, valid=valid)

    def rule(self) -> str:
        return (
            f"(s_i - mean_g s + R_i - mean_g of R with outcome s_i) / (max(std_g s, f_g) + {self.eps:g}), s = R >= "
            f"{self.solved:g}, f_g = std of one success among failures, std with ddof {self.ddof}"
        )


def _all_rows(reward: Tensor, valid: Tensor | None) -> Tensor:
    return torch.isfinite(reward) if valid is None else valid


@dataclass(frozen=True)
class AdvantageScaling(Block):
    """Whitens, clips and scales advantages, in this order."""

    kind = "scaling"
    whiten: str = rare(choice("none", ("none", "decisions", "rows", "turns")))
    """Normalise the advantages of the rollout step to mean 0 and variance 1. Each of these is one sample: every trained
    decision ("decisions", PPO in verl), or the mean over the decisions of a row ("rows") or a turn ("turns"). "none"
    disables it."""
    clip: float | None = rare(bounded(None, above=0))
    """Maximum absolute value of an advantage; larger ones are set to +-clip. null disables it."""
    eps_to: str = rare(choice("variance", ("variance", "deviation")))
    """Whitening adds 1e-8 to the "variance", inside the root (verl), or to the standard "deviation" (VL-DAC)."""
    scale: float = rare(bounded(1.0, above=0))
    """Factor applied after clipping (AWM: 0.2 after a clip of 5, so that advantages stay within +-1)."""

    def __call__(self, advantage: Tensor, rollouts: Rollouts) -> Tensor:
        """Scaled advantages (B, T), 0 if nothing is trained."""
        # over the whole rollout step, of all processes: compute_advantages gets every row
        advantage = WHITENINGS[self.whiten](advantage, rollouts, self.eps_to)
        if self.clip is not None:
            # after whitening, so that the bound is in standard deviations
            advantage = advantage.clamp(-self.clip, self.clip)
        return advantage * self.scale

    def needed_turns(self) -> frozenset[str]:
        """Inputs that whitening requires."""
        return frozenset({"turns"}) if self.whiten == "turns" else frozenset()

    def formula(self) -> str:
        return "".join(self._steps())

    def _steps(self) -> Iterator[str]:
        if self.whiten != "none":
            yield f"; then whitened, {whitening(self.whiten, self.eps_to)}"
        if self.clip is not None:
            yield f"; then limited to +-{self.clip:g}"
        if self.scale != 1:
            yield f"; then times {self.scale:g}"


def _not(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    return advantage


def _over_decisions(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    return masked_whiten(advantage, rollouts.loss_mask, eps_to)


def _over_rows(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    mask = rollouts.loss_mask
    # only rows with a trained decision are samples; an empty one would pull the mean to 0
    return _by_samples(advantage, masked_mean(advantage, mask)[mask.sum(1) > 0], mask, eps_to)


def _over_turns(advantage: Tensor, rollouts: Rollouts, eps_to: str) -> Tensor:
    means, trained = turn_means(rollouts, advantage)
    return _by_samples(advantage, means[trained], rollouts.loss_mask, eps_to)


def _by_samples(advantage: Tensor, samples: Tensor, mask: Tensor, eps_to: str) -> Tensor:
    """Shift and scale advantages by the mean and the deviation of samples (n,)."""
    # no sample at all, such as a step without a scored row, gives 0 and not NaN
    mean = samples.mean() if len(samples) else samples.new_zeros(())
    # at least 1: a single sample has the variance 0
    variance = ((samples - mean) ** 2).sum() / max(len(samples) - 1, 1)
    return torch.where(mask > 0, (advantage - mean) * whitening_factor(variance, eps_to), 0.0)


WHITENINGS = {"none": _not, "decisions": _over_decisions, "rows": _over_rows, "turns": _over_turns}
