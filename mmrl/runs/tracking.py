"""Metrics of a run and the sinks that record them; METRICS defines the metrics that several packages share."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.recipes import package_tables
from mmrl.runs.jsonlines import read_steps
from mmrl.runs.sinks import (
    ConsoleSink,
    JsonlSink,
    ServiceSink,
    Sink,
    TensorBoardSink,
    tensorboard_installed,
)


@dataclass
class TrackingConfig:
    """Destinations of metrics besides `metrics.jsonl` and `evaluations.jsonl`."""

    quiet: bool = rare(False)
    """Show nothing on the console."""
    console_every: int = rare(1)
    """Show one console line in this many steps; evaluations are always shown."""
    tensorboard: bool | None = None
    """Write TensorBoard events; null means where tensorboard is installed."""
    wandb: str | None = None
    """Weights & Biases project to log to; null for none."""
    trackio: str | None = None
    """Trackio project to log to; null for none."""
    run_name: str | None = rare(None)
    """Name of the run in wandb and trackio; null takes the name of the run folder."""
    strict: bool = rare(False)
    """Refuse metrics that no METRICS table defines; the tests switch it on."""


class Tracker:
    """Hands every metric to the JSON Lines files and to each further sink; `strict` refuses undefined metrics."""

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
        self._definitions = {**metric_definitions(), **(definitions or {})}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one finished step, counted from 1; a value that is not finite is written as null."""
        self._check(metrics)
        for sink in self._sinks:
            sink.log(step, metrics)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Record one evaluation of a split, tagged before, during or after training; step 0 is the untrained policy."""
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
                raise ValueError(f"metric {name!r} has no sentence in METRICS of its package's entries.py{hint}")


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


@functools.cache
def metric_definitions() -> dict[str, str]:
    """Sentences of all packages' metrics by name, specific tables before METRICS."""
    tables: list[dict[str, str]] = [*package_tables("METRICS"), METRICS]
    return {name: sentence for table in tables for name, sentence in table.items()}


def describe_metric(name: str, definitions: Mapping[str, str] | None = None) -> str | None:
    """Sentence that defines a metric, None without one; `reward/format` is found under `reward/<term>`."""
    table = metric_definitions() if definitions is None else definitions
    if name in table:
        return table[name]
    for pattern, sentence in table.items():
        if "<" in pattern:
            expression = re.sub(r"<\w+>", "[^/]+", re.sub(r"[.+*?()]", r"\\\g<0>", pattern))
            if re.fullmatch(expression, name):
                return sentence
    return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read `metrics.jsonl` of a run folder: one record a step in rising order, the last where one was written twice."""
    path = Path(run_dir) / "metrics.jsonl"
    records = {record["step"]: record for record in read_steps(path)}
    return [_numbers(records[step], path) for step in sorted(records)]


def read_evaluations(run_dir: Path, split: str | None = None, tag: str | None = None) -> list[dict[str, Any]]:
    """Read `evaluations.jsonl` of a run folder in rising order of steps, all or those of a split and tag."""
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
    "time/score": "Seconds spent in reward functions.",
    "time/old_logp": "Seconds of the pass for old log-probs and values; 0 where the update needs none.",
    "time/ref_logp": "Seconds of the pass of the reference policy; 0 without one.",
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
    "loss/total": "The scalar that is differentiated, summed over its terms.",
    "loss/policy": "The surrogate's part of the loss.",
    "loss/kl": "The reference-KL part of the loss, coefficient included.",
    "loss/entropy": "The entropy part of the loss, coefficient included; negative where entropy is rewarded.",
    "loss/value": "The value function's part of the loss, coefficient included.",
    "loss/nll": "Mean negative log-likelihood of the target tokens, in nats.",
    "policy/ratio_mean": "Mean importance ratio of new over sampling policy in the groups of the update.",
    "policy/ratio_max": "Largest importance ratio of the step in the groups of the update.",
    "policy/clip_fraction_low": "Share of decisions whose gradient the lower clip bound removed.",
    "policy/clip_fraction_high": "Share of decisions whose gradient the upper clip bound removed.",
    "policy/beyond_ratio_limit": "Share of decisions in turns with a ratio above clip.ratio_limit.",
    "policy/kl_old": "k3 estimate of the KL from the updated to the sampling policy, in nats a decision.",
    "policy/kl_ref": "Estimate of the KL from the policy to the reference policy, in nats a decision.",
    "policy/entropy": "Mean entropy of the policy at the sampled positions of the update's groups, in nats.",
    "policy/kl_coef": "Weight of the KL to the reference in use; moves only with adaptive_kl.target.",
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
    "success/<protocol>": "Share of episodes that did the task, greedy or sampled; _swapped: shown other images.",
    "success/<protocol>/low": "Lower end of its 95 % interval.",
    "success/<protocol>/high": "Upper end of its 95 % interval.",
    "success/<protocol>/<task>": "Share of episodes of one task that did it.",
    "success/<protocol>/<task>/low": "Lower end of its 95 % interval.",
    "success/<protocol>/<task>/high": "Upper end of its 95 % interval.",
    "cost/samples": "Samples drawn for training so far.",
    "cost/seconds": "Seconds of training so far, without evaluation.",
    "time/critic": "Seconds of training the critic, and of what only it needs to be read.",
    "critic/loss": "Mean squared error of the critic on the returns of the step.",
    "critic/explained": "Share of the variance of the returns that the critic explains.",
    "critic/updates": "Updates of the critic so far.",
    "episode/success": "Share of the step's episodes in which the task was done; broken environments are left out.",
    "episode/success/<task>": "Share of the step's episodes of one task that did it, in runs of up to 12 tasks.",
    "episode/return": "Mean sum of the environment's rewards over the step's episodes with a result.",
    "episode/return/<protocol>": "Mean sum of the environment's rewards over the evaluation's episodes.",
}
