"""Weights of decisions in the policy loss: which of them the update should learn from, and how much.

They are computed once a step, after the advantages and over the rows of all processes, and are constants of the update.
Denominators still count all trained decisions, as in TRL, unless a block says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.block import Block
from mmrl.core.loss import masked_sum, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

DURATION = "duration"
"""Key of `Rollouts.extras` (B, T): the seconds of the action that each decision belongs to."""

WEIGHT = "weight"
"""Key of `Rollouts.extras` (B, T): the weights that `Objective.compute_advantages` sets."""


@dataclass(frozen=True)
class Weight(Block):
    """Factor of each decision's policy loss."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """Weights (B, T), at least 0, of rollouts with advantages; no gradient, any value where nothing is trained."""
        raise NotImplementedError


def quantile(x: Tensor, mask: Tensor, q: float) -> Tensor:
    """Quantile q of x (B, T) where the mask (B, T) is 1, interpolated linearly; NaN if that is nowhere.

    Unlike `torch.quantile` it has no limit of 16 million numbers, and the host does not wait for a GPU.
    """
    last = int(mask.numel()) - 1
    # untrained decisions at the end, so that positions count only trained ones
    ordered = torch.where(mask > 0, x, float("inf")).flatten().sort().values
    # a tensor, because the number of trained decisions is only known on the device
    position = (q * (mask.sum() - 1)).clamp(min=0)
    below = position.floor().long()
    low, high = ordered[below], ordered[(below + 1).clamp(max=last)]
    # no interpolation at whole positions, where the upper neighbour may be the inf of padding
    found = torch.where(position > below, torch.lerp(low, high, (position - below).to(x.dtype)), low)
    return torch.where(mask.any(), found, torch.nan)


@dataclass(frozen=True)
class TopEntropy(Weight):
    """Learns from the decisions with the highest entropy only: 1 for them, 0 for the others.

    The entropy is that of the policy that the update starts from, and the threshold is a quantile over the decisions of
    the step. TRL takes the updated policy's, and the quantile of each micro-batch over all processes.

    Source: Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939; huggingface/trl top_entropy_quantile.
    """

    kind = "top_entropy"
    needs = frozenset({"entropy_old"})
    share: float = rare(bounded(0.2, above=0, at_most=1))
    """Share of the decisions that are learnt from."""

    def __call__(self, rollouts: Rollouts) -> Tensor:
        entropy = required(rollouts.entropy, "rollouts.entropy", "weight 'top_entropy' selects by it")
        # ties at the threshold all stay, so slightly more than the share may be kept
        return (entropy >= quantile(entropy, rollouts.loss_mask, 1.0 - self.share)).to(entropy.dtype)

    def formula(self) -> str:
        return f"u_it = 1 where the entropy is among the highest {100 * self.share:g} % of the step, 0 elsewhere"


@dataclass(frozen=True)
class Duration(Weight):
    """Weighs a decision by the time that its action took, relative to the mean of the step.

    Asynchronous workers return fast actions more often, so that slow ones would be trained too little.

    Source: Yang et al., RL for Machine Learning Engineering Agents, arXiv 2509.01684, section 4.1; the paper leaves the
        normaliser open.
    """

    kind = "duration"
    needs = frozenset({"durations"})

    def __call__(self, rollouts: Rollouts) -> Tensor:
        found, mask = rollouts.extras.get(DURATION), rollouts.loss_mask
        duration = required(found, f"rollouts.extras['{DURATION}']", "weight 'duration' reads it").to(mask.dtype)
        mean = masked_sum(duration, mask).sum() / mask.sum().clamp(min=1)
        # without any duration every decision weighs the same
        return torch.where(mean > 0, duration / mean, 1.0)

    def formula(self) -> str:
        return "u_it = duration_it / mean duration of the step"
