"""Evaluation on held-out clips: errors of sampled flow, the language swap, and verdicts of verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion.models.ema import EvalAverage, KeepsEvalAverage
from mmrl.fields import bounded
from mmrl.runs.export import Exported
from mmrl.runs.records import Outcome, SampleRecord
from mmrl.runs.statistics import with_interval
from mmrl.training.evaluation import Measure, Row, Trial, part_metric, parts_of_tasks
from mmrl.training.processes import stream_seed
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.closed_loop.measure import SampledEvaluationConfig, swap_metrics
from robotics.flow3d.geometry import FloatArray
from robotics.flow3d.metrics import FlowErrors, draw_flow, flow_errors, goal_reached
from robotics.flow3d.model.world_model import FlowWorldModel, sample_seeds
from robotics.flow3d.plan.judge import FlowJudge
from robotics.flow3d.plan.result import Verdict

GOALS = "goals_world_m"
"""Key of `FlowClip.meta`: instruction -> (3,) final mean of the query points."""
HEADLINE = "accuracy/within_5cm"
ERRORS = ("ade_cm", "fde_cm", "ade_visible_cm", "fde_visible_cm", "best_ade_cm")


class FlowDomain(KeepsEvalAverage):
    """Evaluation average and export of recipes on a world model of flow."""

    @classmethod
    def export(cls, config: Any, checkpoint: Path, output: Path) -> Exported:
        """Write a self-contained folder; with an evaluation average, the folder of the averaged weights."""
        FlowWorldModel.from_pretrained(EvalAverage.folder_of(checkpoint)).export(output)
        return Exported(
            "robotics.flow3d.model.FlowWorldModel.from_pretrained",
            "from robotics.flow3d.model import FlowWorldModel\n\nmodel = FlowWorldModel.from_pretrained(folder)",
            task="robotics",
            facts={
                "use": (
                    "model.predict(observation, points, samples=4) returns the future positions of the object's points"
                )
            },
        )


@dataclass
class FlowEvaluationConfig(SampledEvaluationConfig):
    """Evaluation of a world model, with samples from fixed seeds."""

    samples: int = bounded(4, at_least=1)
    """K, number of samples per clip, with the same seeds at every evaluation."""
    language_swap: bool = True
    """Also evaluate the other instructions of a scene, if the clips list them."""


@dataclass
class FlowMeasure(Measure[FlowClip]):
    """Errors of K samples per clip.

    Seeds only depend on (seed, split, clip), so evaluations of different steps are paired. Metrics are
    accuracy/within_5cm and the errors of `FlowErrors` as flow/<error>, by task and source if the split has several, and
    accuracy/language_swap if clips have `meta["goals_world_m"]`.
    """

    model: FlowWorldModel
    evaluation: FlowEvaluationConfig
    seed: int
    split: str

    @property
    def batch_size(self) -> int:
        """Clips whose flow is sampled together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[FlowClip]], start: int) -> list[Row]:
        """Sample and compare the flow of some clips."""
        clips, indices = [trial.task for trial in batch], [trial.index for trial in batch]
        samples = self._samples(clips, indices, self.evaluation.samples)
        rows: list[Row] = []
        for trial, found in zip(batch, samples, strict=True):
            row = {"index": trial.index, "repeat": trial.repeat, "clip": trial.task, "samples": found, "swaps": []}
            rows.append(row | {"errors": flow_errors(found, trial.task)})
        if self.evaluation.language_swap:
            self._swap(batch, rows)
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[FlowClip]) -> dict[str, float]:
        """Means with intervals, by task and source, and the errors of no motion."""
        if not rows:
            return {}
        rng = np.random.default_rng(stream_seed(self.seed, "bootstrap", self.split))
        found = with_interval(HEADLINE, [[row["errors"].within_5cm] for row in rows], rng)
        for name in ERRORS:
            found |= with_interval(f"flow/{name}", [[getattr(row["errors"], name)] for row in rows], rng)
        for name in ("zero_motion_ade_cm", "zero_motion_fde_cm"):
            found[f"flow/{name}"] = _mean(rows, name)
        # a median, as a few degenerate fits with half a turn would dominate a mean
        found["flow/rotation_deg"] = float(np.median([row["errors"].rotation_deg for row in rows]))
        found |= self._by_part(rows, tasks)
        return found | swap_metrics(rows)

    def record(self, row: Row) -> SampleRecord:
        """The first samples over the truth in white, and the errors."""
        clip: FlowClip = row["clip"]
        rgb, errors = clip.observation.rgb, row["errors"]
        return SampleRecord(
            id=f"{self.split}/{row['index']}",
            prompt=clip.observation.instruction,
            response=f"ADE {errors.ade_cm:.1f} cm, FDE {errors.fde_cm:.1f} cm, rotation {errors.rotation_deg:.0f} deg",
            outputs=[draw_flow(rgb, clip.points, sample, clip.flow) for sample in row["samples"][:2]],
            terms={name: getattr(errors, name) for name in ("ade_cm", "fde_cm", "zero_motion_ade_cm")},
        )

    def outcome(self, row: Row) -> Outcome:
        """Errors of a clip, for paired comparisons."""
        errors: FlowErrors = row["errors"]
        values = {f"flow/{name}": getattr(errors, name) for name in ERRORS}
        # NaN, such as the error of visible points without any, is not a score
        known = {name: value for name, value in values.items() if value == value}
        return Outcome(f"{self.split}/{row['index']}", {HEADLINE: errors.within_5cm, **known})

    def _samples(self, clips: Sequence[FlowClip], indices: Sequence[int], count: int) -> list[FloatArray]:
        """(count, T, N, N, 4) samples of each clip, whose seeds depend on its index in the split."""
        model = self.model
        inputs = model.inputs_of([clip.observation for clip in clips], [clip.points for clip in clips])
        # by clip, so that a sample does not depend on the batch that it is drawn in
        seeds = [sample_seeds(stream_seed(self.seed, self.split, index), count) for index in indices]
        written = model.sample(inputs, torch.cat(seeds)).float().cpu().numpy()
        return [
            model.encoding.decode(part, clip.points, clip.observation.size_px)
            for part, clip in zip(np.split(written, len(clips)), clips, strict=True)
        ]

    def _swap(self, batch: Sequence[Trial[FlowClip]], rows: list[Row]) -> None:
        """Record, for every other instruction of a scene, whether the object then reaches its goal."""
        asked = [
            (row, dataclasses.replace(clip, observation=dataclasses.replace(clip.observation, instruction=text)))
            for row, clip in zip(rows, (trial.task for trial in batch), strict=True)
            for text in clip.meta.get(GOALS, {})
            if text != clip.observation.instruction.lower()
        ]
        if not asked:
            return
        clips = [clip for _, clip in asked]
        # the seed of the clip, not of the instruction: only the text differs from the first samples
        samples = self._samples(clips, [row["index"] for row, _ in asked], 1)
        for (row, clip), flow in zip(asked, samples, strict=True):
            end_m = clip.with_flow(flow[0]).flow_world_m[-1]
            row["swaps"].append(goal_reached(end_m, clip.meta[GOALS], clip.observation.instruction))

    def _by_part(self, rows: Sequence[Row], tasks: Sequence[FlowClip]) -> dict[str, float]:
        columns = [{"task": clip.meta.get("task"), "source": clip.source} for clip in tasks]
        parts = parts_of_tasks(columns, None)
        found: dict[str, list[float]] = {}
        for row in rows:
            for column, value in parts[row["index"]].items():
                found.setdefault(part_metric("flow/ade_cm", column, value), []).append(row["errors"].ade_cm)
        return {name: float(np.mean(values)) for name, values in found.items()}


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([getattr(row["errors"], name) for row in rows]))


