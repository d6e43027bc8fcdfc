"""Rewards to advantages: constants that say how much better a decision was than expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.groups import group_center, group_count, group_std, masked_whiten
from mmrl.core.returns import decision_rewards, gae, gae_over_turns, returns_to_go
from mmrl.core.rollouts import Rollouts

__all__ = [
    "ADVANTAGES",
    "CRITIC_ESTIMATORS",
    "GROUP_ESTIMATORS",
    "AdvantageFn",
    "AdvantageOptions",
    "check_group_size",
    "gae",
]

GROUP_ESTIMATORS = ("group_mean_std", "group_mean", "leave_one_out", "group_mean_batch_std", "group_mean_global_std")
CRITIC_ESTIMATORS = ("gae", "gae_turn")


@dataclass(frozen=True)
class AdvantageOptions:
    """The numbers of the advantage estimators; each says which estimators read it."""

    ddof: int = 1
    """group_mean_std: 1 divides the variance by n - 1 (DeepSeekMath, verl, TRL), 0 by n."""
    eps: float = 1e-6
    """group_mean_std, group_mean_global_std: added to the standard deviation (verl 1e-6; TRL, Flow-GRPO 1e-4)."""
    gamma: float = 1.0
    """whitened_returns, gae, gae_turn: discount per decision (per turn for gae_turn)."""
    lam: float = 1.0
    """gae, gae_turn: the lambda of generalised advantage estimation."""
    singleton: str = "zero"
    """Group estimators, group with one scored row: "zero" gives advantage 0, "keep" its raw reward (verl)."""
    whiten: bool = False
    """Whether to bring the result to mean 0 and variance 1 over all trained decisions of the rollout step."""
    gaps: str = "skip"
    """whitened_returns: "skip" carries the return across untrained decisions such as tool output, as GAE does;
    "reset" drops it there as verl does, so that only the decisions after the last gap see the reward."""
    clip: float | None = None
    """Largest size of an advantage; larger ones are set to +-clip, after whitening. None does not clip."""
    scale: float = 1.0
    """Factor on the advantages, after clipping (AWM: 0.2 after a clip of 5, so that they stay within +-1)."""


def check_group_size(samples_per_task: int, advantage: str) -> None:
    """Refuse a group estimator with groups of one sample, for which every advantage would be 0.

    Args:
        samples_per_task: Rows sampled for each task.
        advantage: Name of the estimator.

    Raises:
        ValueError: The estimator compares the rows of a group and there is only one.
    """
    if advantage in GROUP_ESTIMATORS and samples_per_task < 2:
        alone = sorted(set(ADVANTAGES) - set(GROUP_ESTIMATORS))
        raise ValueError(
            f"samples_per_task is {samples_per_task}, but the advantage '{advantage}' compares the samples of a group, "
            f"so every advantage would be 0; use 2 or more, or an estimator that works with one sample: "
            f"{', '.join(alone)}"
        )


def group_mean_std(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Reward minus group mean, over group standard deviation: (R - mean) / (std + eps).

    Args:
        rollouts: Scored rows.
        options: ddof, eps and singleton are used.

    Returns:
        (B, T), constant in a row, 0 where nothing is trained; 0 in groups whose rewards are all equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2.
    """
    reward, group, valid = rollouts.reward, rollouts.group, rollouts.scored
    std = group_std(reward, group, valid, options.ddof) + options.eps
    scaled = group_center(reward, group, valid) / torch.where(std > 0, std, 1.0)
    return _per_row(scaled, reward / (1.0 + options.eps), rollouts, options)


