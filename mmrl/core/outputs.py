"""What a policy says about the decisions of some rollouts, and what a loss gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.checks import check_decisions
from mmrl.core.metrics import Metric


@dataclass(frozen=True)
class PolicyOutputs:
    """What the policy says now about the decisions of some rollouts; carries the gradient."""

    logp: Tensor
    """(B, T) nats, float32 or float64; anything may stand where the mask is 0."""
    entropy: Tensor | None = None
    """(B, T) nats, of the whole action distribution; needed by entropy "full"."""
    values: Tensor | None = None
    """(B, T), value of the state before each decision; needed by a critic."""
    kl_ref: Tensor | None = None
    """(B, T) nats, exact divergence from the reference; needed by kl "full"."""

    def masked(self, mask: Tensor) -> PolicyOutputs:
        """Check shapes and set what is not trained to 0, so that no NaN comes back from there; mask (B, T) {0, 1}."""
        kept = {}
        for name in ("logp", "entropy", "values", "kl_ref"):
            value = getattr(self, name)
            if value is not None:
                check_decisions(f"scores.{name}", value, (mask.shape[0], mask.shape[1]))
                kept[name] = torch.where(mask > 0, value, 0.0)
        return PolicyOutputs(**kept)


@dataclass(frozen=True)
class LossOutput:
    """A loss and the numbers about it."""

    loss: Tensor
    """Scalar, this batch's share of the loss of the optimiser step."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Name to metric; merge them over the micro-batches of a step with `merge_metrics`."""


def required(value: Tensor | None, name: str, hint: str) -> Tensor:
    """`value`, or a ValueError that names what is missing and where it comes from."""
    if value is None:
        raise ValueError(f"{name} is missing: {hint}.")
    return value
