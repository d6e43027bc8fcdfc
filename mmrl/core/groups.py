"""Statistics of rewards within groups, and whitening over a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from mmrl.core.loss import masked_sum

WHITEN_EPS = 1e-8


def group_sum(x: Tensor, group: Tensor) -> Tensor:
    """Sum (N,) of x (B,) over the rows of each group (B,) int64, 0..N-1."""
    return x.new_zeros(_number_of_groups(group)).index_add(0, group, x)


def group_count(group: Tensor, valid: Tensor) -> Tensor:
    """Number (B,) int64 of valid (B,) bool rows in each row's group."""
    return group_sum(valid.long(), group)[group]


def group_extremes(x: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest valid value of each group, (N,) each; +inf and -inf for a group without a valid row."""
    low = x.new_full((_number_of_groups(group),), float("inf"))
    high = x.new_full((_number_of_groups(group),), float("-inf"))
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
    number = group_sum(valid.to(reward.dtype), group).clamp(min=1)
    mean = group_sum(torch.where(valid, reward, 0.0), group) / number
    # The mean of equal numbers may differ from them in the last bit, and dividing by the (then tiny) standard
    # deviation would turn that bit into an advantage.
    low, high = group_extremes(reward, group, valid)
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
    squares = group_sum(group_center(reward, group, valid) ** 2, group)[group]
    return (squares / (group_count(group, valid) - ddof).clamp(min=1)).sqrt()


def masked_whiten(x: Tensor, mask: Tensor, eps_to: str = "variance") -> Tensor:
    """Bring the masked values to mean 0 and (unbiased) variance 1, and everything else to 0.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.
        eps_to: What 1e-8 is added to, see `whitening_factor`.

    Returns:
        (B, T); 0 everywhere if all masked values are equal.

    Source: volcengine/verl masked_whiten, eps 1e-8 in the root; it leaves values where the mask is 0.
    """
    number = mask.sum()
    mean = masked_sum(x, mask).sum() / number.clamp(min=1)
    variance = masked_sum((x - mean) ** 2, mask).sum() / (number - 1).clamp(min=1)
    return torch.where(mask > 0, (x - mean) * whitening_factor(variance, eps_to), 0.0)


def whitening_factor(variance: Tensor, eps_to: str) -> Tensor:
    """Factor that gives centred values variance 1."""
    if eps_to == "deviation":
        return 1.0 / (variance.sqrt() + WHITEN_EPS)
    return torch.rsqrt(variance + WHITEN_EPS)


def _number_of_groups(group: Tensor) -> int:
    return int(group.max()) + 1 if len(group) else 0
