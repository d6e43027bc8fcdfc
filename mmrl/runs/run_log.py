"""The log of a trainer: seconds of a step by stage, metrics of every domain, and alarms about them."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mmrl.core.blocks.advantage import group_std
from mmrl.core.blocks.filter import groups_that_differ
from mmrl.core.rollouts import Rollouts
from mmrl.files import write_atomically
from mmrl.runs.folder import forget_after
from mmrl.runs.metrics import STAGES_BETWEEN
from mmrl.runs.records import (
    KEPT,
    WARNINGS_FILE,
    JsonLines,
    Outcome,
    SampleRecord,
    finite_or_none,
    write_outcomes,
    write_samples,
)
from mmrl.runs.tracking import Tracker

STEPS = 5
"""Number of steps in a mean."""
WINDOW = 20
"""Number of latest steps that are kept."""


@dataclass
class Track:
    """A metric's finite values in the first `STEPS` and the latest `WINDOW` steps."""

    first: list[float] = field(default_factory=list)
    latest: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        """Add the value of a step."""
        # the first values stay: alarms compare the present with the beginning
        if len(self.first) < STEPS:
            self.first.append(value)
        self.latest = [*self.latest, value][-WINDOW:]

    @property
    def start(self) -> float:
        """Mean of the first steps; NaN until there are enough."""
        return _mean(self.first)

    @property
    def now(self) -> float:
        """Mean of the latest steps; NaN until there are enough."""
        return _mean(self.latest[-STEPS:])


def _mean(values: Sequence[float]) -> float:
    # NaN before there are enough, with which every comparison is false
    return sum(values) / STEPS if len(values) == STEPS else math.nan


@dataclass(frozen=True)
class Alarm:
    """A warning based on metrics."""

    metrics: tuple[str, ...]
    """Metrics that it uses."""
    check: Callable[..., str]
    """Function of their tracks, in this order, that returns the warning, or an empty text."""


class AlarmTracks:
    """The tracks that alarms use."""

    def __init__(self) -> None:
        self._tracks: dict[str, Track] = {}

    def due(self, alarms: Mapping[str, Alarm], metrics: Mapping[str, float]) -> dict[str, str]:
        """Add the metrics of a step; returns the warnings that are due, by kind."""
        for name in dict.fromkeys(name for alarm in alarms.values() for name in alarm.metrics):
            track = self._tracks.setdefault(name, Track())
            # a step without the metric leaves the track as it is
            if math.isfinite(value := metrics.get(name, math.nan)):
                track.add(value)
        found = {kind: alarm.check(*(self._tracks[name] for name in alarm.metrics)) for kind, alarm in alarms.items()}
        return {kind: text for kind, text in found.items() if text}

    def state_dict(self) -> dict[str, list[list[float]]]:
        """The stored values, for a checkpoint."""
        return {name: [list(track.first), list(track.latest)] for name, track in self._tracks.items()}

    def load_state_dict(self, state: Mapping[str, list[list[float]]]) -> None:
        """Restore `state_dict`."""
        self._tracks = {name: Track(list(first), list(latest)) for name, (first, latest) in state.items()}


LOGGER = logging.getLogger("mmrl")
PATIENCE = 5
"""Number of consecutive steps after which a warning is given."""
LITTLE_AGREEMENT = 0.1
"""Absolute mean rank correlation below which there is practically no agreement."""
NOT_REWARDS = {"groups": "equal_groups", "all_noise": "all_noise", "all_cut": "all_cut", "clipped": "clipped_at_start"}
"""Streaks that do not belong to a single reward, and the warnings that they trigger."""
LONGER = "increase sampler.max_new_tokens, or check that the prompt and the chat template lead the model to finish"
ROWS = ("groups", "kept", "rows", "unscored")
"""Totals of the samples: groups, groups kept by a filter, their rows, and rows without a reward."""
LOOP_STAGES = ("rollout", "score", "old_logp", "ref_logp", "advantages", "forward", "backward", "optimizer", "update")
"""Stages of every run; stages that a run does not need take 0 seconds."""


