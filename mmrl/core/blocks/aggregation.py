"""Reduction of per-decision terms to the loss of an optimiser step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmrl.core.blocks.block import Block
from mmrl.core.loss import (
    Denominators,
    fixed_length,
    sequence_mean,
    sequence_sum,
    token_mean,
    turn_mean,
)
from mmrl.fields import bounded, rare


@dataclass(frozen=True)
class Aggregation(Block):
    """Reduces terms (B, T) to this batch's share of a mean over the whole optimiser step."""

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        """Scalar share of the mean of x (B, T) where mask (B, T) is 1; `turn` (B, T) int64 numbers the turns."""
        raise NotImplementedError


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Mean over all decisions of the step (DAPO, arXiv 2503.14476, eq. 12)."""

    kind = "token_mean"

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        return token_mean(x, mask, denominators)

    def formula(self) -> str:
        return "sum over all trained decisions of the step / their number"


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Mean over rows of each row's mean (GRPO, arXiv 2402.03300, eq. 3)."""

    kind = "sequence_mean"

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        return sequence_mean(x, mask, denominators)

    def formula(self) -> str:
        return "mean over the rows of the step of each row's mean over its decisions"


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """Mean over rows of each row's sum."""

    kind = "sequence_sum"

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        return sequence_sum(x, mask, denominators)

    def formula(self) -> str:
        return "mean over the rows of the step of each row's sum over its decisions"


@dataclass(frozen=True)
class TurnMean(Aggregation):
    """Mean over the turns of the step of each turn's mean: every turn counts the same, however long it is.

    Source: VL-DAC, arXiv 2508.04280; corl-team/VL-DAC a2c_ppo_acktr/algo/ppo.py, a batch of one environment step with
    accumulated gradients.
    """

    kind = "turn_mean"
    needs = frozenset({"turns"})

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        if turn is None:
            raise ValueError("The aggregation 'turn_mean' needs rollouts.turn (B, T), the turn of each decision.")
        return turn_mean(x, mask, turn, denominators)

    def formula(self) -> str:
        return "mean over the turns of the step of each turn's mean over its decisions"


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """Sum over all decisions divided by rows times a constant (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    kind = "fixed_length"
    length: int = rare(bounded(0, at_least=1))
    """Constant length: the longest response that the sampler allows."""

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        return fixed_length(x, mask, denominators)

    def formula(self) -> str:
        return f"sum over all trained decisions of the step / (rows * {self.length})"


AGGREGATIONS: dict[str, type[Aggregation]] = {
    block.kind: block for block in (TokenMean, SequenceMean, SequenceSum, TurnMean, FixedLength)
}
