"""The constants of an update: old log-probabilities, values and reference log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from mmrl.core.blocks import CriticAdvantage
from mmrl.core.rollouts import Rollouts
from mmrl.training.loop.passes import scores_before_update
from mmrl.training.loop.recipe import Recipe
from mmrl.training.loop.reference import Reference
from mmrl.training.loop.terms import Passes, Step
from mmrl.training.record.stopwatch import stopwatch

BOOTSTRAP = "bootstrap_mask"
"""Extra (B, T), 1 at the decision whose value bootstraps an episode that a time limit ended."""


def update_constants(
    recipe: Recipe[Any, Any], policy: nn.Module, reference: Reference, rollouts: Rollouts, step: Step
) -> Rollouts:
    """Add the constants of an update: old log-probabilities, values, reference log-probabilities, those of the terms.

    The old policy is the one that the update starts from. Where a step takes a single optimiser step, the policy of
    the loss *is* the old one, so `old_in_update` takes its own log-probabilities: the ratio is exactly 1 and a forward
    pass is saved. Several optimiser steps need a pass before the first of them, unless the sampler's own
    log-probabilities are used (`trainer.old_logp: sampler`).

    Gradient: none flows; everything here is a constant of the update.
    """
    recipe.reference = reference  # an exact divergence is scored in the loss
    passes = Passes(policy, recipe.scores_in_chunks)
    provided = frozenset().union(*(term.provides(step) for term in recipe.terms))
    if not recipe.supervised:
        rollouts = _old_pass(recipe, passes, rollouts, provided)
    if scores_reference(recipe) and "logp_ref" not in provided:
        with stopwatch("ref_logp"):
            scores = reference.score(lambda module: recipe.scores_in_chunks(module, rollouts, frozenset({"logp"})))
        rollouts = rollouts.replace(logp_ref=scores.logp)
    for term in recipe.terms:
        rollouts = term.prepare(passes, rollouts, step)
    return rollouts


def scores_reference(recipe: Recipe[Any, Any]) -> bool:
    """Whether the loss compares with log-probabilities of the reference; an exact divergence is scored in the loss."""
    objective = recipe.objective
    return objective is not None and objective.needs_reference and "logp_ref" in objective.needs


def needs_reference(recipe: Recipe[Any, Any]) -> bool:
    """Whether the trainer keeps a reference policy for a recipe."""
    if recipe.objective is None or not recipe.objective.needs_reference:
        return False
    last = Step(recipe.config.trainer.steps - 1, recipe.config.trainer.steps)
    return not any("logp_ref" in term.provides(last) for term in recipe.terms)


def _old_pass(recipe: Recipe[Any, Any], passes: Passes, rollouts: Rollouts, provided: frozenset[str]) -> Rollouts:
    trainer, objective = recipe.config.trainer, recipe.objective
    if not scores_before_update(trainer, objective, provided):
        return rollouts
    asks_critic = objective.needs_values and "values" not in provided
    outputs = frozenset({"logp", "values"} if asks_critic else {"logp"})
    bootstraps = asks_critic and BOOTSTRAP in rollouts.extras and _bootstraps(objective.advantage)
    mask, seen = rollouts.mask, rollouts
    if bootstraps:
        bootstrap = rollouts.extras[BOOTSTRAP] * rollouts.scored[:, None]
        seen = rollouts.replace(mask=mask + bootstrap)
    with stopwatch("old_logp"):
        scores = passes.scores(seen, outputs)
    found = rollouts.replace(values=scores.values)
    if trainer.old_logp != "sampler" and "logp_old" not in provided:
        found = found.replace(logp_old=scores.logp)
    if not bootstraps:
        return found
    assert scores.values is not None
    unknown = (rollouts.extras["truncated"] > 0) & (bootstrap.sum(1) == 0)
    value = (scores.values * bootstrap).sum(1).masked_fill(unknown, math.nan)
    return found.replace(
        values=scores.values * mask,
        logp_old=torch.where(mask > 0, found.logp_old, 0.0),
        extras=found.extras | {"bootstrap_value": value},
    )


def _bootstraps(advantage: object) -> bool:
    return isinstance(advantage, CriticAdvantage) and advantage.truncation == "bootstrap"
