"""The policy-optimisation core: blocks, objectives and plain functions on tensors, without a model and without I/O."""

from importlib import import_module
from typing import TYPE_CHECKING

from mmrl.core.blocks.advantage import (
    group_center,
    group_mean,
    group_mean_global_std,
    group_mean_std,
    group_outcome_std,
    group_std,
    leave_one_out,
    masked_whiten,
)
from mmrl.core.blocks.clip import clipped_loss, policy_loss
from mmrl.core.blocks.credit import value_loss
from mmrl.core.blocks.divergence import entropy_from_logits, entropy_sampled, k1, k1p, k2, k3, k3p, kl_full
from mmrl.core.blocks.filter import DynamicSamplingBuffer, FilterCounts, drop, zero_variance_groups
from mmrl.core.blocks.preference import Pairs, pair_rows
from mmrl.core.catalogue import CATALOGUE, PREFERENCES, all_objectives, all_preferences, get, get_preference
from mmrl.core.loss import (
    Denominators,
    LossOutput,
    Metric,
    PolicyOutputs,
    count,
    masked_mean,
    masked_sum,
    max_metric,
    mean_metric,
    merge_metrics,
    metric_values,
)
from mmrl.core.objectives.decoupled import decoupled_advantages
from mmrl.core.objectives.objective import Objective
from mmrl.core.objectives.pairwise import PreferenceObjective
from mmrl.core.payload import Payload, nested, per_decision, per_group, per_row, shared
from mmrl.core.returns import decision_rewards, gae, gae_over_turns, returns_to_go, turn_means, turn_starts
from mmrl.core.rollouts import Rollouts
from mmrl.core.state import AdaptiveKL

if TYPE_CHECKING:
    from mmrl.core.logprobs import LogProbs, gaussian_step_logprob, linear_logprobs, logprobs_from_logits
else:

    def __getattr__(name: str) -> object:
        # its autograd functions load torch, which a list of the catalogue does without
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("mmrl.core.logprobs"), name)


__all__ = [
    "CATALOGUE",
    "PREFERENCES",
    "AdaptiveKL",
    "Denominators",
    "DynamicSamplingBuffer",
    "FilterCounts",
    "LogProbs",
    "LossOutput",
    "Metric",
    "Objective",
    "Pairs",
    "Payload",
    "PolicyOutputs",
    "PreferenceObjective",
    "Rollouts",
    "all_objectives",
    "all_preferences",
    "clipped_loss",
    "count",
    "decision_rewards",
    "decoupled_advantages",
    "drop",
    "entropy_from_logits",
    "entropy_sampled",
    "gae",
    "gae_over_turns",
    "gaussian_step_logprob",
    "get",
    "get_preference",
    "group_center",
    "group_mean",
    "group_mean_global_std",
    "group_mean_std",
    "group_outcome_std",
    "group_std",
    "k1",
    "k1p",
    "k2",
    "k3",
    "k3p",
    "kl_full",
    "leave_one_out",
    "linear_logprobs",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "max_metric",
    "mean_metric",
    "merge_metrics",
    "metric_values",
    "nested",
    "pair_rows",
    "per_decision",
    "per_group",
    "per_row",
    "policy_loss",
    "returns_to_go",
    "shared",
    "turn_means",
    "turn_starts",
    "value_loss",
    "zero_variance_groups",
]
