"""The units of a policy's data, where they are not the simulator's -1..1.

Shapes: D entries of an action, ... any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError


@dataclass(frozen=True)
class ActionRange:
    """Values of a policy's data that are -1 and 1 of the simulator, for each of D entries of an action.

    Unlike `ActionStatistics`, which normalise demonstrations and are applied outside the policy, this converts the
    actions of a policy that already has its own units, inside it.
    """

    low: tuple[float, ...]
    """D values that are -1 of the simulator."""
    high: tuple[float, ...]
    """D values that are 1 of the simulator."""

    @classmethod
    def of(cls, low: Sequence[float], high: Sequence[float], size: int, policy: str) -> ActionRange | None:
        """Make one from options."""
        if not low and not high:
            return None
        for name, values in (("action_low", low), ("action_high", high)):
            if values and len(values) != size:
                raise UserError(
                    f"model.options.{name} has {len(values)} entries, the actions of {policy} have {size}; give that "
                    "many"
                )
        return cls(tuple(low) or (-1.0,) * size, tuple(high) or (1.0,) * size)

    def to_sim(self, actions: Tensor) -> Tensor:
        """Convert actions (..., D) of the data to the simulator's, 2 (a - low) / (high - low) - 1, not clipped."""
        low, width = self._scales(actions)
        return (2 * (actions.double() - low) / width - 1).to(actions.dtype)

    def to_data(self, actions: Tensor) -> Tensor:
        """Convert actions (..., D) of the simulator to the data's, (a + 1) / 2 (high - low) + low."""
        low, width = self._scales(actions)
        return ((actions.double() + 1) / 2 * width + low).to(actions.dtype)

    def as_dict(self) -> dict[str, Any]:
        """Both bounds as lists."""
        return {"low": list(self.low), "high": list(self.high)}

    def _scales(self, like: Tensor) -> tuple[Tensor, Tensor]:
        low, high = (torch.tensor(values, dtype=torch.float64, device=like.device) for values in (self.low, self.high))
        return low, high - low


def check_bounds(low: Sequence[float], high: Sequence[float]) -> None:
    """Check the options `action_low` and `action_high` as far as they go without a policy; raises ValueError."""
    if low and high and len(low) != len(high):
        raise ValueError(f"action_low has {len(low)} entries and action_high {len(high)}; give one each for each entry")
    size = max(len(low), len(high))
    pairs = zip(low or [-1.0] * size, high or [1.0] * size, strict=True)
    for entry, (least, most) in enumerate(pairs):
        if not (math.isfinite(least) and math.isfinite(most) and least < most):
            raise ValueError(
                f"entry {entry} of action_low is {least} and of action_high {most}; both must be finite, and the first "
                "one below the second"
            )