def verdict_metric(name: str) -> str:
    """Name of the metric: fraction of samples that a verifier accepts."""
    return f"accuracy/{name}"


@dataclass(kw_only=True)
class VerdictMeasure(FlowMeasure):
    """The errors of `FlowMeasure`, and for each verifier its mean score and the fraction of accepted samples."""

    judge: FlowJudge

    def run(self, batch: Sequence[Trial[FlowClip]], start: int) -> list[Row]:
        """Sample, compare and judge the flow of some clips."""
        rows = super().run(batch, start)
        for row in rows:
            verdicts = self.judge.judge(row["clip"], row["samples"])
            by_name = {name: [found[name] for found in verdicts] for name in verdicts[0]}
            row["accepted"] = {name: [_number(each, each.ok) for each in own] for name, own in by_name.items()}
            row["scores"] = {name: [_number(each, each.score) for each in own] for name, own in by_name.items()}
            row["reasons"] = {name: own[0].reason for name, own in by_name.items()}
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[FlowClip]) -> dict[str, float]:
        """Errors, and fractions of accepted samples with intervals; NaN if none could be judged."""
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
        return dataclasses.replace(
            record, response=f"{record.response}; {reasons}", terms={**record.terms, **_accepted_shares(row)}
        )

    def outcome(self, row: Row) -> Outcome:
        """Errors and fractions of accepted samples of a clip, for paired comparisons."""
        outcome = super().outcome(row)
        known = {name: value for name, value in _accepted_shares(row).items() if value == value}
        return dataclasses.replace(outcome, scores={**outcome.scores, **known})


def _number(verdict: Verdict, value: float | bool | None) -> float:
    return float("nan") if verdict.ok is None or value is None else float(value)


def _accepted_shares(row: Row) -> dict[str, float]:
    return {verdict_metric(name): _known_mean(values) for name, values in row["accepted"].items()}


def _known(values: Sequence[float]) -> bool:
    return any(value == value for value in values)


def _known_mean(values: Sequence[float]) -> float:
    return float(np.nanmean(values)) if _known(values) else float("nan")
