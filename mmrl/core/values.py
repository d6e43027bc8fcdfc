"""Regression of a value head on returns."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["value_loss"]


def value_loss(values: Tensor, values_old: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Return the squared error of the value head, halved, optionally pessimistic about large moves.

    max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Args:
        values: (B, T), current predictions.
        values_old: (B, T), predictions when the rows were sampled.
        returns: (B, T), targets.
        clip: c; None gives the plain squared error.

    Returns:
        (B, T).

    Gradient: through `values`; none where the clipped branch is the larger one.

    Source: openai/baselines ppo2; volcengine/verl verl/trainer/ppo/core_algos.py compute_value_loss.
    """
    values_old, returns = values_old.detach(), returns.detach()
    error = (values - returns) ** 2
    if clip is None:
        return 0.5 * error
    near = values_old + (values - values_old).clamp(-clip, clip)
    return 0.5 * torch.maximum(error, (near - returns) ** 2)
