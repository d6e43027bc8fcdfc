"""Importance ratios between the new and the old policy, of a decision or of a whole row.

Below, d = logp - logp_old, limited to +-20. "sequence" and "sequence_full" have equal values, and equal gradients when
the advantage is constant in a row and rows are averaged; only "sequence" stays meaningful with advantages that differ
inside a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmrl.core.aggregation import masked_mean, masked_sum
from mmrl.core.blocks.advantage import Advantage
from mmrl.core.blocks.block import Block
from mmrl.fields import bounded, rare

LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True)
class Ratio(Block):
    """Log importance ratio that stands at each decision."""

    level: ClassVar[str] = "row"
    """What shares one ratio: "decision" or "row"."""
    row_gradient: ClassVar[bool] = False
    """Whether the ratio of a row has the gradient of all its decisions, so that the advantage must be the row's too."""

    @property
    def limited(self) -> bool:
        """Whether the log-ratio is bounded, so that a ratio can be made of it."""
        return True

    def __call__(self, logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
        """Log-ratios (B, T) in nats of logp to logp_old, 0 where the mask is 0 (row level: the row's value).

        Gradient: through logp only.
        """
        difference = torch.where(mask > 0, logp - logp_old.detach(), 0.0)
        return self.of(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), logp, mask)

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        """The ratio from the limited differences d (B, T)."""
        raise NotImplementedError

    def formula(self) -> str:
        return f"r_it = exp({self.rule()})"

    def rule(self) -> str:
        """The exponent of the formula."""
        raise NotImplementedError

    def conflicts(self, advantage: Advantage) -> Iterator[str]:
        """Yield why the ratio does not fit an estimator."""
        if self.row_gradient and advantage.level != "row":
            yield (
                f"ratio '{self.kind}' is one number a row, but advantage '{advantage.kind}' differs inside a row. "
                "Use ratio 'token' or 'sequence'."
            )


@dataclass(frozen=True)
class TokenRatio(Ratio):
    """The ratio of each decision (PPO, arXiv 1707.06347)."""

    kind = "token"
    level = "decision"

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return difference

    def rule(self) -> str:
        return "logp_it - logp_old_it"


@dataclass(frozen=True)
class SequenceRatio(Ratio):
    """The row mean of d as a value, limited to at most 10, with the gradient of the decision's own logp.

    Source: GSPO, arXiv 2507.18071, section 4.3; volcengine/verl compute_policy_loss_gspo.
    """

    kind = "sequence"

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        own = torch.where(mask > 0, logp - logp.detach(), 0.0)
        mean = masked_mean(difference, mask)[:, None]
        return (own + mean.detach()).clamp(max=SEQUENCE_LOG_RATIO_LIMIT)

    def rule(self) -> str:
        return "logp_it - stopgrad(logp_it) + stopgrad(mean_t (logp_it - logp_old_it))"


@dataclass(frozen=True)
class SequenceFullRatio(Ratio):
    """The row mean of d, with its full gradient.

    Source: GSPO, arXiv 2507.18071, eq. 5-7; huggingface/trl importance_sampling_level.
    """

    kind = "sequence_full"
    row_gradient = True

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        return masked_mean(difference, mask)[:, None].expand_as(difference)

    def rule(self) -> str:
        return "mean_t (logp_it - logp_old_it)"


@dataclass(frozen=True)
class SequenceProductRatio(Ratio):
    """The row sum of d, limited to +-20, with its full gradient (huggingface/trl RLOO)."""

    kind = "sequence_product"
    row_gradient = True
    limit: float | None = rare(bounded(LOG_RATIO_LIMIT, above=0))
    """Largest size of the sum, beyond which it has no gradient; none where no ratio is made of it."""

    @property
    def limited(self) -> bool:
        return self.limit is not None

    def of(self, difference: Tensor, logp: Tensor, mask: Tensor) -> Tensor:
        total = masked_sum(difference, mask)[:, None]
        if self.limit is not None:
            total = total.clamp(-self.limit, self.limit)
        return total.expand_as(difference)

    def rule(self) -> str:
        return "sum_t (logp_it - logp_old_it)"


RATIOS: dict[str, type[Ratio]] = {
    block.kind: block for block in (TokenRatio, SequenceRatio, SequenceFullRatio, SequenceProductRatio)
}
