"""Verdicts of verifiers on held-out clips, in addition to the errors of `FlowMeasure`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmrl.training.loop.breakdown import part_metric
from mmrl.training.loop.evaluation import Row, Trial, with_interval
from mmrl.training.loop.seeds import stream_seed
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.samples import SampleRecord
from robotics.flow3d.check.judge import FlowJudge
from robotics.flow3d.check.verdict import Verdict
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.model.evaluation import FlowMeasure


def verdict_metric(name: str) -> str:
    """Name of the metric: share of samples that a verifier accepts."""
    return f"accuracy/{name}"


@dataclass(kw_only=True)
class VerdictMeasure(FlowMeasure):
    """The errors of `FlowMeasure`, and for each verifier its mean score and the share of accepted samples."""

    judge: FlowJudge

    def run(self, batch: Sequence[Trial[FlowClip]], start: int) -> list[Row]:
        """Sample, compare and judge the flow of some clips."""
        rows = super().run(batch, start)
        for row in rows:
            verdicts = self.judge.judge(row["clip"], row["samples"])
            accepted = {name: [_number(found[name], found[name].ok) for found in verdicts] for name in verdicts[0]}
            row |= {"accepted": accepted, "reasons": {name: found.reason for name, found in verdicts[0].items()}}
            row["scores"] = {
                name: [_number(found[name], found[name].score) for found in verdicts] for name in verdicts[0]
            }
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[FlowClip]) -> dict[str, float]:
        """Errors, and shares of accepted samples with intervals; NaN where they could not be judged."""
        found = super().metrics(rows, tasks)
        for name in rows[0]["accepted"] if rows else ():
            rng = np.random.default_rng(stream_seed(self.seed, "bootstrap", self.split))
            found |= with_interval(verdict_metric(name), [row["accepted"][name] for row in rows], rng)
            found[f"score/{name}"] = _known_mean([value for row in rows for value in row["scores"][name]])
            by_task: dict[str, list[float]] = {}
            for row in rows:
                by_task.setdefault(str(row["clip"].meta.get("task", "")), []).extend(row["accepted"][name])
            if len(by_task) > 1:
                parts = {part_metric(verdict_metric(name), "task", task): each for task, each in by_task.items()}
                found |= {part: _known_mean(values) for part, values in parts.items() if _known(values)}
        return found

    def record(self, row: Row) -> SampleRecord:
        """The record of `FlowMeasure` with the verdicts on the first sample."""
        record = super().record(row)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in row["reasons"].items())
        shares = {verdict_metric(name): _known_mean(values) for name, values in row["accepted"].items()}
        return dataclasses.replace(record, response=f"{record.response}; {reasons}", terms={**record.terms, **shares})

    def outcome(self, row: Row) -> Outcome:
        """Errors and shares of accepted samples of a clip, for paired comparisons."""
        outcome = super().outcome(row)
        shares = {verdict_metric(name): _known_mean(values) for name, values in row["accepted"].items()}
        known = {name: value for name, value in shares.items() if value == value}
        return dataclasses.replace(outcome, scores={**outcome.scores, **known})


def _number(verdict: Verdict, value: float | bool | None) -> float:
    return float("nan") if verdict.ok is None or value is None else float(value)


def _known(values: Sequence[float]) -> bool:
    return any(value == value for value in values)


def _known_mean(values: Sequence[float]) -> float:
    return float(np.nanmean(values)) if _known(values) else float("nan")