def group_mean(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Reward minus group mean.

    Args:
        rollouts: Scored rows.
        options: singleton is used.

    Returns:
        (B, T), constant in a row, 0 where nothing is trained; 0 in groups whose rewards are all equal.

    Source: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    centred = group_center(rollouts.reward, rollouts.group, rollouts.scored)
    return _per_row(centred, rollouts.reward, rollouts, options)


def leave_one_out(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Reward minus the mean of the other rows of the group, n / (n - 1) times `group_mean`.

    Args:
        rollouts: Scored rows.
        options: singleton is used.

    Returns:
        (B, T), constant in a row, 0 where nothing is trained; 0 in groups whose rewards are all equal.

    Source: RLOO, arXiv 2402.14740, section 3.2.
    """
    number = group_count(rollouts.group, rollouts.scored)
    centred = group_center(rollouts.reward, rollouts.group, rollouts.scored)
    return _per_row(centred * number / (number - 1).clamp(min=1), rollouts.reward, rollouts, options)


def whitened_returns(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Discounted sum of rewards to go, whitened over all trained decisions.

    Args:
        rollouts: Scored rows; groups are not looked at.
        options: gamma and gaps are used.

    Returns:
        (B, T), 0 where nothing is trained.

    Source: REINFORCE++, arXiv 2501.03262; volcengine/verl
        compute_reinforce_plus_plus_outcome_advantage (its carry is gaps="reset").
    """
    mask = rollouts.loss_mask
    to_go = returns_to_go(decision_rewards(rollouts), mask, options.gamma, options.gaps)
    return masked_whiten(to_go, mask)


def group_mean_batch_std(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Reward minus group mean, whitened over all trained decisions.

    The whitening subtracts the mean over decisions, so groups with equal rewards come out near 0 but not at 0
    when rows differ in length.

    Args:
        rollouts: Scored rows.
        options: singleton is used.

    Returns:
        (B, T), constant in a row, 0 where nothing is trained.

    Source: REINFORCE++-baseline, arXiv 2501.03262; volcengine/verl
        compute_reinforce_plus_plus_baseline_outcome_advantage.
    """
    return masked_whiten(group_mean(rollouts, options), rollouts.loss_mask)


def group_mean_global_std(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Reward minus group mean, over the standard deviation of all rewards: (R - mean_group) / (std_all + eps).

    Groups whose rewards hardly differ keep small advantages, which a division by their own spread would blow up.

    Args:
        rollouts: Scored rows of everything the rollout step produced.
        options: eps and singleton are used; the standard deviation divides by n, whatever ddof is.

    Returns:
        (B, T), constant in a row, 0 where nothing is trained; 0 in groups whose rewards are all equal.

    Source: Flow-GRPO, arXiv 2505.05470; yifan123/flow_grpo flow_grpo/stat_tracking.py with global_std.
    """
    reward, valid = rollouts.reward, rollouts.scored
    std = group_std(reward, torch.zeros_like(rollouts.group), valid, ddof=0) + options.eps
    scaled = group_center(reward, rollouts.group, valid) / torch.where(std > 0, std, 1.0)
    return _per_row(scaled, reward, rollouts, options)


def token_gae(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Generalised advantage estimation over decisions; see `gae`.

    Args:
        rollouts: Scored rows with `values`.
        options: gamma and lam are used.

    Returns:
        (B, T), 0 where nothing is trained.
    """
    values = _values(rollouts)
    return gae(decision_rewards(rollouts), values, rollouts.loss_mask, options.gamma, options.lam)[0]


def turn_gae(rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Generalised advantage estimation over turns; see `gae_over_turns`.

    Args:
        rollouts: Scored rows with `values` and `turn`.
        options: gamma and lam are used, per turn.

    Returns:
        (B, T), constant in a turn, 0 where nothing is trained.
    """
    return gae_over_turns(rollouts, _values(rollouts), options.gamma, options.lam)


def _values(rollouts: Rollouts) -> Tensor:
    if rollouts.values is None:
        raise ValueError(
            "The estimators 'gae' and 'gae_turn' need rollouts.values (B, T), the critic's prediction before each "
            "decision. Load the policy with a value head, or use a group estimator such as 'group_mean_std'."
        )
    return rollouts.values.detach()


def _per_row(usual: Tensor, alone: Tensor, rollouts: Rollouts, options: AdvantageOptions) -> Tensor:
    """Spread one number a row over its trained decisions; `alone` is for groups with one scored row."""
    if options.singleton == "keep":
        usual = torch.where(group_count(rollouts.group, rollouts.scored) > 1, usual, alone)
    return torch.where(rollouts.loss_mask > 0, usual.detach()[:, None], 0.0)


AdvantageFn = Callable[[Rollouts, AdvantageOptions], Tensor]

ADVANTAGES: dict[str, AdvantageFn] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "whitened_returns": whitened_returns,
    "group_mean_batch_std": group_mean_batch_std,
    "group_mean_global_std": group_mean_global_std,
    "gae": token_gae,
    "gae_turn": turn_gae,
}
