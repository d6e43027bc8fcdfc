"""Names of metrics: those that several packages share with their sentences, and the stages of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STAGES = ("batch", "rollout", "score", "old_logp", "ref_logp", "masked_logp", "advantages", "update")
"""Stages that follow one another within a step; every other stage is a part of one of them."""
STAGES_BETWEEN = ("evaluate", "checkpoint")
"""Stages that take place since the step before, not inside the step's seconds."""
DIVERSITY = "diversity/latent"


def measured(records: Sequence[Mapping[str, Any]], prefixes: tuple[str, ...]) -> list[str]:
    """Names of the metrics with one of the prefixes, without interval ends and without those of parts of the tasks."""
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefixes))
    shares = [name for name in names if not name.endswith(("/low", "/high"))]
    # a value of a data column, the last part of a name, may contain slashes
    return [name for name in shares if not any(name.startswith(f"{other}/") for other in shares)]


def label(name: str) -> str:
    """A metric's name without its family."""
    return name.partition("/")[2]


METRICS: dict[str, str] = {
    "time/batch": "Seconds of a supervised step spent in making its batch out of given data.",
    "time/rollout": "Seconds spent sampling.",
    "time/sync": "Seconds of the rollout in which weights went to the sampler's engine and were checked there.",
    "time/score": "Seconds spent in reward functions.",
    "time/old_logp": "Seconds of the pass for old log-probs and values; 0 where the update needs none.",
    "time/ref_logp": "Seconds of the pass of the reference policy; 0 without one.",
    "time/advantages": "Seconds from rewards to advantages, before the update.",
    "time/forward": "Seconds of the update spent in forward passes and losses.",
    "time/backward": "Seconds of the update spent in backward passes and in averaging gradients over processes.",
    "time/optimizer": "Seconds of the update spent in clipping, optimiser steps and the moving average.",
    "time/update": "Seconds of all optimiser steps: forward, backward, optimizer and the time between them.",
    "time/evaluate": "Seconds spent on evaluation since the step before.",
    "time/checkpoint": "Seconds spent writing a checkpoint since the step before.",
    "time/step": "Seconds of the step from sampling to update, without evaluation and checkpoint.",
    "memory/peak_mb": "Peak memory in 10^6 bytes: of the process so far, on a GPU of its tensors within the step.",
    "tokens/per_second": "Trained decisions of the step over its seconds.",
    "tokens/total": "Decisions sampled since the run began.",
    "rollers/busy": "Share of the workers' time since the step before in which they sampled and scored.",
    "rollers/staleness": "Updates of the policy since the weights that the step's samples were drawn with.",
    "rollers/lost": "Units of the step's tasks left out, because every worker that had them was lost.",
    "rollers/again": "Units of the step's tasks given to another worker, because the one that had them was lost.",
    "samples/total": "Samples drawn, or supervised rows seen, since the run began.",
    "reward/mean": "Mean total reward of the samples that could be scored.",
    "reward/std": "Standard deviation of the total reward over the samples of the step.",
    "reward/std_within_groups": "Standard deviation of the total reward within a group, mean over the samples.",
    "reward/errors": "Samples of the step that a reward function failed on; the update leaves them out.",
    "reward/errors/<term>/<kind>": "Samples of the step that one reward function failed on, by what went wrong.",
    "reward/zero_variance_groups": "Share of groups whose samples all got the same reward, or each of those compared.",
    "reward/<term>": "Mean of one reward term before its weight.",
    "response/length_mean": "Mean number of sampled decisions in a response.",
    "response/length_max": "Longest response of the step in decisions.",
    "response/length_<greedy|sampled|guided>": "Mean length of the answers of an evaluation in decisions.",
    "response/length_<greedy|sampled|guided>_<right|wrong>": "Mean length of its right or wrong answers.",
    "response/finished_fraction": "Share of responses that ended before the length limit.",
    "loss/total": "The scalar that is differentiated, summed over its terms.",
    "loss/policy": "The surrogate's part of the loss.",
    "loss/kl": "The reference-KL part of the loss, coefficient included.",
    "loss/entropy": "The entropy part of the loss, coefficient included; negative where entropy is rewarded.",
    "loss/value": "The value function's part of the loss, coefficient included.",
    "loss/nll": "Mean negative log-likelihood of what is learned from, in nats a decision.",
    "policy/ratio_mean": "Mean importance ratio of new over sampling policy in the groups of the update.",
    "policy/ratio_max": "Largest importance ratio of the step in the groups of the update.",
    "policy/clip_fraction_low": "Share of decisions whose gradient the lower clip bound removed.",
    "policy/clip_fraction_high": "Share of decisions whose gradient the upper clip bound removed.",
    "policy/clip_fraction": "Share of the pairs of a row whose gradient a clip bound removed.",
    "policy/beyond_divergence_limit": "1 where the divergence from the policy before the update is above clip.limit.",
    "policy/bound_low": "Mean lower bound of the ratio, where the clip rule adapts it.",
    "policy/bound_high": "Mean upper bound of the ratio, where the clip rule adapts it.",
    "policy/clipped_at_start": "Share of decisions clipped in an update's first optimiser step, by rounding alone.",
    "policy/gate": "Mean factor that SAPO's soft gate leaves of the gradient of a decision.",
    "policy/row_weight": "Mean weight that VESPO gives to the row of a decision.",
    "policy/cov_dropped": "Share of decisions that Clip-Cov leaves out.",
    "policy/cov_penalised": "Share of decisions that KL-Cov penalises.",
    "policy/given": "Share of the decisions that are those of a teacher or of the data, not sampled.",
    "policy/beyond_ratio_limit": "Share of decisions in turns with a ratio above clip.ratio_limit.",
    "policy/mismatch_kl": "k3 estimate of the KL from the sampler to the policy before the update, in nats a decision.",
    "policy/mismatch_max": "Largest difference of their log-probabilities in the step, in nats.",
    "policy/weight_mean": "Mean weight that objective.weight gives to a decision.",
    "policy/weight_zero": "Share of decisions to which objective.weight gives no weight.",
    "policy/mismatch_weight": "Mean weight that objective.correction and objective.gate give to a decision.",
    "policy/mismatch_rejected": "Share of decisions whose weight is 0.",
    "policy/kl_old": "k3 estimate of the KL from the updated to the sampling policy, in nats a decision.",
    "policy/divergence_old": "Mean exact divergence of a decision from the policy before the update, in nats.",
    "policy/kl_ref": "Estimate of the KL from the policy to the reference policy, in nats a decision.",
    "policy/entropy": "Mean entropy of the policy at the sampled positions of the update's groups, in nats.",
    "policy/kl_coef": "Weight of the KL term before it is annealed; moves only with adaptive_kl.target.",
    "update/zero_advantage_groups": "Share of groups with all advantages 0, left out of the update and of policy/.",
    "optim/lr": "Learning rate of the last optimiser step.",
    "optim/natural_share": "Share of its longest length that the last natural-gradient step took; 0 if none gained.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the optimiser steps.",
    "optim/skipped": "Optimiser steps that the NaN guard has skipped since the run began.",
    "optim/loss_scale": "Factor of the loss in fp16 after the step; halved by a gradient that is not finite.",
    "optim/overflows": "Optimiser steps skipped since the run began, because a gradient overflowed in fp16.",
    "optim/without_gradient": "Optimiser steps left out since the run began, because no group had a gradient.",
    "data/skipped": "Rows that could not be used, skipped since the run began.",
    "data/epoch": "Passes over the task set so far.",
    "warnings/<kind>": "Steps in a row in which what a warning was about holds by now; there once it was said.",
    "checkpoint/failed": "Checkpoints that could not be written since the run began (full disk).",
    "n": "Tasks that the evaluation has a result for.",
    "skipped": "Tasks that the evaluation could not use.",
    "lost": "Trials of the evaluation left out, because every rollout worker that had them was lost.",
    "unscored": "Samples of the evaluation that a reward function failed on.",
    "accuracy/<greedy|sampled>": "Share of correct answers: greedy, or sampled at the evaluation's temperature.",
    "accuracy/<pass_at_2|pass_at_4|pass_at_8|pass_at_16|pass_at_32|pass_at_64>": "Probability that one of k samples "
    "of a question is right.",
    "terms/<term>/<greedy|sampled|guided>": "Mean of another reward term over an evaluation's answers, unweighted.",
    "success/<greedy|sampled>": "Share of episodes that did the task, greedy or sampled from the policy.",
    "success/<greedy|sampled>/<task>": "Share of episodes of one task that did it.",
    "cost/samples": "Samples drawn for training so far.",
    "cost/seconds": "Seconds of training so far, without evaluation.",
    "time/critic": "Seconds of training the critic, and of what only it needs to be read.",
    "critic/loss": "Mean squared error of the critic on the returns of the step.",
    "critic/explained": "Share of the variance of the returns that the critic explains.",
    "critic/updates": "Updates of the critic so far.",
    "episode/success": "Share of the step's episodes in which the task was done; broken environments are left out.",
    "episode/success/<task>": "Share of the step's episodes of one task that did it, in runs of up to 12 tasks.",
    "episode/return": "Mean sum of the environment's rewards over the step's episodes with a result.",
    "episode/return/<greedy|sampled>": "Mean sum of the environment's rewards over the evaluation's episodes.",
    "sim/crashed": "Environments whose process died so far.",
    "sim/hung": "Environments that did not answer in time so far.",
    "memory/worker_mb": "Memory in 10^6 bytes, at the end of the step, of the largest environment process.",
    "sim/memory": "Environments whose process held more memory than allowed so far.",
    "sim/raised": "Environments that raised so far.",
    "sim/malformed": "Environments that returned something of which nothing can be made so far.",
    "sim/restarted": "Environments that were started again so far.",
    "sim/dropped": "Episodes that were given up so far.",
    "sim/diverged": "Simulations that blew up so far.",
}
