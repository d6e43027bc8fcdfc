"""Entropy bonus whose weight depends on the entropy of earlier steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.blocks.divergence import FullEntropy
from mmrl.core.loss import PolicyOutputs, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, rare

SHARE = "entropy_share"
"""Key of `Rollouts.extras` (B,): this step's weight of the entropy as a share of the largest, the same for all rows."""


class MovingWeight:
    """A weight that moves with each step."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint has to keep."""
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"]


@dataclass(frozen=True)
class TargetEntropy(FullEntropy):
    """Entropy of the whole action distribution, rewarded where it is at most a target, with a weight c that moves.

    In a step that begins with the mean entropy e, the weight is c where e <= target, else 0; then c moves by `step`,
    up where e < target, else down, and stays between 0 and `coef`.

    Source: Skywork-OR1, arXiv 2505.22312, section 3.2.3; huggingface/trl use_adaptive_entropy, which moves it with each
        optimiser step and compares with the entropy of the one before.
    """

    kind = "target"
    needs = frozenset({"entropy", "entropy_old"})
    coef: float = rare(bounded(1.0, above=0))
    """Largest weight."""
    target: float = rare(bounded(0.2, above=0))
    """Wanted mean entropy in nats."""
    step: float = rare(bounded(0.005, above=0))
    """Change of the weight after a step of the run."""
    start: float = rare(bounded(0.0, at_least=0))
    """Weight at the start of the run."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if self.start > self.coef:
            yield f"{where}.start {self.start:g} must be at most {where}.coef {self.coef:g}"

    def state(self) -> MovingWeight:
        """The weight."""
        return MovingWeight(self.start)

    def observe(self, rollouts: Rollouts, state: MovingWeight) -> Rollouts:
        """Note the weight of this step, and move it."""
        entropy = required(rollouts.entropy, "rollouts.entropy", "entropy 'target' compares it with the target")
        trained, share = rollouts.loss_mask > 0, 0.0
        if bool(trained.any()):
            mean = float(entropy[trained].double().mean())
            share = state.value / self.coef if mean <= self.target else 0.0
            moved = state.value + (self.step if mean < self.target else -self.step)
            state.value = min(max(moved, 0.0), self.coef)
        return rollouts.replace(extras=rollouts.extras | {SHARE: torch.full_like(rollouts.reward, share)})

    def of_rollouts(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Bonus (B, T), with gradient."""
        share = required(rollouts.extras.get(SHARE), f"rollouts.extras['{SHARE}']", "compute_advantages sets it")
        return share[:, None] * self(outputs)

    def formula(self) -> str:
        return (
            f"H_it c / {self.coef:g} where mean H <= {self.target:g}, c from {self.start:g} by +-{self.step:g} a step "
            f"within 0 and {self.coef:g}"
        )
