"""What a run measures and where it is written; METRICS at the foot defines every metric in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.training.record.jsonlines import read_steps
from mmrl.training.record.sinks import (
    ConsoleSink,
    JsonlSink,
    ServiceSink,
    Sink,
    TensorBoardSink,
    tensorboard_installed,
)


@dataclass
class TrackingConfig:
    """Where metrics go besides `metrics.jsonl` and `evaluations.jsonl`."""

    quiet: bool = False
    """Show nothing on the console."""
    console_every: int = 1
    """Show one console line in this many steps; evaluations are always shown."""
    tensorboard: bool | None = None
    """Write TensorBoard events; null means where tensorboard is installed."""
    wandb: str | None = None
    """Weights & Biases project to log to; null for none."""
    trackio: str | None = None
    """Trackio project to log to; null for none."""
    run_name: str | None = None
    """Name of the run in wandb and trackio; null takes the name of the run folder."""
    strict: bool = False
    """Refuse metrics that the METRICS table does not define; the tests switch it on."""


class Tracker:
    """Hands every metric to the JSON Lines files and to each further sink.

    Args:
        run_dir: The run folder.
        sinks: Receivers besides the JSON Lines files.
        strict: Refuse metrics without a definition.
        definitions: Definitions beside METRICS, for a domain's own metrics.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[Sink] = (),
        *,
        strict: bool = False,
        definitions: Mapping[str, str] | None = None,
    ) -> None:
        self._sinks: list[Sink] = [JsonlSink(Path(run_dir)), *sinks]
        self._strict = strict
        self._definitions = {**METRICS, **(definitions or {})}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one finished step.

        Args:
            step: The step, counted from 1.
            metrics: Value by name; a value that is not finite is written as null.

        Raises:
            ValueError: In strict mode, a metric without a definition.
        """
        self._check(metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Record one evaluation.

        Args:
            step: Steps trained so far; 0 is the untrained policy.
            tag: "before", "during" or "after" training.
            split: Name of the task set.
            metrics: Value by name.

        Raises:
            ValueError: In strict mode, a metric without a definition.
        """
        self._check(metrics)
        for sink in self._sinks:
            sink.evaluation(step, tag, split, metrics)

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps; called once when a run resumes from the checkpoint of `step`."""
        for sink in self._sinks:
            sink.truncate_after(step)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def _check(self, metrics: Mapping[str, float]) -> None:
        if not self._strict:
            return
        for name in metrics:
            if describe_metric(name, self._definitions) is None:
                near = get_close_matches(name, self._definitions, n=3)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise ValueError(f"metric {name!r} has no sentence in METRICS (mmrl/training/record/tracking.py){hint}")


def build_tracker(
    config: TrackingConfig,
    run_dir: Path,
    *,
    total_steps: int,
    run_config: Mapping[str, Any] | None = None,
    definitions: Mapping[str, str] | None = None,
) -> Tracker:
    """Make the tracker that a configuration asks for."""
    run_dir = Path(run_dir)
    sinks: list[Sink] = []
    for package, project in (("wandb", config.wandb), ("trackio", config.trackio)):
        if project is not None:
            name = config.run_name or run_dir.resolve().name
            sinks.append(ServiceSink(package, project, name, run_config or {}))
    wanted = tensorboard_installed() if config.tensorboard is None else config.tensorboard
    if wanted:
        sinks.append(TensorBoardSink(run_dir))
    sinks.append(ConsoleSink(total_steps, every=config.console_every, quiet=config.quiet))
    return Tracker(run_dir, sinks, strict=config.strict, definitions=definitions)


def describe_metric(name: str, definitions: Mapping[str, str] | None = None) -> str | None:
    """Sentence that defines a metric.

    Args:
        name: Metric name; `reward/format` is found under `reward/<term>`.
        definitions: Table to look in; METRICS by default.

    Returns:
        The sentence, or None where the table has no entry.
    """
    table = METRICS if definitions is None else definitions
    if name in table:
        return table[name]
    for pattern, sentence in table.items():
        if "<" in pattern:
            expression = re.sub(r"<\w+>", "[^/]+", re.sub(r"[.+*?()]", r"\\\g<0>", pattern))
            if re.fullmatch(expression, name):
                return sentence
    return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl` of a run folder.

    Args:
        run_dir: The run folder.

    Returns:
        One record a step in rising order, the last one where a step was written twice; null is NaN.

    Raises:
        UserError: a value is not a number.
    """
    path = Path(run_dir) / "metrics.jsonl"
    records = {record["step"]: record for record in read_steps(path)}
    return [_numbers(records[step], path) for step in sorted(records)]


