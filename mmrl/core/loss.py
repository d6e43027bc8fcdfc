"""Masked means of per-decision terms, metrics and policy outputs, with denominators counted once per optimiser step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mmrl.core.block import Block
from mmrl.core.payload import numbers
from mmrl.core.rollouts import check_decisions
from mmrl.fields import bounded, rare

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Denominators of one optimiser step, counted over all micro-batches and all ranks."""

    tokens: float
    """Trained decisions."""
    rows: float
    """Rows with at least one trained decision; empty and unscored rows do not count."""
    length: float = 0.0
    """Constant divisor per row for "fixed_length"; 0 if that mode is not used."""
    turns: float = 0.0
    """Turns with at least one trained decision; 0 if neither the aggregation nor a critic needs them."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Denominators of a recipe's additional loss terms, by name."""

    @staticmethod
    def total(parts: Iterable[Denominators]) -> Denominators:
        """Add the counts of several batches or ranks; the constant length is kept."""
        listed = list(parts)
        others: Counter[str] = Counter()
        for part in listed:
            others.update(part.others)
        return Denominators(
            tokens=sum(part.tokens for part in listed),
            rows=sum(part.rows for part in listed),
            # the constant of a rank without rows is the same one, not something to add
            length=max((part.length for part in listed), default=0.0),
            turns=sum(part.turns for part in listed),
            others=dict(others),
        )


def count(mask: Tensor, *, length: float = 0.0, turns: float | Tensor = 0.0) -> Denominators:
    """Count the denominators of a batch.

    Args:
        mask: (B, T) {0, 1}, the loss mask of all rows of one optimiser step on this rank.
        length: Constant L of "fixed_length".
        turns: Number of turns, if the loss needs it.

    Returns:
        The counts; add those of other ranks with `Denominators.total`.
    """
    # from the loss mask, so that unscored rows are in no denominator
    lengths = mask.sum(1)
    # one transfer for all counts
    tokens, rows, turns = numbers([lengths.sum(), (lengths > 0).sum(), turns])
    return Denominators(tokens, rows, float(length), turns)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum over entries with mask 1; other values, even NaN, are ignored.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.

    Returns:
        (B,) row sums.
    """
    # not x * mask, because 0 * NaN is NaN
    return torch.where(mask > 0, x, torch.zeros((), dtype=x.dtype, device=x.device)).sum(1)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over entries with mask 1; other values are ignored.

    Args:
        x: (B, T).
        mask: (B, T) {0, 1}.

    Returns:
        (B,); 0 for rows without a 1.
    """
    # an empty row has the sum 0, and clamp makes its mean 0 instead of NaN
    return masked_sum(x, mask) / mask.sum(1).clamp(min=1).to(x.dtype)