class Stopwatch:
    """Adds up seconds by stage.

    On a GPU, work is only queued when a call returns. There, a stage lasts from the end of the work queued before it to
    the end of its own work. Both are marked by events in the queue, so that measuring does not synchronise.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []
        self.inside: list[str] = []
        """Running stages, the innermost last."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make `stopwatch` add to this one."""
        # a context variable, so that code deep inside needs no handle of the loop
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to a stage."""
        start = self._now()
        self.inside.append(name)
        try:
            yield
        finally:
            self.inside.pop()
            self._spans.append((name, start, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call."""
        # once a step: the events have been recorded in the stream without waiting
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            # events count milliseconds
            seconds[name] += end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
        self._spans = []
        return dict(seconds)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # an event and not a clock: the GPU works on while Python goes on
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@contextmanager
def stopwatch(name: str) -> Iterator[None]:
    """Add the seconds spent inside to `time/<name>` of the running step, if there is one."""
    watch = _RUNNING.get()
    if watch is None:
        yield
        return
    with watch.stage(name):
        yield


_RUNNING: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


def metric_label(name: str) -> str:
    """A reward's name as one part of a metric's name, without the slashes of a path."""
    return name.replace("/", ".")


def batch_metrics(batches: Sequence[Rollouts], compared: Sequence[str]) -> dict[str, float]:
    """Rewards, lengths and zero-variance groups of all samples of a step, before filtering.

    `compared` are the rewards that groups are compared by, see `Recipe.compared`; empty if there are no rewards.
    """
    # of all that was sampled, so that the filter does not change them
    lengths = torch.cat([batch.mask.sum(1) for batch in batches])
    metrics = {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
    }
    if not compared:
        return metrics
    reward = torch.cat([batch.reward for batch in batches])
    # a reward of NaN marks an unscored row
    scored = torch.isfinite(reward)
    metrics |= {
        "reward/mean": float(reward[scored].mean()) if bool(scored.any()) else float("nan"),
        "reward/errors": float((~scored).sum()),
    }
    if int(scored.sum()) > 1:  # one value has no sample deviation
        metrics["reward/std"] = float(reward[scored].std())
    # only where groups have several rows, since single ones never differ
    if any(len(batch.group.unique()) < len(batch.group) for batch in batches):
        flat = torch.cat([~groups_that_differ(batch, compared) for batch in batches]).float()
        metrics["reward/zero_variance_groups"] = float(flat.mean())
        metrics["reward/std_within_groups"] = float(torch.cat([_std_in_groups(batch) for batch in batches]).mean())
    for name in batches[0].reward_terms:
        values = torch.cat([batch.reward_terms[name] for batch in batches])
        # a term that scored no row has no mean, and is left out of the log
        finite = values[torch.isfinite(values)]
        if len(finite):
            metrics[f"reward/{metric_label(name)}"] = float(finite.mean())
    return metrics


def _std_in_groups(batch: Rollouts) -> torch.Tensor:
    """Standard deviation (B,) of the rewards of each row's group, 0 where fewer than two were scored."""
    # NaN is masked as invalid; nan_to_num only keeps the sums finite
    return group_std(torch.nan_to_num(batch.reward), batch.group, torch.isfinite(batch.reward), 0)


