"""Rewards along a row: where they are received, sums to go, and generalised advantage estimation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mmrl.core.rollouts import Rollouts, turns_before

if TYPE_CHECKING:
    from torch import Tensor


def explained_variance(returns: Tensor, values: Tensor) -> float:
    """Fraction of the variance of returns (M,) explained by values (M,); NaN if all returns are equal."""
    # population variance on both sides: the factor would cancel in the ratio
    variance = float(returns.var(correction=0)) if len(returns) else 0.0
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else float("nan")


def decision_rewards(rollouts: Rollouts) -> Tensor:
    """Return the reward received at each decision.

    Args:
        rollouts: Its `extras["decision_reward"]` (B, T) is used where it exists; otherwise the reward of the
            row is received at its last trained decision.

    Returns:
        (B, T), 0 on untrained decisions and unscored rows.
    """
    mask = rollouts.loss_mask
    # where, not a product: unscored rows have NaN rewards, and 0 * NaN is NaN
    if "decision_reward" in rollouts.extras:
        return torch.where(mask > 0, rollouts.extras["decision_reward"], 0.0)
    # trained decisions from here to the end: it is 1 only at the last one and on the untrained decisions after it
    from_here_on = mask.flip(1).cumsum(1).flip(1)
    last = (mask > 0) & (from_here_on == 1)
    return torch.where(last, rollouts.reward[:, None], 0.0)


def returns_to_go(rewards: Tensor, mask: Tensor, gamma: float, mask_carry: str = "skip") -> Tensor:
    """Return the discounted sum of the rewards from each decision on.

    Args:
        rewards: (B, T).
        mask: (B, T) {0, 1}.
        gamma: Discount per trained decision.
        mask_carry: "skip" carries the sum across decisions with mask 0, "reset" restarts it there.

    Returns:
        (B, T), 0 where the mask is 0.
    """
    carry = torch.zeros_like(rewards[:, 0])
    # from the last decision back, each return from the one after it
    columns = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        trained = mask[:, t] > 0
        here = rewards[:, t] + gamma * carry
        columns.append(torch.where(trained, here, 0.0))
        # "skip" passes untrained decisions without discounting: gamma counts decisions of the policy only
        carry = torch.where(trained, here, carry if mask_carry == "skip" else torch.zeros_like(carry))
    return torch.stack(columns[::-1], dim=1)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    masked: Tensor | None = None,
    repeated: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation that skips untrained decisions.

    A_t = delta_t + gamma lam A_next with delta_t = r_t + gamma V_next - V_t, where "next" is the next decision with
    mask 1. After the last one A is 0 and V is `bootstrap`: 0 where the episode terminated, the critic's value of
    the last state where it was truncated.

    Args:
        rewards: (B, T), reward received at each decision; ignored where the mask is 0.
        values: (B, T), value of the state before each decision.
        mask: (B, T) {0, 1}.
        gamma: Discount.
        lam: Weight of longer returns.
        bootstrap: (B,) value of the state after the last decision; 0 for episodes that terminated. None is 0 for all.
        masked: (B,) bool, rows whose last decision has the advantage 0 and is worth its own value to those before it;
            None for none.
        repeated: (B,) bool, rows after whose last decision V is that before it, instead of `bootstrap`.

    Returns:
        advantages (B, T) and returns (B, T) = advantages + values; both 0 where the mask is 0.

    Source: arXiv 1506.02438, eq. 11-16; volcengine/verl compute_gae_advantage_return.
    """
    carry = torch.zeros_like(values[:, 0])
    # no gradient through the target, as in semi-gradient TD
    next_value = carry if bootstrap is None else bootstrap.detach().to(values.dtype)
    columns, open_end = [], masked
    for t in range(values.shape[1] - 1, -1, -1):
        trained = mask[:, t] > 0
        # up to the last trained decision of a repeated row: what follows is worth as much as the state before it
        if repeated is not None:
            next_value = torch.where(repeated, values[:, t], next_value)
            repeated = repeated & ~trained
        here = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * carry
        # in a masked row, only the last trained decision: `open_end` turns false once it has been passed
        if open_end is not None:
            here = here.masked_fill(open_end, 0.0)
            open_end = open_end & ~trained
        # tool output and padding are passed over: the next trained decision is the successor state
        carry = torch.where(trained, here, carry)
        next_value = torch.where(trained, values[:, t], next_value)
        columns.append(torch.where(trained, here, 0.0))
    advantages = torch.stack(columns[::-1], dim=1)
    # returns are advantages plus values, not sums of rewards: the lambda-return of the same estimate
    return advantages, torch.where(mask > 0, advantages + values, 0.0)


