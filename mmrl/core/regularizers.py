"""Divergences from a reference policy, entropies, and the controller of the divergence's coefficient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.checks import look_up

__all__ = ["KL_KINDS", "AdaptiveKL", "entropy_from_logits", "entropy_sampled", "kl", "kl_full"]

EXPONENT_LIMIT = 20.0
VALUE_LIMIT = 10.0


def kl(logp: Tensor, logp_ref: Tensor, kind: str = "k3", clamp: bool = True) -> Tensor:
    """Estimate KL(policy || reference) at each decision from the log-probability of the decision taken.

    With d = logp - logp_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1. "k1p" and "k3p" have the value
    of k1 and k3 and the gradient of k2.

    Args:
        logp: (...) nats, under the policy that took the decision.
        logp_ref: (...) nats, under the reference.
        kind: One of `KL_KINDS`.
        clamp: Whether k3 limits its exponent to +-20 and its value to +-10 (EasyR1, verl) or not (TRL, View-R1).

    Returns:
        (...) nats.

    Raises:
        ValueError: Unknown kind.

    Gradient: through both arguments; detach the reference. k1 used as a loss has the gradient of the score
        function, whose mean under the policy is zero: it belongs into the reward.

    Source: Schulman, "Approximating KL divergence" (2020); volcengine/verl verl/trainer/ppo/core_algos.py
        kl_penalty.
    """
    return look_up(KL_KINDS, kind, "KL estimator")(logp, logp_ref, clamp)


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
    """Estimate the entropy at each decision by the negative log-probability of the decision taken.

    Args:
        logp: (...) nats.

    Returns:
        (...) nats.

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


@dataclass
class AdaptiveKL:
    """Controller that moves the coefficient of a divergence so that the divergence meets a target.

    Source: Ziegler et al., arXiv 1909.08593, section 2.2; volcengine/verl AdaptiveKLController.
    """

    coefficient: float
    """The coefficient now in use."""
    target: float
    """Wanted divergence in nats."""
    horizon: float
    """Samples over which the coefficient moves by the relative error."""

    def __post_init__(self) -> None:
        if min(self.coefficient, self.target, self.horizon) <= 0:
            raise ValueError(
                "AdaptiveKL needs a positive coefficient, target and horizon; got "
                f"{self.coefficient}, {self.target}, {self.horizon}."
            )

    def update(self, divergence: float, samples: int) -> float:
        """Move the coefficient after a step.

        Args:
            divergence: Measured divergence in nats.
            samples: Rows the step was made of.

        Returns:
            The new coefficient.
        """
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coefficient *= 1.0 + error * samples / self.horizon
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        self.coefficient = float(state["coefficient"])


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _k1(logp: Tensor, logp_ref: Tensor, clamp: bool) -> Tensor:
    return logp - logp_ref


def _k2(logp: Tensor, logp_ref: Tensor, clamp: bool) -> Tensor:
    return 0.5 * (logp - logp_ref) ** 2


def _k3(logp: Tensor, logp_ref: Tensor, clamp: bool) -> Tensor:
    exponent = logp_ref - logp
    if not clamp:
        return torch.exp(exponent) - exponent - 1.0
    exponent = exponent.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return (torch.exp(exponent) - exponent - 1.0).clamp(-VALUE_LIMIT, VALUE_LIMIT)


def _k1p(logp: Tensor, logp_ref: Tensor, clamp: bool) -> Tensor:
    return _straight_through(_k1(logp, logp_ref, clamp), _k2(logp, logp_ref, clamp))


def _k3p(logp: Tensor, logp_ref: Tensor, clamp: bool) -> Tensor:
    return _straight_through(_k3(logp, logp_ref, clamp), _k2(logp, logp_ref, clamp))


def _straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    return value.detach() + (gradient - gradient.detach())


KL_KINDS: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "k1p": _k1p,
    "k3p": _k3p,
}
