"""Which combinations of an objective's options contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmrl.core.advantages import ADVANTAGES, CRITIC_ESTIMATORS
from mmrl.core.aggregation import AGGREGATIONS
from mmrl.core.checks import unknown_name
from mmrl.core.ratios import RATIOS, SURROGATES
from mmrl.core.regularizers import KL_KINDS

if TYPE_CHECKING:
    from mmrl.core.objective import Objective

__all__ = ["ENTROPIES", "FILTERS", "KLS", "validate"]

KLS = (*KL_KINDS, "full")
ENTROPIES = ("sampled", "full")
FILTERS = ("none", "drop", "resample")
SINGLETONS = ("zero", "keep")
GAPS = ("skip", "reset")
UNCLIPPED = ("policy_gradient", "unclipped", "bgpo")
# Estimators whose advantage differs between the decisions of a row.
DECISION_LEVEL = (*CRITIC_ESTIMATORS, "whitened_returns")


def validate(objective: Objective) -> None:
    """Refuse unknown names and contradictions; see `Objective.validate`."""
    problems = [*_names(objective)]
    if not problems:
        problems = [*_numbers(objective), *_ratio(objective), *_regularizers(objective), *_rest(objective)]
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        raise ValueError(f"The objective '{objective.name}' cannot be used:\n{listed}")


def _names(o: Objective) -> Iterator[str]:
    for value, known, what in (
        (o.advantage, ADVANTAGES, "advantage estimator"),
        (o.ratio, RATIOS, "ratio"),
        (o.surrogate, SURROGATES, "surrogate"),
        (o.aggregation, AGGREGATIONS, "aggregation"),
        (o.filter, FILTERS, "filter"),
    ):
        if value not in known:
            yield unknown_name(value, known, what)
    for optional, known_names, what in (
        (o.kl, KLS, "KL estimator"),
        (o.entropy, ENTROPIES, "entropy term"),
        (o.kl_aggregation, tuple(AGGREGATIONS), "aggregation (kl_aggregation)"),
    ):
        if optional is not None and optional not in known_names:
            yield unknown_name(optional, known_names, what)


def _numbers(o: Objective) -> Iterator[str]:
    options = o.advantage_options
    for name, number, good, expected in (
        ("clip_low", o.clip_low, 0 <= o.clip_low <= 1, "0..1: the ratio is bounded below by 1 - clip_low"),
        ("clip_high", o.clip_high, o.clip_high >= 0, "at least 0: the bound is 1 + clip_high"),
        ("kl_coef", o.kl_coef, o.kl_coef >= 0, "at least 0"),
        ("value_coef", o.value_coef, o.value_coef >= 0, "at least 0"),
        ("value_clip", o.value_clip, o.value_clip is None or o.value_clip > 0, "positive, or None"),
        ("advantage_options.ddof", options.ddof, options.ddof in (0, 1), "0 or 1"),
        ("advantage_options.eps", options.eps, options.eps >= 0, "at least 0"),
        ("advantage_options.gamma", options.gamma, 0 <= options.gamma <= 1, "0..1"),
        ("advantage_options.lam", options.lam, 0 <= options.lam <= 1, "0..1"),
        ("advantage_options.singleton", options.singleton, options.singleton in SINGLETONS, "zero or keep"),
        ("advantage_options.gaps", options.gaps, options.gaps in GAPS, "skip or reset"),
        ("advantage_options.clip", options.clip, options.clip is None or options.clip > 0, "positive, or None"),
        ("advantage_options.scale", options.scale, 0 < options.scale < math.inf, "positive and finite"),
        ("dual_clip", o.dual_clip, o.dual_clip is None or o.dual_clip > 1, "more than 1 (3 is usual), or None"),
    ):
        if not good:
            yield f"{name} is {number}; expected {expected}."


def _ratio(o: Objective) -> Iterator[str]:
    if o.ratio in ("sequence_full", "sequence_product") and o.advantage in DECISION_LEVEL:
        yield (
            f"ratio='{o.ratio}' is one number a row, but advantage='{o.advantage}' differs inside a row. "
            "Use ratio='token' or 'sequence'."
        )
    if o.surrogate == "gspo" and o.ratio == "token":
        yield "surrogate='gspo' clips whole rows, but ratio='token'. Use ratio='sequence', or surrogate='ppo_clip'."
    if o.surrogate in UNCLIPPED and o.dual_clip is not None:
        yield f"surrogate='{o.surrogate}' does not clip, but dual_clip={o.dual_clip}. Set dual_clip=None."
    if o.surrogate in ("gspo", "cispo") and o.dual_clip is not None:
        yield f"surrogate='{o.surrogate}' has no dual clip, but dual_clip={o.dual_clip}. Set dual_clip=None."
    if o.surrogate == "policy_gradient" and o.ratio != "token":
        yield f"surrogate='policy_gradient' uses no ratio, but ratio='{o.ratio}'. Use ratio='token'."
    if o.surrogate == "cispo" and o.ratio in ("sequence_full", "sequence_product"):
        yield f"surrogate='cispo' detaches the ratio, so ratio='{o.ratio}' needs its gradient. Use ratio='token'."


def _regularizers(o: Objective) -> Iterator[str]:
    if o.kl is None and o.kl_coef != 0:
        yield f"kl_coef is {o.kl_coef} but no divergence is chosen. Set kl='k3' (or k1, k2, full), or kl_coef=0."
    if o.kl is None and o.kl_in_reward:
        yield "kl_in_reward is set but no divergence is chosen. Set kl='k1', or kl_in_reward=False."
    if o.kl == "full" and o.kl_in_reward:
        yield "kl='full' cannot go into the reward: it is scored during the update. Use kl='k1'."
    if o.kl_in_reward and o.kl in ("k1p", "k3p"):
        yield f"kl='{o.kl}' only changes a gradient and the reward has none. Use kl='{o.kl[:2]}'."
    if o.kl_in_reward and o.kl_aggregation is not None:
        yield "kl_aggregation has no effect with kl_in_reward. Set one of the two."
    if o.entropy is None and o.entropy_coef != 0:
        yield f"entropy_coef is {o.entropy_coef} but entropy is None. Set entropy='full' or 'sampled'."


def _rest(o: Objective) -> Iterator[str]:
    modes = (o.aggregation, o.kl_aggregation)
    if "fixed_length" in modes and (o.fixed_length is None or o.fixed_length < 1):
        yield (
            f"the aggregation 'fixed_length' needs fixed_length >= 1, got {o.fixed_length}. Set it to the longest "
            "response the sampler allows."
        )
    if "fixed_length" not in modes and o.fixed_length is not None:
        yield f"fixed_length={o.fixed_length} has no effect with aggregation='{o.aggregation}'."
    if o.advantage not in CRITIC_ESTIMATORS and o.value_coef > 0:
        yield f"value_coef is {o.value_coef} but advantage='{o.advantage}' uses no critic. Use 'gae', or value_coef=0."
    if o.advantage in CRITIC_ESTIMATORS and o.value_coef == 0:
        yield f"advantage='{o.advantage}' needs a trained critic, but value_coef is 0. Set value_coef=0.1 or more."
    if o.filter == "none" and (o.filter_low is not None or o.filter_high is not None):
        yield "filter_low and filter_high have no effect with filter='none'. Use filter='drop' or 'resample'."
    if o.filter_low is not None and o.filter_high is not None and o.filter_low >= o.filter_high:
        yield f"filter_low {o.filter_low} must lie below filter_high {o.filter_high}; no group could be kept."