def gae_over_turns(
    rollouts: Rollouts,
    values: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Tensor | None = None,
    masked: Tensor | None = None,
    repeated: Tensor | None = None,
) -> Tensor:
    """Generalised advantage estimation with one step per turn; all decisions of a turn share its advantage.

    A turn's reward is the sum of its decisions' rewards and its value is that before its first decision.

    Args:
        rollouts: With `turn`.
        values: (B, T), value of the state before each decision.
        gamma: Discount per turn.
        lam: Weight of longer returns.
        bootstrap: (B,) value after the last turn, as in `gae`.
        masked: (B,) bool, rows whose last turn has the advantage 0, as in `gae`.
        repeated: (B,) bool, rows after whose last turn V is that before it, as in `gae`.

    Returns:
        (B, T), 0 if nothing is trained.

    Source: VL-DAC, arXiv 2508.04280, eq. 3-6 (step-level critic, token-level policy).
    """
    # a turn is one step: its value is asked before its first decision, its reward is the sum over its decisions
    starts, mask = turn_starts(rollouts), rollouts.loss_mask
    turn_rewards, place = turn_sums(rollouts, decision_rewards(rollouts).to(values.dtype))
    turn_values, turn_mask = (
        turn_sums(rollouts, torch.where(starts, x, 0.0))[0] for x in (values, mask.to(values.dtype))
    )
    advantages, _ = gae(turn_rewards, turn_values, turn_mask, gamma, lam, bootstrap, masked, repeated)
    # every decision of a turn gets the turn's advantage, as in PPO on joint actions
    return torch.where(mask > 0, advantages.gather(1, place), 0.0)


def turn_means(rollouts: Rollouts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of each turn over its trained decisions.

    Args:
        rollouts: With `turn`.
        x: (B, T).

    Returns:
        Means (B, K), with K the most turns of a row, and (B, K) bool, true where the row has the turn.
    """
    total, number = (turn_sums(rollouts, part)[0] for part in (x, rollouts.loss_mask.to(x.dtype)))
    # clamped because shorter rows have turns without decisions up to K
    return total / number.clamp(min=1), number > 0


def turn_sums(rollouts: Rollouts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of each turn over its trained decisions.

    Args:
        rollouts: With `turn`.
        x: (B, T).

    Returns:
        Sums (B, K), with K the most turns of a row, and (B, T) int64, the place in K of each decision's turn.
    """
    # index of the turn within the row, from 0; decisions before the first turn start are untrained, and count nothing
    place = (turn_starts(rollouts).long().cumsum(1) - 1).clamp(min=0)
    # from the CPU copies: reading K from a GPU tensor would wait for it
    width = max([1, *rollouts.host.turns.tolist()])
    empty = x.new_zeros(x.shape[0], width)
    # untrained decisions add 0, whichever turn they are assigned to
    return empty.scatter_add(1, place, torch.where(rollouts.loss_mask > 0, x, 0.0)), place


def turn_starts(rollouts: Rollouts) -> Tensor:
    """Find the first trained decision of every turn.

    Args:
        rollouts: With `turn`.

    Returns:
        (B, T) bool; false on unscored rows.

    Raises:
        ValueError: No turns.
    """
    if rollouts.turn is None:
        raise ValueError("Turn-level estimators require rollouts.turn (B, T), the environment step of each decision.")
    trained = rollouts.loss_mask > 0
    # the first trained decision, not the first one: a turn may begin with tool output
    return trained & (rollouts.turn > turns_before(trained, rollouts.turn))
