"""Names of metrics: those that several packages share with their sentences, and the stages of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STAGES = ("batch", "rollout", "score", "old_logp", "ref_logp", "masked_logp", "advantages", "update")
"""Consecutive stages of a step; every other stage is part of one of them."""
STAGES_BETWEEN = ("evaluate", "checkpoint")
"""Stages that run between steps and are not included in the time of a step."""
DIVERSITY = "diversity/latent"


def measured(records: Sequence[Mapping[str, Any]], prefixes: tuple[str, ...]) -> list[str]:
    """Names of the metrics with one of the prefixes, without interval ends and breakdowns by data column."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefixes))
    shares = [name for name in names if not name.endswith(("/low", "/high"))]
    # a value of a data column, the last part of a name, may contain slashes
    return [name for name in shares if not any(name.startswith(f"{other}/") for other in shares)]


def label(name: str) -> str:
    """A metric's name without its family."""
    return name.partition("/")[2]


METRICS: dict[str, str] = {
    "time/batch": "Seconds of a supervised step spent building its batch from the data.",
    "time/rollout": "Seconds spent sampling.",
    "time/sync": "Seconds of the rollout spent sending weights to the sampler's engine and verifying them there.",
    "time/score": "Seconds spent in reward functions.",
    "time/old_logp": "Seconds of the pass for old log-probabilities and values; 0 if the update needs none.",
    "time/ref_logp": "Seconds of the pass of the reference policy; 0 if there is none.",
    "time/advantages": "Seconds from rewards to advantages, before the update.",
    "time/forward": "Seconds of the update spent on forward passes and losses.",
    "time/backward": "Seconds of the update spent on backward passes and averaging gradients over processes.",
    "time/optimizer": "Seconds of the update spent on clipping, optimiser steps and the moving average.",
    "time/update": "Seconds of all optimiser steps: forward, backward, optimizer and the time between them.",
    "time/evaluate": "Seconds spent on evaluation since the previous step.",
    "time/checkpoint": "Seconds spent writing a checkpoint since the previous step.",
    "time/step": "Seconds of the step from sampling to update, excluding evaluation and checkpoint.",
    "memory/peak_mb": "Peak memory in 10^6 bytes: of the process so far or, on a GPU, of its tensors within the step.",
    "tokens/per_second": "Trained decisions of the step per second.",
    "tokens/total": "Decisions sampled since the start of the run.",
    "rollers/busy": "Fraction of the workers' time since the previous step in which they sampled and scored.",
    "rollers/staleness": "Updates of the policy since the weights used to sample this step.",
    "rollers/lost": "Units of the step's tasks that were skipped because every worker that had them was lost.",
    "rollers/again": "Units of the step's tasks reassigned to another worker because theirs was lost.",
    "samples/total": "Samples drawn, or supervised rows seen, since the start of the run.",
    "reward/mean": "Mean total reward of the samples that could be scored.",
    "reward/std": "Standard deviation of the total reward over the samples of the step.",
    "reward/std_within_groups": "Standard deviation of the total reward within a group, mean over the samples.",
    "reward/errors": "Samples of the step for which a reward function failed; they are excluded from the update.",
    "reward/errors/<term>/<kind>": "Samples of the step for which one reward function failed, by kind of failure.",
    "reward/zero_variance_groups": "Fraction of groups with equal values of the reward, or of every compared reward.",
    "reward/<term>": "Mean of one reward term before weighting.",
    "response/length_mean": "Mean number of sampled decisions in a sample.",
    "response/length_max": "Maximum number of sampled decisions in a sample of the step.",
    "loss/total": "The differentiated scalar, summed over its terms.",
    "loss/policy": "The surrogate term of the loss.",
    "loss/kl": "The reference-KL term of the loss, including its coefficient.",
    "loss/entropy": "The entropy term of the loss, including its coefficient; negative if entropy is rewarded.",
    "loss/value": "The value-function term of the loss, including its coefficient.",
    "loss/nll": "Mean negative log-likelihood of the training targets, in nats per decision.",
    "policy/ratio_mean": "Mean importance ratio of the new to the sampling policy in the groups of the update.",
    "policy/ratio_max": "Maximum importance ratio of the step in the groups of the update.",
    "policy/clip_fraction_low": "Fraction of decisions whose gradient was removed by the lower clip bound.",
    "policy/clip_fraction_high": "Fraction of decisions whose gradient was removed by the upper clip bound.",
    "policy/clip_fraction": "Fraction of the pairs of a row whose gradient was removed by a clip bound.",
    "policy/beyond_divergence_limit": "1 if the divergence from the policy before the update is above clip.limit.",
    "policy/bound_low": "Mean lower bound of the ratio, if the clip rule adapts it.",
    "policy/bound_high": "Mean upper bound of the ratio, if the clip rule adapts it.",
    "policy/clipped_at_start": "Fraction of decisions clipped in an update's first optimiser step, due to rounding.",
    "policy/gate": "Mean factor by which SAPO's soft gate scales the gradient of a decision.",
    "policy/row_weight": "Mean weight of a decision's row in VESPO.",
    "policy/cov_dropped": "Fraction of decisions excluded by Clip-Cov.",
    "policy/cov_penalised": "Fraction of decisions penalised by KL-Cov.",
    "policy/given": "Fraction of decisions that come from a teacher or the data instead of being sampled.",
    "policy/beyond_ratio_limit": "Fraction of decisions in turns with a ratio above clip.ratio_limit.",
    "policy/mismatch_kl": "k3 estimate of the KL from the sampler to the pre-update policy, in nats per decision.",
    "policy/mismatch_max": "Maximum difference between log-probabilities of sampler and policy in the step, in nats.",
    "policy/weight_mean": "Mean weight of a decision from objective.weight.",
    "policy/weight_zero": "Fraction of decisions with weight 0 from objective.weight.",
    "policy/mismatch_weight": "Mean weight of a decision from objective.correction and objective.gate.",
    "policy/mismatch_rejected": "Fraction of decisions with weight 0 from objective.correction and objective.gate.",
    "policy/kl_old": "k3 estimate of the KL from the updated to the sampling policy, in nats per decision.",
    "policy/divergence_old": "Mean exact divergence of a decision from the policy before the update, in nats.",
    "policy/kl_ref": "Estimate of the KL from the policy to the reference policy, in nats per decision.",
    "policy/entropy": "Mean entropy of the policy at the sampled positions of the update's groups, in nats.",
    "policy/kl_coef": "Weight of the KL term before annealing; it only changes with adaptive_kl.target.",
    "update/zero_advantage_groups": "Fraction of groups with all advantages 0, excluded from the update and policy/.",
    "optim/lr": "Learning rate of the last optimiser step.",
    "optim/natural_share": "Fraction of the maximum length that the last natural-gradient step took; 0 if none gained.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the optimiser steps.",
    "optim/skipped": "Optimiser steps skipped by the NaN guard since the start of the run.",
    "optim/loss_scale": "Loss scale in fp16 after the step; halved after a non-finite gradient.",
    "optim/overflows": "Optimiser steps skipped since the start of the run because a gradient overflowed in fp16.",
    "optim/without_gradient": "Optimiser steps skipped since the start of the run because no group had a gradient.",
    "data/skipped": "Rows skipped since the start of the run because they could not be used.",
    "data/epoch": "Epochs over the task set so far.",
    "warnings/<kind>": "Steps in a row for which a warning's condition has held; logged after the warning.",
    "checkpoint/failed": "Checkpoints that could not be written since the start of the run (full disk).",
    "n": "Tasks with a result in the evaluation.",
    "skipped": "Tasks that could not be evaluated.",
    "lost": "Trials of the evaluation that were skipped because every rollout worker that had them was lost.",
    "unscored": "Samples of the evaluation for which a reward function failed.",
    "accuracy/<greedy|sampled>": "Fraction of correct answers: greedy, or sampled at the evaluation's temperature.",
    "accuracy/<pass_at_2|pass_at_4|pass_at_8|pass_at_16|pass_at_32|pass_at_64>": "Probability that "
    "at least one of k samples for a question is correct.",
    "terms/<term>/<greedy|sampled|guided>": "Unweighted mean of another reward term over the evaluation's responses.",
    "success/<greedy|sampled>": "Fraction of successful episodes, greedy or sampled from the policy.",
    "success/<greedy|sampled>/<task>": "Fraction of successful episodes of one task.",
    "cost/samples": "Samples drawn for training so far.",
    "cost/seconds": "Seconds of training so far, excluding evaluation.",
    "time/critic": "Seconds spent training the critic, including data loaded only for it.",
    "critic/loss": "Mean squared error of the critic on the returns of the step.",
    "critic/explained": "Fraction of the variance of the returns explained by the critic.",
    "critic/updates": "Updates of the critic so far.",
    "episode/success": "Fraction of the step's episodes that were successful; broken environments are excluded.",
    "episode/success/<task>": "Fraction of successful episodes of one task in the step, in runs of up to 12 tasks.",
    "episode/return": "Mean episode return (sum of rewards) over the step's episodes with a result.",
    "episode/return/<greedy|sampled>": "Mean episode return (sum of rewards) over the evaluation's episodes.",
    "sim/crashed": "Environments whose process died so far.",
    "sim/hung": "Environments that did not respond in time so far.",
    "memory/worker_mb": "Memory of the largest environment process at the end of the step, in 10^6 bytes.",
    "sim/memory": "Environments whose process used more memory than allowed so far.",
    "sim/raised": "Environments that raised an exception so far.",
    "sim/malformed": "Environments that returned a malformed value so far.",
    "sim/restarted": "Environments that were restarted so far.",
    "sim/dropped": "Episodes that were abandoned so far.",
    "sim/diverged": "Simulations that became unstable so far.",
}
