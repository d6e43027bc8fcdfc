"""Evaluation on held-out clips: errors of sampled flow, the language swap, and verdicts of verifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.fields import bounded
from mmrl.training.loop.breakdown import part_metric, parts_of_tasks
from mmrl.training.loop.evaluation import Measure, Row, Trial, with_interval
from mmrl.training.loop.seeds import stream_seed
from mmrl.training.loop.settings import EvaluationConfig
from mmrl.training.record.outcomes import Outcome
from mmrl.training.record.samples import SampleRecord
from mmrl.training.record.statistics import wilson_interval
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.model.metrics import FlowErrors, flow_errors, goal_reached
from robotics.flow3d.model.pictures import draw_flow
from robotics.flow3d.model.world_model import FlowWorldModel, sample_seeds

GOALS = "goals_world_m"
"""Key of `FlowClip.meta`: instruction -> (3,) final mean of the query points."""
HEADLINE = "accuracy/within_5cm"
ERRORS = ("ade_cm", "fde_cm", "ade_visible_cm", "fde_visible_cm", "best_ade_cm")
SWAP = "accuracy/language_swap"


@dataclass
class FlowEvaluationConfig(EvaluationConfig):
    """Evaluation of a world model, with samples from fixed seeds."""

    greedy: bool = False
    """Not available for flow; must stay false."""
    samples: int = bounded(4, at_least=1)
    """K, samples a clip, with the same seeds at every evaluation."""
    language_swap: bool = True
    """Also evaluate the other instructions of a scene, where the clips list them."""

    def validate(self) -> None:
        """Check that the fields fit together; raises ValueError."""
        super().validate()
        if self.greedy or self.temperature != 1.0:
            raise ValueError("evaluation.greedy and evaluation.temperature have no effect on flow; leave them out")


@dataclass
class FlowMeasure(Measure[FlowClip]):
    """Errors of K samples a clip.

    Seeds depend on (seed, split, clip) alone, so evaluations of different steps are paired. Metrics are
    accuracy/within_5cm and the errors of `FlowErrors` as flow/<error>, by task and source where the split has several,
    and accuracy/language_swap where clips have `meta["goals_world_m"]`.
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
        samples = self._samples(batch)
        rows: list[Row] = []
        for trial, found in zip(batch, samples, strict=True):
            row = {"index": trial.index, "repeat": trial.repeat, "clip": trial.task, "samples": found, "swaps": []}
            rows.append(row | {"errors": flow_errors(found, trial.task)})
        if self.evaluation.language_swap:
            self._swap(batch, rows)
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[FlowClip]) -> dict[str, float]:
        """Means with intervals, by task and source, and the errors of standing still."""
        if not rows:
            return {}
        rng = np.random.default_rng(stream_seed(self.seed, "bootstrap", self.split))
        found = with_interval(HEADLINE, [[row["errors"].within_5cm] for row in rows], rng)
        for name in ERRORS:
            found |= with_interval(f"flow/{name}", [[getattr(row["errors"], name)] for row in rows], rng)
        for name in ("zero_motion_ade_cm", "zero_motion_fde_cm"):
            found[f"flow/{name}"] = _mean(rows, name)
        found["flow/rotation_deg"] = float(np.median([row["errors"].rotation_deg for row in rows]))
        return found | self._by_part(rows, tasks) | _swap_metrics(rows)

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
        known = {name: value for name, value in values.items() if value == value}
        return Outcome(f"{self.split}/{row['index']}", {HEADLINE: errors.within_5cm, **known})

    def _samples(self, batch: Sequence[Trial[FlowClip]]) -> list[Any]:
        """(K, T, N, N, 4) of each clip."""
        import torch

        model, count = self.model, self.evaluation.samples
        clips = [trial.task for trial in batch]
        inputs = model.inputs_of([clip.observation for clip in clips], [clip.points for clip in clips])
        seeds = [sample_seeds(stream_seed(self.seed, self.split, trial.index), count) for trial in batch]
        written = model.sample(inputs, torch.cat(seeds)).float().cpu().numpy()
        size = [clip.observation.size_px for clip in clips]
        parts = np.split(written, len(clips))
        return [
            model.encoding.decode(part, clip.points, own) for part, clip, own in zip(parts, clips, size, strict=True)
        ]

    def _swap(self, batch: Sequence[Trial[FlowClip]], rows: list[Row]) -> None:
        """Record for every other instruction of a scene whether the object then goes to its goal."""
        import torch

        asked = [
            (row, trial.task, text)
            for row, trial in zip(rows, batch, strict=True)
            for text in trial.task.meta.get(GOALS, {})
            if text != trial.task.observation.instruction.lower()
        ]
        if not asked:
            return
        seen = [dataclasses.replace(clip.observation, instruction=text) for _, clip, text in asked]
        inputs = self.model.inputs_of(seen, [clip.points for _, clip, _ in asked])
        seeds = [sample_seeds(stream_seed(self.seed, self.split, row["index"]), 1) for row, _, _ in asked]
        written = self.model.sample(inputs, torch.cat(seeds)).float().cpu().numpy()
        for (row, clip, text), part in zip(asked, written, strict=True):
            flow = self.model.encoding.decode(part, clip.points, clip.observation.size_px)
            end_m = clip.with_flow(flow).flow_world_m[-1]
            row["swaps"].append(goal_reached(end_m, clip.meta[GOALS], text))

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


def _swap_metrics(rows: Sequence[Row]) -> dict[str, float]:
    swaps = [hit for row in rows for hit in row["swaps"]]
    if not swaps:
        return {}
    low, high = wilson_interval(sum(swaps), len(swaps))
    return {SWAP: float(np.mean(swaps)), f"{SWAP}/low": low, f"{SWAP}/high": high}