def read_evaluations(run_dir: Path, split: str | None = None, tag: str | None = None) -> list[dict[str, Any]]:
    """Read `evaluations.jsonl` of a run folder.

    Args:
        run_dir: The run folder.
        split: Keep this split only.
        tag: Keep this tag only.

    Returns:
        Records in rising order of steps, the last one where an evaluation was written twice; null is NaN.

    Raises:
        UserError: a tag or split is not a text, or another value not a number.
    """
    path = Path(run_dir) / "evaluations.jsonl"
    records = {}
    for record in read_steps(path):
        record = _numbers(record, path, texts=("tag", "split"))
        if split in (None, record.get("split")) and tag in (None, record.get("tag")):
            records[record["step"], record.get("tag"), record.get("split")] = record
    return sorted(records.values(), key=lambda record: record["step"])


def _numbers(record: dict[str, Any], path: Path, texts: Sequence[str] = ()) -> dict[str, Any]:
    """A record with NaN for null; raises UserError where a value is of another kind than the suite writes."""
    for name, value in record.items():
        if value is not None and not isinstance(value, str if name in texts else int | float):
            kind = "a text" if name in texts else "a number"
            found = f"step {record['step']} has {name} {value!r:.60}"
            raise UserError(f"{path}: {found}; expected {kind}; mend or remove that line")
    return {name: math.nan if value is None and name not in texts else value for name, value in record.items()}


