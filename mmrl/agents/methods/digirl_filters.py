"""DigiRL's values, advantages and filters of trajectories and of their steps, as plain functions.

Letters: n trajectories, H steps of a trajectory, M steps of all trajectories one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

VALUE_MARGIN = 1e-4
"""Instruction values are kept this far from 0 and 1."""
CODE_OFFSET = 0.05
"""The public code subtracts this from every step's advantage."""


def discounted_returns(rewards: Sequence[float], gamma: float) -> Tensor:
    """Monte-Carlo return R_t = sum_u gamma^(u - t) r_u of each step of a trajectory, (H,) float64.

    Source: DigiRL-agent/digirl digirl/environment/env_utils.py, add_mc_return.
    """
    found, later = [], 0.0
    for reward in reversed(rewards):
        later = reward + gamma * later
        found.append(later)
    return torch.tensor(found[::-1], dtype=torch.float64)


def instruction_advantages(total: Tensor, value: Tensor) -> Tensor:
    """How much better than expected trajectories ended.

    Args:
        total: (n,) sum of the rewards of each.
        value: (n,) probability of success that the instruction's critic gives.

    Returns:
        (n,) total - value, the value kept between 1e-4 and 1 - 1e-4.

    Source: DigiRL-agent/digirl digirl/algorithms/offpolicy_train_loop.py, label_trajectories and filter_buffer.
    """
    return total - value.clamp(VALUE_MARGIN, 1 - VALUE_MARGIN)


def keep_best(scores: Tensor, quantile: float = 0.9, min_score: float | None = None) -> Tensor:
    """Select the trajectories that score at least a quantile of all.

    Where rewards are 0 or 1 and less than 1 - quantile of the trajectories succeed, the quantile of the rewards is 0
    and everything is kept; `min_score` then excludes failures.

    Args:
        scores: (n,) reward or advantage of each.
        quantile: of all scores, interpolated linearly; ties with it are kept.
        min_score: smallest score besides; None for no bound, as in the public code.

    Returns:
        (n,) bool.

    Source: DigiRL-agent/digirl digirl/algorithms/offpolicy_train_loop.py, filter_buffer and filterbc_buffer.
    """
    if not len(scores):
        return torch.zeros(0, dtype=torch.bool)
    kept = scores >= torch.quantile(scores.double(), quantile).to(scores.dtype)
    return kept if min_score is None else kept & (scores >= min_score)


def paper_advantages(value: Tensor, rewards: Tensor, lam: float = 0.5) -> Tensor:
    """Doubly robust advantage of each step: the final reward dominates near the end, the critic far from it.

    A_h = lam^(H - h) r_H + (1 - lam^(H - h)) (V(s_{h+1}) + r_h - V(s_h)),  h = 1 .. H

    Args:
        value: (H,) value of the state before each step; that after the last step is not needed, as its weight is 0.
        rewards: (H,) of each step.
        lam: weight of the trajectory's end, between 0 and 1; 0.5 as the discount of the public code.

    Returns:
        (H,).

    Source: DigiRL, arXiv 2406.11896, step-level advantage.
    """
    steps = len(value)
    weight = lam ** torch.arange(steps - 1, -1, -1, dtype=value.dtype, device=value.device)
    step_ahead = torch.cat([value[1:], value.new_zeros(1)]) + rewards - value
    return weight * rewards[-1] + (1 - weight) * step_ahead


def code_advantages(value: Tensor, next_value: Tensor, rewards: Tensor, returns: Tensor) -> Tensor:
    """Advantage V(s') - V(s) - 0.05 + r + R of each step as in the public code, (M,) all; steps above 0 are kept.

    The reward of the last step counts twice, in r and in R.

    Source: DigiRL-agent/digirl digirl/algorithms/digirl/trainer.py, actor_loss.
    """
    return next_value - value - CODE_OFFSET + rewards + returns


def step_threshold(rule: str, steps: int) -> float:
    """The smallest advantage of a kept step.

    Args:
        rule: "1/H", or a number.
        steps: H of its trajectory.

    Raises:
        ValueError: it is neither.
    """
    if rule.strip() == "1/H":
        return 1 / steps
    try:
        value = float(rule)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"the threshold of a step is {rule!r}; expected 1/H, or a number such as 0.05")
    return value


def clamp_logp(logp: Tensor, low: float = 0.001, high: float = 0.99) -> Tensor:
    """Log-probabilities in nats, of any shape, of probabilities clamped to [low, high].

    Gradient: none where a probability is out of bounds.

    Source: DigiRL-agent/digirl digirl/models/autoui_agent.py, get_log_prob.
    """
    return logp.clamp(math.log(low), math.log(high))
