"""What a run writes down beside its checkpoints: metrics of each step, samples, evaluations and its result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mmrl.core.rollouts import Rollouts
from mmrl.files import write_atomically
from mmrl.training.record.jsonlines import finite_or_none
from mmrl.training.record.metrics import peak_memory_mb
from mmrl.training.record.outcomes import Outcome, write_outcomes
from mmrl.training.record.run_folder import forget_after
from mmrl.training.record.run_warnings import RunWarnings
from mmrl.training.record.samples import SampleRecord, write_samples
from mmrl.training.record.stopwatch import STAGES_BETWEEN, Stopwatch
from mmrl.training.record.tracking import Tracker

LOOP_STAGES = ("rollout", "score", "old_logp", "ref_logp", "advantages", "forward", "backward", "optimizer", "update")
"""Stages of every run; one that a run does not need takes 0 seconds."""


class RunLog:
    """Counts what a run has cost and hands its numbers to the tracker and to the files of the run folder."""

    def __init__(self, run_dir: Path, device: torch.device, tracker: Tracker | None) -> None:
        self.run_dir = run_dir
        self.device = device
        self.tracker = tracker
        self.watch = Stopwatch(device)
        self.totals: dict[str, Any] = {"samples": 0, "tokens": 0, "seconds": 0.0}
        self.evaluations: list[dict[str, Any]] = []
        self.failed_checkpoints = 0
        self.warnings = RunWarnings(None if tracker is None else run_dir)

    def count(self, sampled: Iterable[Rollouts], beside: int = 0) -> None:
        """Add what was sampled to the totals."""
        self.totals["samples"] += beside
        for part in sampled:
            self.totals["samples"] += part.num_rows
            self.totals["tokens"] += int(part.mask.sum())

    def step(self, step: int, metrics: Mapping[str, float], tokens: float) -> None:
        """Log the metrics of a step with its times and the totals of the run."""
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
        """Keep samples for the report, as split "train" or "eval"."""
        if self.tracker is not None:
            write_samples(self.run_dir, step, split, records)

    def outcomes(self, step: int, split: str, outcomes: Sequence[Outcome]) -> None:
        """Keep what each task of an evaluation scored."""
        if self.tracker is not None and outcomes:
            write_outcomes(self.run_dir, step, split, outcomes)

    def evaluation(self, step: int, tag: str, split: str, metrics: Mapping[str, float]) -> None:
        """Log an evaluation with what the run has cost until then."""
        found = {
            **metrics,
            "cost/samples": float(self.totals["samples"]),
            "cost/seconds": self.totals["seconds"],
        }
        self.evaluations.append({"step": step, "tag": tag, "split": split, **found})
        if self.tracker is not None:
            self.tracker.evaluation(step, tag, split, found)

    def truncate_after(self, step: int) -> None:
        """Forget what was logged after a step, before a resumed run goes on from there."""
        self.warnings.truncate_after(step)
        if self.tracker is not None:
            self.tracker.truncate_after(step)
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
        self.totals = state["totals"]
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
