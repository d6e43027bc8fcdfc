"""Regression of a value head on returns, in the policy's network or in a critic of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.block import Block
from mmrl.fields import bounded, rare


def value_loss(
    values: Tensor, values_old: Tensor, returns: Tensor, clip: float | None = None, *, halved: bool = True
) -> Tensor:
    """Return the squared error of the value head, halved, optionally pessimistic about large moves.

    max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2

    Args:
        values: (B, T), current predictions.
        values_old: (B, T), predictions when the rows were sampled.
        returns: (B, T), targets.
        clip: c; None gives the plain squared error.
        halved: whether it is divided by 2.

    Returns:
        (B, T).

    Gradient: through `values`; none where the clipped branch is the larger one.

    Source: openai/baselines ppo2; volcengine/verl verl/trainer/ppo/core_algos.py compute_value_loss.
    """
    values_old, returns = values_old.detach(), returns.detach()
    error = (values - returns) ** 2
    if clip is not None:
        near = values_old + (values - values_old).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns) ** 2)
    return 0.5 * error if halved else error


@dataclass(frozen=True)
class ValueLoss(Block):
    """Squared error of the critic on the returns, clipped if asked for; see `value_loss`."""

    kind = "squared_error"
    coef: float = rare(bounded(0.1, above=0))
    """Weight."""
    clip: float | None = rare(bounded(None, above=0))
    """Largest move of a value away from its old prediction that the loss rewards; None does not clip."""

    halved: bool = rare(True)
    """Whether the squared error is divided by 2 (verl, OpenRLHF) or not (VL-DAC)."""

    def __call__(self, values: Tensor, values_old: Tensor, returns: Tensor) -> Tensor:
        return value_loss(values, values_old, returns, self.clip, halved=self.halved)

    def formula(self) -> str:
        clip = f", V within V_old +-{self.clip:g} if that is worse" if self.clip else ""
        return f"{'0.5 ' if self.halved else ''}(V_it - (A + V_old)_it)^2{clip}"


@dataclass(frozen=True)
class SeparateCritic(Block):
    """No term in the loss: the recipe trains the critic apart from the policy, with its own optimiser."""

    kind = "separate"
    needs = frozenset({"separate_critic"})

    def formula(self) -> str:
        return "the critic is trained apart"


VALUES: dict[str, type[Block]] = {block.kind: block for block in (ValueLoss, SeparateCritic)}
