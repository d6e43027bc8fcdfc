"""Masked means of per-decision terms, with denominators counted once over the whole optimiser step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """What the sums of one optimiser step are divided by, over all micro-batches and all ranks."""

    tokens: float
    """Trained decisions."""
    rows: float
    """Rows with at least one trained decision; empty and unscored rows do not count."""
    length: float = 0.0
    """Constant divisor a row of "fixed_length"; 0 where that mode is not used."""
    turns: float = 0.0
    """Turns with at least one trained decision; 0 where neither the aggregation nor a critic needs them."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Counts that a recipe's own terms are divided by, by name."""

    @staticmethod
    def total(parts: Iterable[Denominators]) -> Denominators:
        """Add the counts of several batches or ranks; the constant length stays."""
        listed = list(parts)
        others: Counter[str] = Counter()
        for part in listed:
            others.update(part.others)
        return Denominators(
            tokens=sum(part.tokens for part in listed),
            rows=sum(part.rows for part in listed),
            length=max((part.length for part in listed), default=0.0),
            turns=sum(part.turns for part in listed),
            others=dict(others),
        )


def count(mask: Tensor, *, length: float = 0.0, turns: float = 0.0) -> Denominators:
    """Count the denominators of a batch.

    Args:
        mask: (B, T) {0, 1}, the loss mask of everything that goes into one optimiser step on this rank.
        length: Constant L of "fixed_length".
        turns: Number of turns, where the value loss needs it.

    Returns:
        The counts; add those of other ranks with `Denominators.total`.
    """
    lengths = mask.sum(1)
    return Denominators(float(lengths.sum()), float((lengths > 0).sum()), float(length), float(turns))


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum where the mask is 1; values elsewhere, even NaN, are ignored.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.

    Returns:
        (B,) row sums.
    """
    return torch.where(mask > 0, x, torch.zeros((), dtype=x.dtype, device=x.device)).sum(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row where the mask is 1; values elsewhere are ignored.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.

    Returns:
        (B,); 0 for rows without a 1.
    """
    return masked_sum(x, mask) / mask.sum(1).clamp(min=1).to(x.dtype)


def token_mean(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's share of the mean of x (B, T) over all trained decisions of the optimiser step.

    The shares of micro-batches and ranks add up to the mean over all of them, in value and in gradient.
    """
    return masked_sum(x, mask).sum() / max(denominators.tokens, 1.0)


def sequence_mean(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's share of the mean over rows of row means; see `token_mean`."""
    return masked_mean(x, mask).sum() / max(denominators.rows, 1.0)


def sequence_sum(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's share of the mean over rows of row sums; see `token_mean`."""
    return masked_sum(x, mask).sum() / max(denominators.rows, 1.0)


def turn_mean(x: Tensor, mask: Tensor, turn: Tensor, denominators: Denominators) -> Tensor:
    """This batch's share of the mean over turns of the mean of x (B, T) over each turn's decisions."""
    segment = turn_segments(turn)
    number = torch.zeros_like(mask).scatter_add(1, segment, mask).gather(1, segment).clamp(min=1)
    return masked_sum(x / number.to(x.dtype), mask).sum() / max(denominators.turns, 1.0)


def turn_segments(turn: Tensor) -> Tensor:
    """Number the turns of each row from 0: (B, T) int64; padding (-1) belongs to the turn before it."""
    changes = torch.zeros_like(turn)
    changes[:, 1:] = turn.cummax(1).values.diff(dim=1) != 0
    return changes.cumsum(1)


def fixed_length(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's share of the sum over rows * `denominators.length`; see `token_mean`."""
    if denominators.length <= 0:
        raise ValueError(
            "The aggregation 'fixed_length' divides every row by a constant; got length "
            f"{denominators.length:g}. Set its length to the longest response the sampler allows."
        )
    return masked_sum(x, mask).sum() / (max(denominators.rows, 1.0) * denominators.length)
