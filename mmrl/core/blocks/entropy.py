"""Entropy bonuses that depend on the entropy of earlier steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.advantage import group_sum
from mmrl.core.blocks.divergence import FullEntropy
from mmrl.core.loss import PolicyOutputs, required
from mmrl.core.rollouts import Rollouts
from mmrl.fields import bounded, choice, rare

USUAL = "entropy_usual"
"""Key of `Rollouts.extras` (B, T): mean entropy so far of the turn in which each decision was taken."""
PENALTY = "entropy_penalty"
"""Key of `Rollouts.extras` (B,): weight of the penalty in this step, the same for all rows."""


class TurnEntropies:
    """Mean over steps of the mean entropy in each turn."""

    def __init__(self) -> None:
        self.steps = 0
        self.total = torch.zeros(0, dtype=torch.float64)
        self.count = torch.zeros(0, dtype=torch.float64)

    def note(self, entropy: Tensor, turn: Tensor) -> None:
        """Add a step, whose decisions (n,) were taken in turns (n,)."""
        turn, entropy = turn.cpu(), entropy.double().cpu()
        turns = max(len(self.total), int(turn.max()) + 1 if len(turn) else 0)
        number = group_sum(torch.ones_like(entropy), turn, turns)
        mean = group_sum(entropy, turn, turns) / number.clamp(min=1)
        missing = (0, turns - len(self.total))
        self.total = torch.nn.functional.pad(self.total, missing) + mean
        self.count = torch.nn.functional.pad(self.count, missing) + (number > 0)
        self.steps += 1

    def mean(self, turn: Tensor) -> Tensor:
        """Mean entropy so far of turns (B, T) that were seen."""
        return (self.total / self.count.clamp(min=1)).to(turn.device)[turn]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"steps": self.steps, "total": self.total, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.steps, self.total, self.count = state["steps"], state["total"], state["count"]


def phase_weight(step: int, steps: int) -> float:
    """Weight of the penalty in a step (from 0): slowly from 1 to 0.83 in the first half, then from 0.8 to 0.04.

    Source: WujiangXu/EPO verl/workers/actor/dp_actor.py _calculate_epoch_based_entropy_weight.
    """
    half, step = steps // 2, min(step, steps)
    if step <= half:
        return 1 - 0.2 * (1 - math.exp(-2 * step / half)) if half else 1.0
    return 0.8 * math.exp(-3 * (step - half) / (steps - half))


@dataclass(frozen=True)
class SmoothedEntropy(FullEntropy):
    """Entropy of the whole action distribution, less a penalty where it leaves a band around its history.

        H - scale w P,    P = relu(low h - H) + relu(H - high h)

    with h the mean over all steps so far, this one included, of the entropy before the update in the same turn (rows
    without turns have one), and w the weight of the phase. The public code's penalty is a constant outside the band,
    which has no gradient: it changes the loss that is reported and nothing else.

    Source: EPO, arXiv 2509.22576; WujiangXu/EPO verl/workers/actor/dp_actor.py generate_entropy_penalty.
    """

    kind = "smoothed"
    needs = frozenset({"entropy", "entropy_old"})
    low: float = rare(bounded(0.0, at_least=0))
    """Lower end of the band, as a factor of h."""
    high: float = rare(bounded(2.0, above=0))
    """Upper end of the band, as a factor of h."""
    scale: float = rare(bounded(1.0, at_least=0))
    """Weight of the penalty relative to the entropy."""
    penalty: str = rare(choice("hinge", ("hinge", "indicator")))
    """hinge, by how far the entropy is out of the band, or indicator, `outside` wherever it is out, as in the code."""
    outside: float = rare(bounded(0.1, above=0))
    """Penalty of the indicator."""
    phase_steps: int | None = rare(bounded(None, at_least=2))
    """Steps over which the weight of the penalty falls (the code: 150); None keeps it at 1."""

    def problems(self, where: str) -> Iterator[str]:
        yield from super().problems(where)
        if not self.low < self.high:
            yield f"{where}.low {self.low:g} must lie below {where}.high {self.high:g}"

    def state(self) -> TurnEntropies:
        """Mean entropy of each turn."""
        return TurnEntropies()

    def observe(self, rollouts: Rollouts, state: TurnEntropies) -> Rollouts:
        """Take the entropies before the update into the history, and add what the loss compares with."""
        entropy = required(rollouts.entropy, "rollouts.entropy", "entropy 'smoothed' remembers it")
        turn = torch.zeros_like(rollouts.mask, dtype=torch.int64) if rollouts.turn is None else rollouts.turn
        trained = rollouts.loss_mask > 0
        weight = 1.0 if self.phase_steps is None else phase_weight(state.steps, self.phase_steps)
        state.note(entropy[trained], turn[trained])
        usual = state.mean(torch.where(trained, turn, 0)) if len(state.total) else torch.zeros_like(entropy)
        found = {USUAL: usual.to(entropy.dtype), PENALTY: torch.full_like(rollouts.reward, weight)}
        return rollouts.replace(extras=rollouts.extras | found)

    def of_rollouts(self, outputs: PolicyOutputs, rollouts: Rollouts) -> Tensor:
        """Bonus (B, T), with gradient."""
        entropy = self(outputs)
        usual = required(rollouts.extras.get(USUAL), f"rollouts.extras['{USUAL}']", "compute_advantages sets it")
        low, high = self.low * usual, self.high * usual
        if self.penalty == "hinge":
            penalty = (low - entropy).clamp(min=0) + (entropy - high).clamp(min=0)
        else:
            penalty = self.outside * ((entropy <= low) | (entropy >= high)).to(entropy.dtype)
        return entropy - self.scale * rollouts.extras[PENALTY][:, None] * penalty

    def formula(self) -> str:
        band = f"{self.low:g} h, {self.high:g} h"
        penalty = {
            "hinge": f"(relu({self.low:g} h - H_it) + relu(H_it - {self.high:g} h))",
            "indicator": f"{self.outside:g} [H_it outside ({band})]",
        }
        weight = "" if self.phase_steps is None else f"w({self.phase_steps}) "
        return f"(H_it - {self.scale:g} {weight}{penalty[self.penalty]}), h = mean H of the turn in all steps so far"


SHARE = "entropy_share"
"""Key of `Rollouts.extras` (B,): this step's weight of the entropy as a share of the largest, the same for all rows."""


class Weight:
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

    def state(self) -> Weight:
        """The weight."""
        return Weight(self.start)

    def observe(self, rollouts: Rollouts, state: Weight) -> Rollouts:
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
