"""Terms that a recipe adds to the loss of its objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmrl.core.metrics import Metric
from mmrl.core.objective import LossOutput


@dataclass(frozen=True)
class LossTerms:
    """What a recipe adds to the loss of its objective."""

    terms: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars by metric name such as "loss/perception", each with its weight, divided like the objective's terms."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further metrics; the terms themselves are logged under their names."""

    def added_to(self, output: LossOutput) -> LossOutput:
        """The objective's loss plus these terms."""
        if not self.terms:
            return LossOutput(output.loss, output.metrics | dict(self.metrics))
        total = output.loss + torch.stack(list(self.terms.values())).sum()
        metrics = output.metrics | {name: Metric.summed(term.detach()) for name, term in self.terms.items()}
        metrics["loss/total"] = Metric.summed(total.detach())
        return LossOutput(total, metrics | dict(self.metrics))
