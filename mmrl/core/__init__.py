"""The policy-optimisation core: pure functions on tensors, without a model and without I/O."""

from mmrl.core.advantages import (
    ADVANTAGES,
    AdvantageFn,
    AdvantageOptions,
    check_group_size,
)
from mmrl.core.aggregation import AGGREGATIONS, Denominators, aggregate, count, masked_sum
from mmrl.core.catalogue import CATALOGUE, get
from mmrl.core.filters import DynamicSamplingBuffer, FilterCounts, drop, zero_variance_groups
from mmrl.core.groups import group_center, group_std, masked_whiten
from mmrl.core.logprobs import LogProbs, gaussian_step_logprob, linear_logprobs, logprobs_from_logits
from mmrl.core.metrics import Metric, max_metric, mean_metric, merge_metrics, metric_values
from mmrl.core.objective import LossOutput, Objective, PolicyOutputs
from mmrl.core.payload import Payload, nested, per_decision, per_group, per_row, shared
from mmrl.core.ratios import RATIOS, SURROGATES, SurrogateInputs, log_ratio, surrogate
from mmrl.core.regularizers import KL_KINDS, AdaptiveKL, entropy_from_logits, entropy_sampled, kl, kl_full
from mmrl.core.returns import decision_rewards, gae, gae_over_turns, returns_to_go, turn_starts
from mmrl.core.rollouts import Rollouts
from mmrl.core.values import value_loss

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "CATALOGUE",
    "KL_KINDS",
    "RATIOS",
    "SURROGATES",
    "AdaptiveKL",
    "AdvantageFn",
    "AdvantageOptions",
    "Denominators",
    "DynamicSamplingBuffer",
    "FilterCounts",
    "LogProbs",
    "LossOutput",
    "Metric",
    "Objective",
    "Payload",
    "PolicyOutputs",
    "Rollouts",
    "SurrogateInputs",
    "aggregate",
    "check_group_size",
    "count",
    "decision_rewards",
    "drop",
    "entropy_from_logits",
    "entropy_sampled",
    "gae",
    "gae_over_turns",
    "gaussian_step_logprob",
    "get",
    "group_center",
    "group_std",
    "kl",
    "kl_full",
    "linear_logprobs",
    "log_ratio",
    "logprobs_from_logits",
    "masked_sum",
    "masked_whiten",
    "max_metric",
    "mean_metric",
    "merge_metrics",
    "metric_values",
    "nested",
    "per_decision",
    "per_group",
    "per_row",
    "returns_to_go",
    "shared",
    "surrogate",
    "turn_starts",
    "value_loss",
    "zero_variance_groups",
]