METRICS: dict[str, str] = {
    "time/rollout": "Seconds spent sampling: encode, prefill, decode and what lies between them.",
    "time/environment": "Seconds that episodes waited for their environments.",
    "time/answer": "Seconds of the rollout in which questions were answered from the picked frames.",
    "time/encode": "Seconds of the rollout spent reading images and turning prompts into model inputs.",
    "time/prefill": "Seconds of the rollout spent running prompts through the model.",
    "time/score": "Seconds spent in reward functions.",
    "time/old_logp": "Seconds of the pass for old log-probs and values; 0 where the update needs none.",
    "time/ref_logp": "Seconds of the pass of the reference policy; 0 without one.",
    "time/masked_logp": "Seconds of PAPO's pass with the masked image before the update.",
    "time/advantages": "Seconds from rewards to advantages, before the update.",
    "time/forward": "Seconds of the update spent in forward passes and losses.",
    "time/backward": "Seconds of the update spent in backward passes and in averaging gradients over processes.",
    "time/optimizer": "Seconds of the update spent in clipping, optimiser steps and the moving average.",
    "time/update": "Seconds of all optimiser steps: forward, backward, optimizer and what lies between them.",
    "time/evaluate": "Seconds spent on evaluation since the step before.",
    "time/checkpoint": "Seconds spent writing a checkpoint since the step before.",
    "time/step": "Seconds of the step from sampling to update, without evaluation and checkpoint.",
    "memory/peak_mb": "Peak memory in 10^6 bytes: of the process so far, on a GPU of its tensors within the step.",
    "tokens/per_second": "Trained decisions (tokens, denoising steps) of the step over its seconds.",
    "tokens/total": "Decisions (tokens, denoising steps) sampled since the run began.",
    "samples/total": "Samples drawn, or supervised rows seen, since the run began.",
    "reward/mean": "Mean total reward of the samples that could be scored.",
    "reward/std": "Standard deviation of the total reward over the samples of the step.",
    "reward/std_within_groups": "Standard deviation of the total reward within a group, mean over the samples.",
    "reward/errors": "Samples of the step that a reward function failed on; the update leaves them out.",
    "reward/errors/<term>/<kind>": "Samples of the step that one reward function failed on, by what went wrong.",
    "reward/zero_variance_groups": "Share of groups whose samples all got the same reward.",
    "reward/<term>": "Mean of one reward term before its weight.",
    "response/length_mean": "Mean number of sampled decisions (tokens, steps) in a response.",
    "response/length_max": "Longest response of the step in decisions.",
    "response/length_<protocol>": "Mean length of the answers of an evaluation in decisions.",
    "response/finished_fraction": "Share of responses that ended before the length limit.",
    "response/beyond_positions": "Prompts so far that leave fewer positions than sampler.max_new_tokens.",
    "response/nucleus_mass": "Mean probability of the tokens that top_p and top_k left to draw from; 1 is on-policy.",
    "loss/total": "The scalar that is differentiated, summed over its terms.",
    "loss/policy": "The surrogate's part of the loss.",
    "loss/kl": "The reference-KL part of the loss, coefficient included.",
    "loss/entropy": "The entropy part of the loss, coefficient included; negative where entropy is rewarded.",
    "loss/value": "The value function's part of the loss, coefficient included.",
    "loss/perception": "PAPO's implicit-perception part of the loss, weight and sign included.",
    "loss/entropy_policy": "PAPO's entropy term on the image, coefficient included.",
    "loss/entropy_masked": "PAPO's entropy term on the masked image, coefficient included.",
    "loss/sft": "PAPO's likelihood term on correct samples, coefficient included.",
    "loss/nll": "Mean negative log-likelihood of the target tokens, in nats.",
    "loss/preference": "Mean loss of a pair of a preferred and a rejected answer.",
    "loss/nll_chosen": "Negative log-likelihood of the preferred answers, coefficient included.",
    "rewards/chosen": "Mean implicit reward of the preferred answers: beta times the log-ratio to the reference.",
    "rewards/rejected": "Mean implicit reward of the rejected answers.",
    "rewards/margins": "Mean implicit reward of the preferred answers over that of the rejected ones.",
    "rewards/accuracies": "Share of pairs whose preferred answer has the higher implicit reward.",
    "logps/chosen": "Mean log-probability of the preferred answers in nats, summed or averaged as the loss reads it.",
    "logps/rejected": "Mean log-probability of the rejected answers in nats.",
    "logps/accuracies": "Share of pairs whose preferred answer is the likelier one.",
    "accuracy/likelier": "Share of held-out pairs whose preferred answer is the likelier one, with interval.",
    "accuracy/rewards": "Share of held-out pairs whose preferred answer has the higher implicit reward, with interval.",
    "pairs/skipped": "Held-out pairs that could not be used: equal sides, unreadable image, side too long.",
    "policy/ratio_mean": "Mean importance ratio of new over sampling policy in the groups of the update.",
    "policy/ratio_max": "Largest importance ratio of the step in the groups of the update.",
    "policy/clip_fraction_low": "Share of decisions whose gradient the lower clip bound removed.",
    "policy/clip_fraction_high": "Share of decisions whose gradient the upper clip bound removed.",
    "policy/beyond_ratio_limit": "Share of decisions in turns with a ratio above clip.ratio_limit.",
    "policy/kl_old": "k3 estimate of the KL from the updated to the sampling policy, in nats a decision.",
    "policy/kl_ref": "Estimate of the KL from the policy to the reference policy, in nats a decision.",
    "policy/entropy": "Mean entropy of the policy at the sampled positions of the update's groups, in nats.",
    "policy/kl_coef": "Weight of the KL to the reference in use; moves only with adaptive_kl.target.",
    "papo/kl_masked": "k3 between the policy on the image and on the masked image, in nats a decision.",
    "papo/gamma": "Weight of the implicit-perception term after annealing.",
    "papo/masked_fraction": "Share of image patches that were masked.",
    "apo/kl_weight_mean": "Mean KL multiplier that difficulty-adaptive divergence gives a sample.",
    "apo/length_multiplier_mean": "Mean reward multiplier from suboptimal-trajectory length regularisation.",
    "apo/difficulty_mean": "Mean difficulty of the step's tasks, 1 minus the share of correct samples.",
    "policy/log_ratio_std": "Mean standard deviation of the log-ratios of whole rows in their group, in nats.",
    "augment/hinted": "Share of the step's groups whose question carries a hint.",
    "augment/noised": "Share of the step's groups whose images or videos carry noise.",
    "augment/hint_fraction_mean": "Mean share of a trace that the hints of the step give away.",
    "augment/sigma_mean": "Mean standard deviation of the noise of the step's noised groups, as a share of contrast.",
    "augment/traces": "Samples drawn in the step to make hints.",
    "augment/traces_unused": "Those of them that gave no hint, because none earned more than the question does.",
    "augment/probes": "Samples drawn in the step to measure the difficulty of its questions.",
    "augment/window_mean": "Mean reward of the last samples, with which a question's own mean is compared.",
    "aepo/no_signal/<kind>": "Share of groups of one kind of instruction whose answers all earn the same.",
    "tspo/temperature": "Temperature that the temporal agent's scores are divided by; it falls along a line.",
    "tspo/videos_embedded": "Videos whose features were computed since the run began; others were read or kept.",
    "recall/<strategy>": "Share of a needle's frames among the picks: agent, uniform or clip_topk.",
    "recall/<strategy>/low": "Lower end of its 95 % interval.",
    "recall/<strategy>/high": "Upper end of its 95 % interval.",
    "accuracy/needle": "Share of questions that are answered right from the needle's own frames.",
    "update/zero_advantage_groups": "Share of groups with all advantages 0, left out of the update and of policy/.",
    "optim/lr": "Learning rate of the last optimiser step.",
    "optim/grad_norm": "Norm of the gradient before clipping, mean over the optimiser steps.",
    "optim/skipped": "Optimiser steps that the NaN guard has skipped since the run began.",
    "optim/without_gradient": "Optimiser steps left out since the run began, because no group had a gradient.",
    "data/skipped": "Rows skipped since the run began: bad row, unreadable image, prompt too long.",
    "data/epoch": "Passes over the task set so far.",
    "warnings/<kind>": "Steps in a row in which what a warning was about holds by now; there once it was said.",
    "checkpoint/failed": "Checkpoints that could not be written since the run began (full disk).",
    "n": "Tasks that the evaluation answered.",
    "skipped": "Tasks that the evaluation could not ask: unreadable image, prompt too long.",
    "unscored": "Answers of the evaluation that a reward function failed on.",
    "accuracy/self_critic": "Share of questions whose answer, chosen among n by the model itself, is right.",
    "accuracy/majority": "Share of questions whose most frequent answer among the same n is right.",
    "accuracy/pass_at_1": "Share of right answers among the same n of each question.",
    "accuracy/pass_at_n": "Share of questions of which any of the same n answers is right.",
    "self_critic/different": "Mean number of different answers among the n to a question.",
    "self_critic/compared": "Mean number of pairs of answers to a question that the model compared, in both orders.",
    "self_critic/order_agreement": "Share of compared pairs of which both orders prefer the same answer.",
    "self_critic/first_share": "Share of readable judgements that prefer the answer shown first; 0.5 without bias.",
    "self_critic/unreadable": "Share of judgements that name neither 1 nor 2.",
    "accuracy/unrevised": "Share of right likeliest answers before a critic has seen them.",
    "accuracy/revised": "Share of right answers after the critic's rounds of revision.",
    "accuracy/revised_empty": "Share of right answers where every answer is revised after an empty critique.",
    "accuracy/revised_shuffled": "Share of right answers where each gets the critique of another question.",
    "revision/found": "Share of wrong first answers that the critic finds fault with.",
    "revision/false_alarms": "Share of right first answers that the critic finds fault with.",
    "revision/fixed": "Share of wrong first answers that are right after revision.",
    "revision/broken": "Share of right first answers that are wrong after revision.",
    "accuracy/first": "Share of screens whose first predicted point is in the target.",
    "accuracy/any": "Share of screens of which any predicted point is in the target.",
    "accuracy/macro": "Plain mean of accuracy/first over the cells that a benchmark's published average is taken over.",
    "answers/mean": "Mean number of predicted points over the answers that have any.",
    "answers/wrong_format": "Share of answers without a readable point; they count as wrong.",
    "answers/outside": "Share of first points outside their screens, refusals left out.",
    "answers/unusable": "Screens that could not be asked about; they count as wrong.",
    "accuracy/within_5cm": "Share of predicted points of 3D flow, over all frames, that are nearer than 5 cm.",
    "accuracy/language_swap": "Share of other instructions for a scene after which the object goes where they say.",
    "flow/ade_cm": "Mean distance between predicted and true points of 3D flow over all frames, in centimetres.",
    "flow/ade_cm/low": "Lower end of its 95 % interval.",
    "flow/ade_cm/high": "Upper end of its 95 % interval.",
    "flow/fde_cm": "Mean distance between predicted and true points of 3D flow in the last frame, in centimetres.",
    "flow/<error>": "Held-out error of 3D flow in the unit of its name, see robotics.flow3d.model.metrics.",
    "flow/<error>/low": "Lower end of its 95 % interval.",
    "flow/<error>/high": "Upper end of its 95 % interval.",
    "flow/<error>/<part>": "Held-out error of 3D flow of the clips of one task or source, as column=value.",
    "data/clips": "Training clips of 3D flow.",
    "verifier/precision": "Share of accepted predictions whose end does the task, as the simulator judges.",
    "verifier/recall": "Share of predictions whose end does the task that the verifier accepts.",
    "verifier/accepts": "Share of predictions that the verifier accepts.",
    "verifier/judged": "Predictions that the verifier judged.",
    "plan/tries": "Mean predictions of an episode.",
    "plan/ended/<reason>": "Episodes that the planner ended early, by reason.",
    "accuracy/<verifier>": "Share of guessed flows that a verifier accepts, with interval, and by task.",
    "time/verify": "Seconds of judging guessed flows.",
    "accuracy/<protocol>": "Share of correct answers: greedy, or sampled at the evaluation's temperature.",
    "accuracy/<protocol>/low": "Lower end of the accuracy's 95 % interval.",
    "accuracy/<protocol>/high": "Upper end of the accuracy's 95 % interval.",
    "accuracy/<protocol>/<part>": "Share of correct answers to tasks with one value of a data column, as column=value.",
    "accuracy/<protocol>/<part>/low": "Lower end of its 95 % interval.",
    "accuracy/<protocol>/<part>/high": "Upper end of its 95 % interval.",
    "n/<part>": "Tasks with one value of a data column, as column=value.",
    "terms/<term>/<protocol>": "Mean of another reward term over the answers of an evaluation, before its weight.",
    "terms/<term>/<protocol>/low": "Lower end of its 95 % interval.",
    "terms/<term>/<protocol>/high": "Upper end of its 95 % interval.",
    "terms/<term>/<protocol>/<part>": "Mean of the term over tasks with one value of a data column, as column=value.",
    "terms/<term>/<protocol>/<part>/low": "Lower end of its 95 % interval.",
    "terms/<term>/<protocol>/<part>/high": "Upper end of its 95 % interval.",
    "success/<protocol>": "Share of episodes that did the task, greedy or sampled; _swapped: shown other pictures.",
    "success/<protocol>/low": "Lower end of its 95 % interval.",
    "success/<protocol>/high": "Upper end of its 95 % interval.",
    "success/of_families": "Plain mean of the success of the kinds of task: place, pour, insert, drawer.",
    "success/<protocol>/<task>": "Share of episodes of one task that did it.",
    "success/<protocol>/<task>/low": "Lower end of its 95 % interval.",
    "success/<protocol>/<task>/high": "Upper end of its 95 % interval.",
    "score/<reward>": "Mean of an optimised reward over held-out images.",
    "score/<reward>/low": "Lower end of its 95 % interval.",
    "score/<reward>/high": "Upper end of its 95 % interval.",
    "heldout/<reward>": "Mean over held-out images of a reward that is never optimised.",
    "heldout/<reward>/low": "Lower end of its 95 % interval.",
    "heldout/<reward>/high": "Upper end of its 95 % interval.",
    "diversity/latent": "Mean root-mean-square distance between the latents of images of one prompt.",
    "distance/base": "Mean squared distance between the velocities of policy and start model on held-out images.",
    "cost/samples": "Samples drawn for training so far.",
    "cost/seconds": "Seconds of training so far, without evaluation.",
    "cost/forward_rows": "Rows that the denoiser evaluated without gradient for training so far.",
    "cost/train_rows": "Rows that it evaluated with gradient; each costs about three without, for the backward pass.",
    "time/decode": "Seconds of sampling after the prompts are read, or of turning latents into images.",
    "time/critic": "Seconds of training the critic, and of what only it needs to be read.",
    "loss/kl_ema": "AWM's distance to the moving average of past policies, coefficient included.",
    "policy/kl_ema": "Mean squared distance between the velocities of policy and moving average.",
    "awm/error": "Mean matching error of the policy's velocity on its own images.",
    "awm/velocity_norm": "Size of the policy's velocities over those of the reference.",
    "matching/error": "Mean matching error of the policy's velocity.",
    "matching/weight": "Mean weight of the matching errors.",
    "critic/loss": "Mean squared error of the critic on the returns of the step.",
    "critic/explained": "Share of the variance of the returns that the critic explains.",
    "critic/explained/noisy": "Share of the variance explained at the states of time above 0.5, NaN without any.",
    "critic/explained/clean": "Share of the variance explained at the states of time 0.5 and below, NaN without any.",
    "critic/updates": "Updates of the critic so far.",
    "episode/success": "Share of the step's episodes in which the task was done; broken environments are left out.",
    "episode/success/<task>": "Share of the step's episodes of one task that did it, in runs of up to 12 tasks.",
    "episode/steps": "Mean control steps of the step's episodes.",
    "episode/steps_to_success/<protocol>": "Mean control steps of the evaluation's successes.",
    "episode/failed/<protocol>": "Episodes of the evaluation without a result because their environment broke down.",
    "episode/return": "Mean sum of the environment's rewards over the step's episodes with a result.",
    "episode/turns": "Mean turns of the step's episodes.",
    "episode/unreadable": "Share of the step's answers in which no action could be read.",
    "episode/refused": "Actions a turn that the environment could not execute.",
    "episode/return/<protocol>": "Mean sum of the environment's rewards over the evaluation's episodes.",
    "episode/turns/<protocol>": "Mean turns of the evaluation's episodes.",
    "episode/unreadable/<protocol>": "Mean answers of an episode in which no action could be read.",
    "episode/refused/<protocol>": "Mean actions of an episode that the environment could not execute.",
    "episode/no_result/<protocol>": "Episodes of the evaluation that failed with their environment or grew too long.",
    "env/episodes_overflown": "Training episodes so far whose conversation did not fit into the model any more.",
    "replay/groups_without_success": "Groups of the step in which all trajectories earned little.",
    "replay/injected": "Groups of the step that were given a stored trajectory.",
    "replay/age": "Mean steps since the replayed trajectories of the step were sampled.",
    "replay/stored": "Trajectories in the buffer.",
    "replay/added": "Trajectories that were stored so far.",
    "replay/expired": "Stored trajectories dropped so far for their age.",
    "replay/evicted": "Stored trajectories dropped so far because the buffer was full.",
    "replay/memory_mb": "Size of the buffer in 10^6 bytes, in each process.",
    "replay/ratio/<source>": "Mean importance ratio of the loss, over tokens of fresh or of replayed trajectories.",
    "replay/log_ratio/<source>": "Mean log-prob now less that when sampled in nats, of fresh or of replayed tokens.",
    "replay/kl/<source>": "k3 between the policy that sampled and that now, of fresh or of replayed tokens, in nats.",
    "digirl/stored": "Episodes that are stored.",
    "digirl/return": "Mean sum of rewards of the stored episodes.",
    "digirl/kept_episodes": "Share of the stored episodes that the instruction filter keeps.",
    "digirl/kept_steps": "Share of the steps of these episodes that the step filter keeps.",
    "digirl/instruction_loss": "Cross-entropy of the instruction critic in its last update of the step.",
    "digirl/instruction_value": "Mean probability of success that the instruction critic gives the stored episodes.",
    "digirl/step_loss": "Sum of the four cross-entropies of the step critic in its last update of the step.",
    "sim/episodes_failed": "Training episodes without a result so far; each took its group out of a step.",
    "sim/crashed": "Environments whose process died so far.",
    "sim/hung": "Environments that did not answer in time so far.",
    "memory/worker_mb": "Memory in 10^6 bytes, at the end of the step, of the largest environment process.",
    "sim/memory": "Environments whose process held more memory than allowed so far.",
    "sim/raised": "Environments that raised so far.",
    "sim/malformed": "Environments that returned something of which nothing can be made so far.",
    "sim/diverged": "Simulations that blew up so far.",
    "sim/restarted": "Environments that were started again so far.",
    "sim/dropped": "Episodes that were given up so far.",
    "srpo/clusters": "Mean number of clusters among the successes of a task or initial state.",
    "srpo/noise_fraction": "Share of the successes that lie in no cluster.",
    "srpo/tasks_without_reference": "Share of the step's tasks (or initial states) without a success to compare with.",
    "srpo/tasks_with_fallback": "Share of the step's initial states that borrow the successes of others.",
    "srpo/agreement": "Spearman's rank correlation of the reward with the simulator's own, over failures of one start.",
    "srpo/advantage_correlation": "Correlation of the advantages with those that the simulator's reward would give.",
    "srpo/invalid_latents": "Episodes so far that could not be embedded; they are not trained on.",
    "time/latents": "Seconds of embedding episodes.",
    "time/flow": "Seconds of predicting flows and comparing episodes with them.",
    "flow/agreement": "Spearman's rank correlation of the flow reward with the simulator's own, over failures.",
    "flow/failed_predictions": "Initial states so far for which no flow could be predicted; they are not trained on.",
    "flow/failed_tracks": "Episodes so far whose object was lost by the tracker; they are not trained on.",
    "bc/loss": "Loss of behaviour cloning.",
    "bc/token_accuracy": "Share of action tokens whose most likely value is the demonstrated one.",
    "bc/action_error": "Mean distance of the most likely action to the demonstrated one, in -1..1.",
    "bc/std": "Mean standard deviation of a Gaussian action head, in -1..1.",
    "data/moments": "Moments of demonstrations that are trained on.",
}
