"""A row of the catalogue of objectives, what a run changes in it, and whether a recipe can use it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mmrl.core.blocks import ADVANTAGES, BLOCKS
from mmrl.core.catalogue import get
from mmrl.core.objectives.objective import Objective
from mmrl.fields import by_kind, rare

PRESET = "the preset's"


@dataclass
class ObjectiveConfig:
    """A row of the catalogue and what differs from it.

    Each part changes numbers of the row's block, or names another block by `kind`:
    `objective: {preset: dapo, clip: {high: 0.3}, kl: {kind: k3, coef: 0.01}}`.
    """

    preset: str = "grpo"
    """Name in `mmrl list objectives`."""
    advantage: dict[str, Any] = by_kind(lambda: BLOCKS["advantage"], named=True, default_from=PRESET)
    """Estimator: group_mean_std, group_mean, leave_one_out, whitened_returns, gae, ..."""
    scaling: dict[str, Any] = by_kind(lambda: BLOCKS["scaling"], named=True, default_from=PRESET)
    """What happens to advantages after that: whiten, clip, scale."""
    ratio: dict[str, Any] = rare(by_kind(lambda: BLOCKS["ratio"], named=True, default_from=PRESET))
    """Level of the importance ratio: token, sequence, sequence_full, sequence_product."""
    clip: dict[str, Any] = by_kind(lambda: BLOCKS["clip"], named=True, default_from=PRESET)
    """Clip rule with its bounds: ppo_clip (low, high, dual), gspo, cispo, policy_gradient, unclipped, bgpo,
    group_regression (eps, ddof, scale)."""
    kl: dict[str, Any] = by_kind(lambda: BLOCKS["kl"], named=True, default_from=PRESET)
    """Divergence from the reference: k1, k2, k3, full (exact) or none, with coef, in_reward and aggregation."""
    entropy: dict[str, Any] = rare(by_kind(lambda: BLOCKS["entropy"], named=True, default_from=PRESET))
    """Entropy bonus: sampled, full or none, with coef."""
    aggregation: dict[str, Any] = by_kind(lambda: BLOCKS["aggregation"], named=True, default_from=PRESET)
    """token_mean, sequence_mean, sequence_sum or fixed_length (length)."""
    filter: dict[str, Any] = by_kind(lambda: BLOCKS["filter"], named=True, default_from=PRESET)
    """Groups that go into the update: none (all), drop or resample, with key, low, high and max_tries."""
    value: dict[str, Any] = rare(by_kind(lambda: BLOCKS["value"], named=True, default_from=PRESET))
    """Loss of the critic, for estimators that have one: squared_error (coef, clip), or separate where the recipe trains
    it apart."""


def make_objective(config: ObjectiveConfig, longest: int | None = None) -> Objective:
    """Combine a catalogue row with what a configuration changes."""
    changes = {key: dict(getattr(config, key)) for key in BLOCKS if getattr(config, key)}
    try:
        objective = get(config.preset).override(changes)
    except ValueError as error:
        raise ValueError(f"objective: {error}") from error
    given = (changes.get("aggregation", {}), changes.get("kl", {}).get("aggregation"))
    sets_length = any(isinstance(part, dict) and "length" in part for part in given)
    if longest and objective.fixed_length is not None and not sets_length:
        objective = objective.with_fixed_length(longest)
    objective.validate()
    return objective


def check_objective(
    objective: Objective,
    scores: Collection[str],
    samples_per_task: int | None = None,
    reward_terms: Collection[str] | None = None,
) -> None:
    """Refuse an objective that a recipe's policy or data cannot serve."""
    for key, block in objective.blocks.items():
        missing = sorted((block.needs & SCORES.keys()) - set(scores)) if objective.needs & block.needs else []
        if missing:
            usable = [kind for kind, other in BLOCKS[key].items() if not (other.needs & SCORES.keys()) - set(scores)]
            tip = f"use {', '.join(usable)}" if usable else "leave it out"
            raise ValueError(f"objective.{key} is '{block.kind}', which needs {SCORES[missing[0]]}; {tip}")
    if samples_per_task is not None:
        check_group_size(samples_per_task, objective, scores)
    key = objective.filter.reward_key
    if reward_terms is not None and key not in ("reward", *reward_terms):
        raise ValueError(f"objective.filter.key is '{key}'; allowed: reward, {', '.join(reward_terms)}")


def check_group_size(samples_per_task: int, objective: Objective, scores: Collection[str]) -> None:
    """Refuse an estimator that compares the samples of a group where groups have one."""
    if "samples" in objective.advantage.needs and samples_per_task < 2:
        alone = sorted(kind for kind, block in ADVANTAGES.items() if block.needs <= set(scores))
        raise ValueError(
            f"samples_per_task is {samples_per_task}, but the advantage '{objective.advantage.kind}' compares the "
            f"samples of a group, so every advantage would be 0; use 2 or more, or an estimator that works "
            f"with one sample: {', '.join(alone)}"
        )


SCORES = {
    "values": "a critic that this recipe's policies lack",
    "turns": "the turns of several rounds, which this recipe does not have",
    "entropy": "the entropy of the whole action distribution, which this recipe's policies do not score",
    "logp_ref": "log-probabilities of the decisions under a reference; here an exact divergence is scored",
    "separate_critic": "a critic with an optimiser of its own, which this recipe does not train",
    "kl_ref": "every logit, or the exact distribution, of both policies, which this recipe's policies do not score",
}
"""What a block may need of a policy, as messages say it."""