def restart_peak_memory(device: torch.device) -> None:
    """Make `peak_memory_mb` look for a new peak, if the device supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in 10^6 bytes: on a GPU of tensors since `restart_peak_memory`, else resident so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status")  # getrusage also counts the process that started this one
    if status.is_file():
        # VmHWM is a peak since the process began, in KiB
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024 / 1e6
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return float("nan")


@dataclass
class _Streak:
    """Steps in a row in which something held, and the samples of them."""

    steps: int = 0
    samples: int = 0
    value: float = math.nan


@dataclass
class RunWarnings:
    """Watches the rewards of a run; each warning is written to the log and to `warnings.jsonl` once."""

    folder: Path | None
    only_logged: Collection[str] = ()
    """Reward terms with weight 0, which may be constant."""
    variety: str = "a higher temperature"
    """Advice for making the samples of a task more diverse; empty if there is no option for it."""
    alarms: Mapping[str, Alarm] = field(default_factory=dict)
    """The recipe's own warnings based on metrics, by kind."""
    compared: Sequence[str] = ("reward",)
    """Rewards by which the samples of a task are compared; empty if advantages come from elsewhere."""
    said: dict[str, str] = field(default_factory=dict)
    """Warnings so far by subject."""
    _streaks: dict[str, _Streak] = field(default_factory=dict)
    _agreement: list[float] = field(default_factory=list)
    _tracks: AlarmTracks = field(default_factory=AlarmTracks)

    def watch(self, batches: Iterable[Rollouts]) -> None:
        """Inspect the scored samples of a step, before a filter drops any."""
        parts = list(batches)
        # a total that nothing compares may well be constant
        total = ("reward",) if "reward" in (self.compared or ("reward",)) else ()  # else each term is read by itself
        for name in (*total, *(term for term in parts[0].reward_terms if term not in self.only_logged)):
            values = torch.cat([part.reward if name == "reward" else part.reward_terms[name] for part in parts])
            found = values[torch.isfinite(values)]
            # one sample alone is no sign of a constant reward
            same = len(found) > 1 and bool((found == found[0]).all())
            before = self._streaks.get(name, _Streak())
            # the same value as before: a reward that changes from step to step is not constant
            goes_on = same and (not before.steps or before.value == float(found[0]))
            self._count(name, goes_on, len(found), float(found[0]) if same else math.nan)
        # groups of one row never differ
        grouped = bool(self.compared) and any(part.num_rows > part.num_groups for part in parts)
        equal = grouped and not any(bool(groups_that_differ(part, self.compared).any()) for part in parts)
        self._count("groups", equal, sum(part.num_rows for part in parts), math.nan)

    @property
    def sees_equal_groups(self) -> bool:
        """Whether the samples of every task of the step had equal rewards."""
        return self._streaks.get("groups", _Streak()).steps > 0

    def forget_equal_groups(self) -> None:
        """Reset the streak of steps with equal rewards: this step had non-zero advantages anyway."""
        self._count("groups", False, 0, math.nan)

    def step(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Warn about conditions that have held for `PATIENCE` steps."""
        agreement = metrics.get("srpo/agreement", math.nan)
        if math.isfinite(agreement):
            self._agreement = [*self._agreement, agreement][-PATIENCE:]
        if "srpo/noise_fraction" in metrics:
            self._count("all_noise", metrics["srpo/noise_fraction"] == 1, 0, math.nan)
        if "response/finished_fraction" in metrics:
            self._count("all_cut", metrics["response/finished_fraction"] == 0, 0, math.nan)
        # only of the first optimiser step, see update._clipped_at_start
        clipped = metrics.get("policy/clipped_at_start", 0.0)
        self._count("clipped", clipped > 0, 0, clipped)
        for kind, message in (self._due() | self._tracks.due(self.alarms, metrics)).items():
            self.say(step, kind, message)
        return {f"warnings/{kind}": float(count) for kind, count in self._counts().items() if kind in self.said}

    def say(self, step: int, kind: str, message: str) -> None:
        """Warn once: in the log, in `warnings.jsonl` and in the report."""
        if kind in self.said:
            return
        self.said[kind] = message
        # the first process writes; the others keep count, so that states are equal
        if self.folder is not None:
            LOGGER.warning("step %d: %s", step, message, extra={KEPT: True})
            lines = JsonLines(self.folder / WARNINGS_FILE)
            lines.append({"step": step, "kind": kind, "message": message})
            lines.close()

    def truncate_after(self, step: int) -> None:
        """Drop the warnings of later steps, which a resumed run repeats."""
        if self.folder is not None:
            JsonLines(self.folder / WARNINGS_FILE).truncate_after(step)

    def state_dict(self) -> dict[str, Any]:
        """Warnings given so far, and counts."""
        streaks = {name: [streak.steps, streak.samples, streak.value] for name, streak in self._streaks.items()}
        return {"said": dict(self.said), "streaks": streaks, "agreement": list(self._agreement)} | {
            "tracks": self._tracks.state_dict()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.said = dict(state["said"])
        self._streaks = {name: _Streak(*values) for name, values in state["streaks"].items()}
        self._agreement = list(state["agreement"])
        self._tracks.load_state_dict(state.get("tracks", {}))  # checkpoints of earlier versions have none

    def _count(self, name: str, holds: bool, samples: int, value: float) -> None:
        before = self._streaks.get(name, _Streak())
        # a step in which it does not hold ends the streak
        self._streaks[name] = _Streak(before.steps + 1, before.samples + samples, value) if holds else _Streak()

    def _due(self) -> dict[str, str]:
        due = {}
        for name, streak in self._streaks.items():
            if name in NOT_REWARDS or streak.steps < PATIENCE:
                continue
            label = "the total reward" if name == "reward" else f"reward {name!r}"
            due[_constant(name)] = (
                f"{label} was {streak.value:g} for all {streak.samples} samples of {streak.steps} steps, so it "
                "cannot distinguish them; unless this is its best value, check the samples in the report and "
                "what the reward expects"
            )
        # a constant reward explains equal groups, and is the better advice
        if self._streaks.get("groups", _Streak()).steps >= PATIENCE and "constant_reward" not in due:
            more = ", ".join(filter(None, ("more samples_per_task", self.variety, "easier or harder tasks")))
            due["equal_groups"] = (
                f"for {self._streaks['groups'].steps} steps the samples of every task have had equal rewards, so "
                f"advantages within a task are 0 and nothing is learned; try {more} or a more fine-grained reward"
            )
        if self._streaks.get("all_cut", _Streak()).steps >= PATIENCE:
            due["all_cut"] = f"for {PATIENCE} steps every response was cut off at the length limit; {LONGER}"
        if self._streaks.get("all_noise", _Streak()).steps >= PATIENCE:
            due["all_noise"] = (
                f"for {PATIENCE} steps no two successes were close enough to form a cluster (srpo/noise_fraction "
                "is 1), so failures are compared with the mean of all successes; try a larger progress.eps, or a "
                "larger progress.memory to keep more successes"
            )
        if (clipped := self._streaks.get("clipped", _Streak())).steps:
            due["clipped_at_start"] = (
                f"{clipped.value:.1%} of decisions were clipped in the first optimiser step of an update, before "
                "the policy had changed: old and new log-probabilities differ by more than the clip range, through "
                "rounding errors, or through dropout or batch normalisation in a module of yours. Switch those off, or "
                "use trainer.old_logp=recompute with a trainer.micro_batch that divides a minibatch (1 always does), "
                "or float32"
            )
        # a mean near 0 over several steps: single steps vary
        if len(self._agreement) == PATIENCE and abs(sum(self._agreement) / PATIENCE) < LITTLE_AGREEMENT:
            due["no_agreement"] = (
                f"srpo/agreement was {sum(self._agreement) / PATIENCE:.2f} on average over {PATIENCE} steps: the "
                "progress reward of failures is unrelated to the simulator's own progress; try another latent or "
                "more data for its encoder"
            )
        return due

    def _counts(self) -> dict[str, int]:
        counts = {NOT_REWARDS.get(name, _constant(name)): streak.steps for name, streak in self._streaks.items()}
        return {"equal_groups": 0} | counts


def _constant(name: str) -> str:
    return f"constant_{name.replace('/', '.')}"


class RunLog:
    """Counts a run's costs and writes its metrics to the tracker and the files of the run folder."""

    def __init__(self, run_dir: Path, device: torch.device, tracker: Tracker | None) -> None:
        self.run_dir = run_dir
        self.device = device
        self.tracker = tracker
        self.watch = Stopwatch(device)
        self.totals: dict[str, Any] = {"samples": 0, "tokens": 0, "seconds": 0.0, **dict.fromkeys(ROWS, 0)}
        self.evaluations: list[dict[str, Any]] = []
        self.failed_checkpoints = 0
        self.warnings = RunWarnings(None if tracker is None else run_dir)

    def count(self, sampled: Iterable[Rollouts], kept: int = 0, extra: int = 0) -> None:
        """Add the samples to the totals, with the number of groups that a filter kept."""
        self.totals["samples"] += extra
        self.totals["kept"] += kept
        # before a filter drops any: cost counts what was computed
        for part in sampled:
            self.totals["samples"] += part.num_rows
            self.totals["tokens"] += int(part.mask.sum())
            self.totals["groups"] += part.num_groups
            self.totals["rows"] += part.num_rows
            self.totals["unscored"] += int((~part.scored).sum())

    def step(self, step: int, metrics: Mapping[str, float], tokens: float) -> None:
        """Log the metrics of a step with its times and the totals of the run."""
        # stages that did not run take 0 seconds, so that every step has the same metrics
        times = dict.fromkeys((*LOOP_STAGES, *STAGES_BETWEEN), 0.0) | self.watch.take()
        seconds = times["step"]
        self.totals["seconds"] += seconds
        # evaluation and checkpoint times are those since the step before
        everything = {**metrics, **{f"time/{stage}": value for stage, value in times.items()}} | {
            "tokens/per_second": tokens / seconds,
            "tokens/total": float(self.totals["tokens"]),
            "samples/total": float(self.totals["samples"]),
            "checkpoint/failed": float(self.failed_checkpoints),
            "memory/peak_mb": peak_memory_mb(self.device),
            **self.warnings.step(step, metrics),
        }
        if self.tracker is not None:
            self.tracker.log(step, everything)

    def samples(self, step: int, split: str, records: Sequence[SampleRecord]) -> None:
        """Store samples for the report, as split "train" or "eval"."""
        if self.tracker is not None:
            write_samples(self.run_dir, step, split, records)

    def outcomes(self, step: int, split: str, outcomes: Sequence[Outcome]) -> None:
        """Store the scores of each task of an evaluation."""
        if self.tracker is not None and outcomes:
            write_outcomes(self.run_dir, step, split, outcomes)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Log an evaluation with the run's costs so far."""
        found = {
            **metrics,
            "cost/samples": float(self.totals["samples"]),
            "cost/seconds": self.totals["seconds"],
        }
        # kept in memory too: checkpoints and result.json hold them
        self.evaluations.append({"step": step, "tag": tag, "split": split, **found})
        if self.tracker is not None:
            self.tracker.evaluation(step, tag, split, found)

    def truncate_after(self, step: int) -> None:
        """Remove the records after a step, before a resumed run continues from there."""
        self.warnings.truncate_after(step)
        if self.tracker is not None:
            self.tracker.truncate_after(step)
            if all(evaluation["step"] != step for evaluation in self.evaluations):
                # a stop had saved the step without its evaluation, and a kill then hit the run that made up for it
                records = JsonLines(self.run_dir / "evaluations.jsonl")
                records.drop(lambda row: row.get("step") == step and row.get("tag") != "evaluate")
            forget_after(self.run_dir, step)

    def result(self, found: Mapping[str, Any], *, write: bool) -> dict[str, Any]:
        """Complete the content of result.json with the totals and evaluations."""
        result = {
            **found,
            **self.totals,
            "first_evaluation": _per_split(self.evaluations),
            "last_evaluation": _per_split(self.evaluations[::-1]),
        }
        if write:
            # null for what is not finite, which JSON has no number for
            write_atomically(self.run_dir / "result.json", json.dumps(finite_or_none(result), indent=1))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Totals, evaluations and warnings, for a checkpoint."""
        return {
            "totals": self.totals,
            "evaluations": self.evaluations,
            "failed_checkpoints": self.failed_checkpoints,
            "warnings": self.warnings.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        # updated and not replaced: a new version may count more
        self.totals |= state["totals"]
        self.evaluations = state["evaluations"]
        self.failed_checkpoints = int(state.get("failed_checkpoints", 0))
        if "warnings" in state:  # checkpoints of earlier versions have none
            self.warnings.load_state_dict(state["warnings"])


def _per_split(evaluations: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first evaluation of each split."""
    first: dict[str, dict[str, Any]] = {}
    for evaluation in evaluations:
        first.setdefault(evaluation["split"], evaluation)
    return first
