"""Learning from the rows and decisions of a step that teach most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmrl.core.blocks.weight import WEIGHT, Weight, quantile
from mmrl.core.loss import masked_mean, required
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import Tally
from mmrl.fields import bounded, rare

STEPS = "steps"


def max_variance_rows(values: list[float], number: int) -> list[int]:
    """Indices of that many values whose variance is largest: some of the lowest and some of the highest.

    Source: Xu et al., Not All Rollouts are Useful, arXiv 2504.13818, theorem 1.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])

    def chosen(low: int) -> list[int]:
        return order[:low] + order[len(order) - (number - low) :]

    def spread(low: int) -> float:
        found = [values[index] for index in chosen(low)]
        mean = sum(found) / len(found)
        return sum((x - mean) ** 2 for x in found)

    return chosen(max(range(number + 1), key=spread))


@dataclass(frozen=True)
class DownSampled(Weight):
    """Learns from the rows of each group whose advantages vary most, and in them from decisions of high |A| H.

    H is the entropy before the update. What is kept weighs all decisions over the kept ones, so that a mean over all
    decisions of the step is one over these. All rows still pass the policy.

    Source: D3S, arXiv 2509.22115.
    """

    kind = "down_sampled"
    needs = frozenset({"samples", "entropy_old"})
    rows: float = rare(bounded(0.5, above=0, at_most=1))
    """Share of a group's rows that is kept at the start, at least 2 rows."""
    decisions: float = rare(bounded(0.2, above=0, at_most=1))
    """Share of the decisions of these rows that is kept at the start."""
    relax_steps: int = rare(bounded(0, at_least=0))
    """Steps over which both shares grow linearly to 1; 0 keeps them."""

    def state(self) -> Tally:
        """Steps so far."""
        return Tally()

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """See `Weight`; the weights of a first step."""
        return self.at(rollouts, 0)

    def observe(self, rollouts: Rollouts, state: Any) -> Rollouts:
        """Give the rows the weights of this step, and count it."""
        weight = self.at(rollouts, state[STEPS]).to(rollouts.logp_old.dtype)
        state[STEPS] += 1
        return rollouts.replace(extras=rollouts.extras | {WEIGHT: weight})

    def at(self, rollouts: Rollouts, step: int) -> Tensor:
        """Weights (B, T) after so many steps."""
        entropy = required(rollouts.entropy, "rollouts.entropy", f"weight '{self.kind}' selects by it")
        advantage = required(rollouts.advantage, "rollouts.advantage", "weights are computed after advantages")
        relaxed = min(step / self.relax_steps, 1.0) if self.relax_steps else 0.0
        rows, decisions = (share + (1.0 - share) * relaxed for share in (self.rows, self.decisions))
        mask = rollouts.loss_mask
        kept = mask * self._rows(rollouts, masked_mean(advantage, mask), rows)[:, None]
        score = advantage.abs() * entropy
        kept = kept * (score >= quantile(score, kept, 1.0 - decisions))
        return kept * mask.sum() / kept.sum().clamp(min=1)

    def _rows(self, rollouts: Rollouts, advantage: Tensor, share: float) -> Tensor:
        members: dict[int, list[int]] = {}
        for row, (group, valid) in enumerate(zip(rollouts.group.tolist(), rollouts.scored.tolist(), strict=True)):
            if valid:
                members.setdefault(group, []).append(row)
        values, kept = advantage.tolist(), torch.zeros(len(advantage), dtype=rollouts.mask.dtype)
        for found in members.values():
            number = min(len(found), max(2, round(share * len(found))))
            kept[[found[index] for index in max_variance_rows([values[row] for row in found], number)]] = 1.0
        return kept.to(advantage.device)

    def formula(self) -> str:
        grows = f", both growing to all over {self.relax_steps} steps" if self.relax_steps else ""
        return (
            f"u_it = all / kept decisions in the {100 * self.decisions:g} % of highest |A_it| H_it of those "
            f"{100 * self.rows:g} % of a group's rows whose A_i vary most, 0 elsewhere{grows}"
        )