def token_mean(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's fraction of the mean of x (B, T) over all trained decisions of the optimiser step.

    The fractions of micro-batches and ranks add up to the mean over all of them, in value and in gradient.
    """
    # dividing by this batch's own count would make decisions of short micro-batches weigh more
    return masked_sum(x, mask).sum() / max(denominators.tokens, 1.0)


def sequence_mean(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's fraction of the mean over rows of row means; see `token_mean`."""
    # not .mean(): that would divide by the rows of this micro-batch, empty ones included
    return masked_mean(x, mask).sum() / max(denominators.rows, 1.0)


def sequence_sum(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's fraction of the mean over rows of row sums; see `token_mean`."""
    # the divisor is that of sequence_mean, so that the two differ only by the length of rows
    return masked_sum(x, mask).sum() / max(denominators.rows, 1.0)


def turn_mean(x: Tensor, mask: Tensor, turn: Tensor, denominators: Denominators) -> Tensor:
    """This batch's fraction of the mean over turns of the mean of x (B, T) over each turn's decisions."""
    segment = turn_segments(turn)
    # each decision is divided by the length of its turn, so that a sum over decisions is a sum of turn means
    number = torch.zeros_like(mask).scatter_add(1, segment, mask).gather(1, segment).clamp(min=1)
    return masked_sum(x / number.to(x.dtype), mask).sum() / max(denominators.turns, 1.0)


def turn_segments(turn: Tensor) -> Tensor:
    """Number the turns of each row from 0: (B, T) int64; padding (-1) belongs to the turn before it."""
    changes = torch.zeros_like(turn)
    # cummax carries the last turn over padding (-1), which would otherwise count as a change
    changes[:, 1:] = turn.cummax(1).values.diff(dim=1) != 0
    return changes.cumsum(1)


def fixed_length(x: Tensor, mask: Tensor, denominators: Denominators) -> Tensor:
    """This batch's fraction of the sum over rows * `denominators.length`; see `token_mean`."""
    if denominators.length <= 0:
        raise ValueError(
            f"The aggregation 'fixed_length' divides every row by a constant; got length {denominators.length:g}. "
            "Set it to the maximum response length of the sampler."
        )
    # not divided by the row's own length, which favours short correct and long wrong rows (Dr. GRPO)
    return masked_sum(x, mask).sum() / (max(denominators.rows, 1.0) * denominators.length)


@dataclass(frozen=True)
class Metric:
    """A sum and its weight, so that the mean can be taken after all parts have been added."""

    total: float | Tensor
    """Weighted sum; the sum itself for kind "sum"; the maximum for kind "max"."""
    weight: float | Tensor = 1.0
    """Weight of the sum; unused by the kinds "sum" and "max"."""
    kind: str = "mean"
    """Reduction over parts: "mean" (totals and weights add), "sum" (totals add) or "max"."""

    @classmethod
    def summed(cls, total: float | Tensor) -> Metric:
        """Part of a sum, such as the contribution of one micro-batch to the loss."""
        return cls(total, 1.0, "sum")

    @property
    def value(self) -> float:
        """The number to report; NaN for the mean of nothing."""
        total, weight = float(self.total), float(self.weight)
        if self.kind != "mean":
            return total
        # NaN, not 0: nothing was measured
        return total / weight if weight else float("nan")


def mean_metric(x: Tensor, mask: Tensor) -> Metric:
    """Mean of (B, T) terms where the (B, T) mask is 1; no gradient."""
    return Metric(torch.where(mask > 0, x.detach(), 0.0).sum(), mask.sum())


def row_metric(x: Tensor) -> Metric:
    """Mean of per-row numbers (B,); no gradient."""
    return Metric(x.detach().double().sum(), float(len(x)))


def max_metric(x: Tensor, mask: Tensor) -> Metric:
    """Maximum of (B, T) terms where the (B, T) mask is 1, -inf if there is none; no gradient."""
    if not x.numel():
        return Metric(float("-inf"), 1.0, "max")
    return Metric(torch.where(mask > 0, x.detach(), float("-inf")).max(), 1.0, "max")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches, minibatches or ranks.

    Args:
        parts: Name to metric; a part may lack names that others have.

    Returns:
        One metric a name; names keep the order in which they first occurred.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            # sums and weights are added and divided only in `value`: a mean of means would weigh short parts too much
            merged[name] = _join(merged[name], metric) if name in merged else metric
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the number to report for every metric."""
    return {name: metric.value for name, metric in plain_metrics(metrics).items()}


def plain_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics as Python numbers, so that metrics of different devices can be merged; synchronises the GPU once."""
    # all totals and weights in one transfer, however many metrics there are
    found = numbers([value for metric in metrics.values() for value in (metric.total, metric.weight)])
    pairs = zip(metrics.items(), found[::2], found[1::2], strict=True)
    return {name: Metric(total, weight, metric.kind) for (name, metric), total, weight in pairs}


def _join(first: Metric, second: Metric) -> Metric:
    if first.kind != second.kind:
        raise ValueError(f"Cannot merge a metric of kind '{first.kind}' with one of kind '{second.kind}'.")
    if first.kind == "max":
        if isinstance(first.total, torch.Tensor) and isinstance(second.total, torch.Tensor):
            # both on the device: comparing as floats would synchronise a GPU at every micro-batch
            return Metric(torch.where(first.total >= second.total, first.total, second.total), 1.0, "max")
        return first if float(first.total) >= float(second.total) else second
    if first.kind == "sum":
        # a sum is over parts, so the weight plays no role
        return Metric.summed(first.total + second.total)
    return Metric(first.total + second.total, first.weight + second.weight)


@dataclass(frozen=True)
class PolicyOutputs:
    """Current policy outputs of the decisions of some rollouts; carries the gradient."""

    logp: Tensor
    """(B, T) nats, float32 or float64; any value where the mask is 0."""
    entropy: Tensor | None = None
    """(B, T) nats, of the whole action distribution; needed by entropy "full"."""
    values: Tensor | None = None
    """(B, T), value of the state before each decision; needed by a critic."""
    kl_ref: Tensor | None = None
    """(B, T) nats, exact divergence from the reference; needed by kl "full"."""
    kl_old: Tensor | None = None
    """(B, T) nats, exact divergence from the policy that the update starts from; needed by clip "divergence_mask"."""
    collision: Tensor | None = None
    """(B, T), sum of the squared probabilities of the action distribution, without gradient."""
    routes: Tensor | None = None
    """(2, E), how often each of E experts is chosen and the sum of its probabilities; needed by a router loss."""
    states: Tensor | None = None
    """(M, H), last hidden states before the M trained decisions; needed by terms that use whole distributions."""

    def masked(self, mask: Tensor) -> PolicyOutputs:
        """Check shapes and set untrained entries to 0, so that no NaN flows back from them; mask (B, T) {0, 1}."""
        kept = {}
        for name in ("logp", "entropy", "values", "kl_ref", "kl_old"):
            value = getattr(self, name)
            if value is not None:
                check_decisions(f"scores.{name}", value, (mask.shape[0], mask.shape[1]))
                # where, not a product: it also stops the gradient, and 0 * NaN is NaN
                kept[name] = torch.where(mask > 0, value, 0.0)
        return PolicyOutputs(**kept)


@dataclass(frozen=True)
class LossOutput:
    """A loss and its metrics."""

    loss: Tensor
    """Scalar, this batch's fraction of the loss of the optimiser step."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Name to metric; merge them over the micro-batches of a step with `merge_metrics`."""


def required(value: Tensor | None, name: str, hint: str) -> Tensor:
    """Return `value`, or raise a ValueError that states what is missing and where it comes from."""
    if value is None:
        raise ValueError(f"{name} is missing: {hint}.")
    return value


@dataclass(frozen=True)
class Aggregation(Block):
    """Reduces terms (B, T) to this batch's fraction of a mean over the whole optimiser step."""

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        """Scalar fraction of the mean of x (B, T) where mask (B, T) is 1; `turn` (B, T) int64 numbers the turns."""
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
    """Mean over the turns of the step of each turn's mean: every turn has the same weight, however long it is.

    Source: VL-DAC, arXiv 2508.04280; corl-team/VL-DAC a2c_ppo_acktr/algo/ppo.py, a batch of one environment step with
    accumulated gradients.
    """

    kind = "turn_mean"
    needs = frozenset({"turns"})

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        if turn is None:
            raise ValueError("The aggregation 'turn_mean' requires rollouts.turn (B, T), the turn of each decision.")
        return turn_mean(x, mask, turn, denominators)

    def formula(self) -> str:
        return "mean over the turns of the step of each turn's mean over its decisions"


@dataclass(frozen=True)
class FixedLength(Aggregation):
    """Sum over all decisions divided by rows times a constant (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    kind = "fixed_length"
    length: int = rare(bounded(0, at_least=1))
    """Constant length: the maximum response length of the sampler."""

    def __call__(self, x: Tensor, mask: Tensor, denominators: Denominators, turn: Tensor | None = None) -> Tensor:
        # its own length: the policy's aggregation may be another one than the KL's
        counts = dataclasses.replace(denominators, length=self.length or denominators.length)
        return fixed_length(x, mask, counts)

    def formula(self) -> str:
        return f"sum over all trained decisions of the step / (rows * {self.length})"
