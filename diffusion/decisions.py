"""The trained decisions of a batch as one flat batch: gathered from (B, T) tables, scattered back, averaged.

Shapes: B rows (images), T decisions (denoising steps or noisy versions) of each, M of the B * T that are trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.aggregation import Denominators, token_mean
from mmrl.core.rollouts import Rollouts


@dataclass(frozen=True)
class TrainedDecisions:
    """Indices of the M decisions whose mask is 1."""

    index: Tensor
    """(M,) int64, index in the flattened (B, T)."""
    shape: torch.Size
    """(B, T)."""

    @classmethod
    def of(cls, rollouts: Rollouts) -> TrainedDecisions:
        """From the rollouts' mask, row by row."""
        return cls(torch.nonzero(rollouts.mask.flatten() > 0).flatten(), rollouts.mask.shape)

    @property
    def row(self) -> Tensor:
        """Row of each decision (M,) int64."""
        return self.index // self.shape[1]

    def gather(self, table: Tensor) -> Tensor:
        """Entries (M, ...) of a table (B, T, ...); columns after the first T are left out."""
        return table[:, : self.shape[1]].flatten(0, 1)[self.index]

    def scatter(self, values: Tensor) -> Tensor:
        """Scatter values (M,) into (B, T), 0 elsewhere."""
        return values.new_zeros(self.shape.numel()).index_copy(0, self.index, values).view(self.shape)


def mean_over_decisions(values: Tensor, minibatch: Rollouts, denominators: Denominators) -> Tensor:
    """Mean of values (B, T) over the trained decisions of the whole optimiser step."""
    mask = minibatch.loss_mask
    return token_mean(torch.where(mask > 0, values, 0.0), mask, denominators)
