"""The formulas of soft actor-critic on batches of transitions with chunked actions, as functions of tensors.

Shapes: B transitions, E critics, M of them in a subset, K control steps of a chunk, h <= K of which were executed.

    R = sum_{i < h} gamma^i r_i
    y = R + gamma^h (1 - d) (min_{j in Z} Qbar_j(s', a') - alpha log pi(a' | o')),    Z a subset of M critics
    J_Q = mean_j mean_B (Q_j(s, a) - y)^2
    J_pi = mean_B (alpha log pi(a | o) - min_j or mean_j Q_j(s, a))
    J_alpha = - mean_B x (log pi(a | o) + H),    x = log alpha, H the target entropy

d is 1 if the task ended the episode, and 0 if a time limit cut it off: its value continues in the final observation.

Source: SAC, arXiv 1801.01290 and 1812.05905; subsets of critics: REDQ, arXiv 2101.05982, eq. 1 and algorithm 1; chunks:
    Q-chunking, arXiv 2507.07969, eq. 7, but with the number h of executed steps as the exponent, so that a chunk which
    the end of an episode cuts short is discounted by the steps it took. A mean over critics instead of a sum, as in
    ikostrikov/rlpd rlpd/agents/sac/sac_learner.py: the losses of other numbers of critics are then comparable.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

LOG_ALPHA = (-10.0, 2.0)
"""Bounds of log alpha, beyond which entropy would be ignored, or all that counts."""


def discounted_rewards(rewards: Tensor, steps: Tensor, gamma: float) -> Tensor:
    """Discounted sums R (B,) of the executed control steps.

    Args:
        rewards: (B, K) reward of each control step.
        steps: (B,) int64, h.
        gamma: discount of a control step.
    """
    places = torch.arange(rewards.shape[1], device=rewards.device)
    # the rest of a chunk did not happen; where and not a product, so that padding may hold anything
    executed = torch.where(places < steps[:, None], rewards, 0.0)
    return (executed * rewards.new_tensor(gamma).pow(places)).sum(1)


def soft_targets(rewards: Tensor, steps: Tensor, terminated: Tensor, next_values: Tensor, gamma: float) -> Tensor:
    """Targets y (B,) of all critics.

    Args:
        rewards: (B, K) reward of each control step.
        steps: (B,) int64, h.
        terminated: (B,) bool, d; False if the episode goes on or was cut off by a time limit.
        next_values: (B,) value of the following observation, of `soft_values`.
        gamma: discount of a control step.

    Gradient: none.
    """
    ongoing = torch.where(terminated, 0.0, next_values.detach())
    return discounted_rewards(rewards, steps, gamma) + rewards.new_tensor(gamma).pow(steps) * ongoing


def soft_values(q: Tensor, logp: Tensor, alpha: float | Tensor) -> Tensor:
    """Values (B,) of a sampled action with the value q (B,) and the log-density logp (B,) in nats."""
    return q - alpha * logp


def subset_min(q: Tensor, size: int, generator: torch.Generator | None = None) -> Tensor:
    """Minimum (B,) over a random subset of the critics.

    Args:
        q: (E, B).
        size: M; 0 or E for all of them, which draws nothing.
        generator: of the subset, one for the whole batch, drawn without replacement.
    """
    if size in (0, len(q)):
        return q.min(0).values
    chosen = torch.randperm(len(q), generator=generator)[:size]
    return q[chosen.to(q.device)].min(0).values


def critic_loss(q: Tensor, targets: Tensor) -> Tensor:
    """J_Q () of the values (E, B) and the targets (B,).

    Gradient: into q.
    """
    return (q - targets.detach()).square().mean()


def actor_loss(q: Tensor, logp: Tensor, alpha: float | Tensor) -> Tensor:
    """J_pi () of the values (B,) and log-densities (B,) of sampled actions.

    Gradient: into q and logp.
    """
    return (alpha * logp - q).mean()


def temperature_loss(log_alpha: Tensor, logp: Tensor, target_entropy: float) -> Tensor:
    """J_alpha (); the gradient of log alpha does not shrink with alpha.

    Gradient: into log_alpha.
    """
    return -(log_alpha * (logp.detach() + target_entropy)).mean()


def polyak_(targets: Iterable[Tensor], weights: Iterable[Tensor], tau: float) -> None:
    """Move the targets by tau towards the weights, in place."""
    with torch.no_grad():
        for target, weight in zip(targets, weights, strict=True):
            target.lerp_(weight, tau)
