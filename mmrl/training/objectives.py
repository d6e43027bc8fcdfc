"""Objectives as a run configures them: a row of the catalogue with changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mmrl.core.blocks import BLOCKS, PREFERENCE_BLOCKS, all_kinds, kind_names
from mmrl.core.blocks.preference import CHOSEN
from mmrl.core.catalogue import get, get_preference
from mmrl.core.loss import Denominators, mean_metric
from mmrl.core.objectives.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.rollouts import Rollouts
from mmrl.fields import by_kind, rare

if TYPE_CHECKING:
    from torch import Tensor

PRESET = "the preset's"
OBJECTIVE = get("sft")


@dataclass
class ObjectiveConfig:
    """A row of the catalogue with changes.

    Each part changes numbers of the row's block, or selects another block by `kind`: `objective: {preset: dapo, clip:
    {high: 0.3}, kl: {kind: k3, coef: 0.01}}`.
    """

    preset: str = "grpo"
    """Name in `mmrl list objectives`."""
    advantage: dict[str, Any] = by_kind(lambda: all_kinds("advantage"), named=True, default_from=PRESET)
    """Advantage estimator: group_mean_std, group_mean, leave_one_out, whitened_returns, gae, ..."""
    scaling: dict[str, Any] = by_kind(lambda: all_kinds("scaling"), named=True, default_from=PRESET)
    """Post-processing of advantages: whiten, clip, scale."""
    ratio: dict[str, Any] = rare(by_kind(lambda: all_kinds("ratio"), named=True, default_from=PRESET))
    """Level of the importance ratio: token, sequence, sequence_full, sequence_product."""
    clip: dict[str, Any] = by_kind(lambda: all_kinds("clip"), named=True, default_from=PRESET)
    """Clip rule with its bounds: ppo_clip (low, high, dual), gspo, cispo, gmpo, sapo, policy_gradient, unclipped,
    dppo_tv, dppo_kl, ..."""
    kl: dict[str, Any] = by_kind(lambda: all_kinds("kl"), named=True, default_from=PRESET)
    """Divergence from the reference or the old policy: k1, k2, k3, full (exact) or none, with coef, to, in_reward and
    aggregation."""
    entropy: dict[str, Any] = rare(by_kind(lambda: all_kinds("entropy"), named=True, default_from=PRESET))
    """Entropy bonus: sampled, full, smoothed (a band around its history), target (an adaptive weight) or none, with
    coef."""
    aggregation: dict[str, Any] = by_kind(lambda: all_kinds("aggregation"), named=True, default_from=PRESET)
    """Aggregation of decisions into the loss: token_mean, sequence_mean, sequence_sum or fixed_length (length)."""
    filter: dict[str, Any] = by_kind(lambda: all_kinds("filter"), named=True, default_from=PRESET)
    """Which groups to train on: none (no filter), drop or resample, with key, low, high and max_tries."""
    value: dict[str, Any] = rare(by_kind(lambda: all_kinds("value"), named=True, default_from=PRESET))
    """Loss of the critic, for estimators that have one: squared_error (coef, clip), or separate if the recipe trains it
    separately."""
    weight: dict[str, Any] = rare(by_kind(lambda: all_kinds("weight"), named=True, default_from=PRESET))
    """Weight of each decision in the policy loss, computed once per step: top_entropy (share), duration, ... or
    none."""
    correction: dict[str, Any] = rare(by_kind(lambda: all_kinds("correction"), named=True, default_from=PRESET))
    """Weight of each decision that corrects for differences between the sampler's and the trainer's log-probabilities:
    truncated (TIS), masked (MIS, IcePop) or none, with low, high and level (token, sequence, geometric)."""
    gate: dict[str, Any] = rare(by_kind(lambda: all_kinds("gate"), named=True, default_from=PRESET))
    """Rule that excludes decisions if these log-probabilities differ too much: token, sequence, geometric (with low and
    high), off_policy (with limit) or none."""
    order: dict[str, Any] = rare(by_kind(lambda: all_kinds("order"), named=True, default_from=PRESET))
    """Order in which tasks are drawn: epochs (each once per epoch), uncertain (tasks that succeed about half of the
    time), or category_bandit (field), by how much is left to learn in each category."""

    def kinds(self) -> dict[str, str]:
        """Kind of each block, for lists of options."""
        return {key: block.kind for key, block in make_objective(self).blocks.items()}


def make_objective(config: ObjectiveConfig, longest: int | None = None) -> Objective:
    """Combine a catalogue row with the changes of a configuration."""
    changes = {key: dict(getattr(config, key)) for key in BLOCKS if getattr(config, key)}
    try:
        objective = get(config.preset).override(changes)
    except ValueError as error:
        raise ValueError(f"objective: {error}") from error
    given = {"aggregation": changes.get("aggregation"), "kl": changes.get("kl", {}).get("aggregation")}
    # a length that the user has set stays
    kept = {part for part, options in given.items() if isinstance(options, dict) and "length" in options}
    # "longest" is the sampler's limit, which only the run knows
    if longest:
        objective = objective.with_fixed_length(longest, kept)
    # after the changes: a row is valid, a combination of blocks need not be
    objective.validate()
    return objective


def check_objective(
    objective: Objective,
    scores: Collection[str],
    samples_per_task: int | None = None,
    reward_terms: Collection[str] | None = None,
    old_logp: str = "",
) -> None:
    """Raise UserError for an objective that a recipe's policy or data cannot support."""
    for key, block in objective.blocks.items():
        # a block with coefficient 0 needs nothing, and is not checked
        missing = sorted((block.inputs & SCORES.keys()) - set(scores)) if objective.needs & block.inputs else []
        if missing:
            usable = [kind for kind, other in all_kinds(key).items() if not (other.needs & SCORES.keys()) - set(scores)]
            tip = f"use {', '.join(usable)}" if usable else "leave it out"
            raise ValueError(f"objective.{key} is '{block.kind}', which needs {SCORES[missing[0]]}; {tip}")
    # the ratio to the sampler would be taken twice
    if objective.correction is not None and old_logp == "sampler":
        raise ValueError(
            f"objective.correction is '{objective.correction.kind}', but with trainer.old_logp 'sampler' the loss "
            "already contains the ratio to the sampler; use trainer.old_logp=recompute, or only a gate"
        )
    if samples_per_task is not None:
        check_group_size(samples_per_task, objective, scores)
    key = objective.filter.reward_key
    if reward_terms is not None and key not in ("reward", *reward_terms):
        raise ValueError(f"objective.filter.key is '{key}'; allowed: reward, {', '.join(reward_terms)}")


def check_group_size(samples_per_task: int, objective: Objective, scores: Collection[str]) -> None:
    """Raise UserError for an estimator that compares the samples of a group if groups have a single sample."""
    # with one sample a group, every advantage would be 0
    if "samples" in objective.advantage.needs and samples_per_task < 2:
        kinds = all_kinds("advantage")
        alone = [name for name in kind_names("advantage") if kinds[name].needs <= set(scores)]
        raise ValueError(
            f"samples_per_task is {samples_per_task}, but the advantage '{objective.advantage.kind}' compares the "
            f"samples of a group, so every advantage would be 0; use 2 or more, or an estimator that works "
            f"with one sample: {', '.join(alone)}"
        )


@dataclass
class PreferenceConfig:
    """A row of the catalogue's preference objectives with changes.

    Each part changes numbers of the row's block, or selects another block by `kind`: `objective: {preset: dpo, loss:
    {beta: 0.3}, likelihood: {kind: nll, coef: 0.1}}`.
    """

    preset: str = "dpo"
    """Name of an objective for pairs in `mmrl list objectives`."""
    loss: dict[str, Any] = rare(by_kind(lambda: all_kinds("loss"), named=True, default_from=PRESET))
    """Loss of a pair: sigmoid, robust, hinge, ipo, sppo, kto, refuel, ..., or none (supervised)."""
    score: dict[str, Any] = rare(by_kind(lambda: all_kinds("score"), named=True, default_from=PRESET))
    """Score by which answers are compared: sum or mean of log-probabilities, or decision (noisy versions of images)."""
    likelihood: dict[str, Any] = by_kind(lambda: all_kinds("likelihood"), named=True, default_from=PRESET)
    """Likelihood of the preferred answers as an additional term: nll or none, with coef and average."""

    def kinds(self) -> dict[str, str]:
        """Kind of each block, for lists of options."""
        return {key: block.kind for key, block in make_preference(self).blocks.items()}


def make_preference(config: PreferenceConfig) -> PreferenceObjective:
    """Combine a catalogue row with the changes of a configuration."""
    changes = {key: dict(getattr(config, key)) for key in PREFERENCE_BLOCKS if getattr(config, key)}
    try:
        objective = get_preference(config.preset).override(changes)
    except ValueError as error:
        raise ValueError(f"objective: {error}") from error
    objective.validate()
    return objective


def objective_of(config: ObjectiveConfig | PreferenceConfig) -> Objective | PreferenceObjective:
    """The objective of a configuration, whichever kind it is."""
    return make_preference(config) if isinstance(config, PreferenceConfig) else make_objective(config)


def check_preference(objective: PreferenceObjective, scores: Collection[str] = ()) -> None:
    """Raise UserError for a loss that needs more than log-probabilities, if the recipe does not provide it."""
    missing = sorted((objective.needs & SCORES.keys()) - {"logp_ref", *scores})
    if missing:
        raise ValueError(
            f"objective.loss is '{objective.loss.kind}', which needs {SCORES[missing[0]]}; use another loss"
        )


def check_pair_batches(micro_batch: int) -> None:
    """Raise ValueError for micro-batches that are too small for a pair."""
    if micro_batch == 1:
        raise ValueError(
            "trainer.micro_batch is 1, but the two sides of a pair are compared; use at least 2, or 0 for all rows"
        )


def pair_marks(pairs: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """`extras` of rows (2 N,), the preferred and the rejected side of each pair in turn: 1 on preferred sides."""
    return {CHOSEN: torch.tensor([1.0, 0.0], device=device).repeat(pairs)}


LIKELIHOOD = "- mean log p(decision | prompt, earlier decisions)"


def likelihood_loss(scores: PolicyOutputs, minibatch: Rollouts, denominators: Denominators) -> LossOutput:
    """Mean negative log-likelihood of the decisions; its gradient is the plain policy gradient with advantage 1."""
    # advantage 1 and a ratio of 1: the policy gradient is that of the log-likelihood
    given = minibatch.replace(logp_old=scores.logp.detach(), advantage=minibatch.mask)
    output = OBJECTIVE.loss(scores, given, denominators)
    nll = mean_metric(-scores.logp, minibatch.loss_mask)
    return LossOutput(output.loss, {"loss/total": output.metrics["loss/total"], "loss/nll": nll})


SCORES = {
    "values": "a critic, which this recipe's policies do not have",
    "turns": "the turns of several rounds, which this recipe does not have",
    "information_gain": "the probability of a true answer after each turn, which this recipe does not compute",
    "branches": "episodes that branch from others, which `recipe: agentic_branching` has",
    "anchors": "the observation before each turn, which this recipe does not record",
    "entropy": "the entropy of the whole action distribution, which this recipe's policies do not compute",
    "entropy_old": "the entropy of the action distribution before the update, which this recipe does not compute",
    "logp_ref": "log-probabilities of the decisions under a reference; this recipe computes an exact divergence",
    "separate_critic": "a critic with its own optimiser, which this recipe does not train",
    "logp_rollout": "log-probabilities of the same decisions by sampler and policy, which this recipe does not compare",
    "probabilities": "decisions with probabilities (tokens, picks); in this recipe they have densities",
    "collision": "the sum of the squared probabilities of all tokens, which this recipe's policies do not compute",
    "kl_old": "the exact divergence from the policy before the update, which this recipe does not compute",
    "kl_ref": "every logit, or the exact distribution, of both policies, which this recipe does not compute",
    "code_starts": "the position in a response where its code begins, which this recipe does not look for",
    "greedy": "the reward of a greedy response to each task, which this recipe does not sample",
    "answers": "the final answers of the responses, which this recipe does not extract",
    "tokens": "tokens as decisions, which this recipe's policies do not have",
    "durations": "the time that each action took, which this recipe does not measure",
    "budgets": "a token budget for each response, which this recipe does not set",
    "logp_previous": "the policy of the previous iteration, which `recipe: online_preference` keeps",
    "own_answers": "an answer of the policy and an answer of an opponent, which `recipe: online_preference` samples",
    "kl_baseline": "log-probabilities of answers to other questions, which this recipe does not compute",
    "hints": "the position of given tokens in a response (recipe: masked), which this recipe does not record",
    "draws": "draws of a bound of the log-likelihood as decisions, which `recipe: masked` has, and `awm` for images",
    "sources": "the origin of each response (own, with a hint, a teacher's, replayed), but this recipe does not mix "
    "origins",
}
"""Outputs and data that a block may need, as described in error messages."""
