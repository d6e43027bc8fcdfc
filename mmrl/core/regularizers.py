"""Divergences from a reference policy and entropies, as plain functions."""

from __future__ import annotations

import torch
from torch import Tensor

EXPONENT_LIMIT = 20.0
VALUE_LIMIT = 10.0


def k1(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate KL(policy || reference) at each decision taken by d = logp - logp_ref.

    Used as a loss it has the gradient of the score function, whose mean under the policy is zero: it belongs into the
    reward. `k2` and `k3` have the same arguments.

    Args:
        logp: (...) nats, under the policy that took the decision.
        logp_ref: (...) nats, under the reference.

    Returns:
        (...) nats.

    Gradient: through both arguments; detach the reference.

    Source: Schulman, "Approximating KL divergence" (2020); volcengine/verl verl/trainer/ppo/core_algos.py kl_penalty.
    """
    return logp - logp_ref


def k2(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """Estimate the divergence by d^2 / 2; see `k1`."""
    return 0.5 * (logp - logp_ref) ** 2


def k3(logp: Tensor, logp_ref: Tensor, clamp: bool = True) -> Tensor:
    """Estimate the divergence by exp(-d) + d - 1; see `k1`.

    Args:
        logp: (...) nats, under the policy that took the decision.
        logp_ref: (...) nats, under the reference.
        clamp: Whether to limit the exponent to +-20 and the value to +-10 (EasyR1, verl) or not (TRL, View-R1).

    Returns:
        (...) nats, not negative.
    """
    exponent = logp_ref - logp
    if not clamp:
        return torch.exp(exponent) - exponent - 1.0
    exponent = exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.exp(exponent) - exponent - 1.0).clamp(-VALUE_LIMIT, VALUE_LIMIT)


def k1p(logp: Tensor, logp_ref: Tensor) -> Tensor:
    """`k1` with the gradient of `k2`."""
    return _straight_through(k1(logp, logp_ref), k2(logp, logp_ref))


def k3p(logp: Tensor, logp_ref: Tensor, clamp: bool = True) -> Tensor:
    """`k3` with the gradient of `k2`."""
    return _straight_through(k3(logp, logp_ref, clamp), k2(logp, logp_ref))


def kl_full(logits: Tensor, logits_ref: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the exact KL(policy || reference) over the whole vocabulary.

    Args:
        logits: (..., V).
        logits_ref: (..., V); -inf must stand at the same entries as in `logits`.
        temperature: Both are divided by it.

    Returns:
        (...) nats, float32 (float64 for float64 logits).

    Gradient: through both arguments; detach the reference.
    """
    logp = torch.log_softmax(_upcast(logits) / temperature, dim=-1)
    logp_ref = torch.log_softmax(_upcast(logits_ref) / temperature, dim=-1)
    allowed = torch.isfinite(logp)
    difference = torch.where(allowed, logp, 0.0) - torch.where(allowed, logp_ref, 0.0)
    return (logp.exp() * difference).sum(-1)


def entropy_sampled(logp: Tensor) -> Tensor:
    """Estimate the entropy at each decision by the negative log-probability (...) of the decision taken, in nats.

    Gradient: -d logp, whose mean under the policy is zero: the term acts only off policy.
    """
    return -logp


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature).

    Args:
        logits: (..., V); -inf marks entries that cannot be chosen.
        temperature: Divides the logits.

    Returns:
        (...) nats, float32 (float64 for float64 logits).
    """
    logp = torch.log_softmax(_upcast(logits) / temperature, dim=-1)
    return -(logp.exp() * torch.where(torch.isfinite(logp), logp, 0.0)).sum(-1)


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + (gradient - gradient.detach())
