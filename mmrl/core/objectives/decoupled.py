"""Advantages of several rewards, each compared separately before they are added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from mmrl.core.blocks.advantage import AdvantageScaling
from mmrl.core.loss import masked_mean
from mmrl.core.objectives.objective import Objective
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import ObjectiveState

if TYPE_CHECKING:
    from torch import Tensor

STD_EPS = 1e-4


def check_decoupled(objective: Objective) -> None:
    """Raise ValueError for blocks that only use the total reward."""
    if remembering := objective.advantage.state() and objective.advantage.kind:
        raise ValueError(f"advantage '{remembering}' only remembers the summed reward. Add up the rewards.")
    if objective.kl_in_reward or objective.needs_values:
        raise ValueError(
            f"The objective '{objective.name}' has "
            f"{'a critic' if objective.needs_values else 'a KL in the reward'}, which only uses the summed "
            "reward. Add up the rewards, or use a group estimator and a KL in the loss."
        )
    for key, block in objective.blocks.items():
        if block.reads_sum:
            raise ValueError(
                f"{key} '{block.kind}' uses the summed reward, but here each reward has its own advantages. Add "
                f"up the rewards, or use another {key}."
            )


def decoupled_advantages(
    objective: Objective, rollouts: Rollouts, weights: Mapping[str, float], state: ObjectiveState | None = None
) -> Rollouts:
    """Estimate an advantage of each reward, add them up by weight, and normalise the sum over the batch.

    A = scaling((S - mean S) / (std S + 1e-4)),    S = sum_k w_k A_k,

    where A_k is the objective's estimate from reward term k alone, mean and std (ddof 1) are taken over the rows of the
    batch, and the bound and the factor of the objective's scaling act on the normalised sum. A term that does not apply
    to a row (NaN) counts there neither in the sum nor in the statistics of its group.

    Args:
        objective: Supplies the estimator and the scaling.
        rollouts: Scored rows with `reward_terms`; all that a rollout step produced, as for `compute_advantages`.
        weights: Factor of each reward term.
        state: What `objective.state()` returned at the start of the run, for blocks that remember earlier steps.

    Returns:
        A copy with `advantage` (B, T), 0 if nothing is trained.

    Raises:
        ValueError: The objective knows the summed reward only, see `check_decoupled`, or the rows have rewards of
            single decisions.

    Gradient: none.

    Source: GDPO, arXiv 2601.05242; NVlabs/GDPO trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py; terms that do not
        apply as in huggingface/trl, multi_objective_aggregation "normalize_then_sum".
    """
    check_decoupled(objective)
    if "decision_reward" in rollouts.extras:
        raise ValueError("Rewards of single decisions are not split into terms. Add up the rewards.")
    estimator = objective.replace(scaling=AdvantageScaling(), weight=None)
    total = torch.zeros_like(rollouts.mask)
    for name, weight in weights.items():
        values = torch.where(rollouts.scored, rollouts.reward_terms[name], torch.nan)
        part = estimator.compute_advantages(rollouts.replace(reward=values)).advantage
        assert part is not None
        total = total + weight * part
    found = objective.weighed(rollouts.replace(advantage=objective.scaling(_over_rows(total, rollouts), rollouts)))
    return found if state is None else objective.observed(found, state)


def _over_rows(advantage: Tensor, rollouts: Rollouts) -> Tensor:
    """Normalise by the mean and deviation of the rows' means; if all rows are equal, all advantages become 0."""
    mask = rollouts.loss_mask
    rows = masked_mean(advantage, mask)[mask.sum(1) > 0]
    if len(rows) < 2:
        return torch.zeros_like(advantage)
    deviation, mean = torch.std_mean(rows, correction=1)
    return torch.where(mask > 0, (advantage - mean) / (deviation + STD_EPS), 0.0)
