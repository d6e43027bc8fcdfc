"""Dynamic loss scale of fp16, whose smallest positive number is 6e-8: smaller gradients would become 0.

The loss is multiplied by a power of two and its gradients divided by it in float32. A gradient that is not finite
halves the scale and its step is left out; many finite steps in a row double it.

Source: torch.amp.GradScaler, whose constants these are; Micikevicius et al., arXiv 1710.03740, section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

START, GROWTH_INTERVAL = 2.0**16, 2000
LARGEST, SMALLEST = 2.0**127, 2.0**-14
"""Beyond them are infinity in float32, and losses of 1 that are below the normal numbers of fp16."""


class LossScale:
    """Scale of the loss, 1 for good where it is not enabled."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.value = START if enabled else 1.0
        self.overflows = 0
        """Optimiser steps left out since the run began."""
        self._finite = 0

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss that gradients are taken of."""
        return loss * self.value if self.enabled else loss

    def unscale(self, weights: Sequence[nn.Parameter]) -> None:
        """Divide the gradients of float32 weights by the scale, in place."""
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / self.value)

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale may mend an overflow; if not, it has another cause."""
        return self.enabled and self.value > SMALLEST

    def shrink(self) -> None:
        """Halve the scale after a step with a gradient that is not finite."""
        self.value, self._finite = self.value / 2, 0
        self.overflows += 1

    def keep(self) -> None:
        """Count a finite step, the last of many of which doubles the scale."""
        self._finite += 1
        if self.enabled and self._finite == GROWTH_INTERVAL:
            self.value, self._finite = min(2 * self.value, LARGEST), 0

    def metrics(self) -> dict[str, float]:
        """The scale and the steps that were left out; nothing where losses are not scaled."""
        return {"optim/loss_scale": self.value, "optim/overflows": float(self.overflows)} if self.enabled else {}

    def state_dict(self) -> dict[str, Any]:
        """Scale and counts; empty where losses are not scaled."""
        return {"value": self.value, "overflows": self.overflows, "finite": self._finite} if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; the scale starts anew where the run did not scale losses before."""
        if self.enabled and state:
            self.value, self.overflows = float(state["value"]), int(state["overflows"])
            self._finite = int(state["finite"])
