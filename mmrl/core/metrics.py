"""Numbers about a loss that merge correctly over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Metric:
    """A sum and its weight, so that a mean can be taken after everything has been added."""

    total: float | Tensor
    """Weighted sum; the sum itself for kind "sum"; the largest value for kind "max"."""
    weight: float | Tensor = 1.0
    """Weight of the sum; unused by the kinds "sum" and "max"."""
    kind: str = "mean"
    """How parts merge: "mean" (totals and weights add), "sum" (totals add) or "max"."""

    @classmethod
    def summed(cls, total: float | Tensor) -> Metric:
        """A share of a sum, such as the part of a loss that one micro-batch contributes."""
        return cls(total, 1.0, "sum")

    @property
    def value(self) -> float:
        """The number to report; NaN for the mean of nothing."""
        total, weight = float(self.total), float(self.weight)
        if self.kind != "mean":
            return total
        return total / weight if weight else float("nan")


def mean_metric(x: Tensor, mask: Tensor) -> Metric:
    """Mean of (B, T) terms where the (B, T) mask is 1; no gradient."""
    return Metric(torch.where(mask > 0, x.detach(), 0.0).sum(), mask.sum())


def max_metric(x: Tensor, mask: Tensor) -> Metric:
    """Largest of (B, T) terms where the (B, T) mask is 1, -inf if there is none; no gradient."""
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
            merged[name] = _join(merged[name], metric) if name in merged else metric
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the number to report for every metric."""
    return {name: metric.value for name, metric in metrics.items()}


def _join(first: Metric, second: Metric) -> Metric:
    if first.kind != second.kind:
        raise ValueError(f"Cannot merge a metric of kind '{first.kind}' with one of kind '{second.kind}'.")
    if first.kind == "max":
        return first if float(first.total) >= float(second.total) else second
    if first.kind == "sum":
        return Metric.summed(first.total + second.total)
    return Metric(first.total + second.total, first.weight + second.weight)
