"""Metrics of closed-loop episodes: success by task, arm and held-out property, flow errors, and verifier accuracy."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import nn

from mmrl.fields import bounded
from mmrl.files import shortened_name
from mmrl.runs.fingerprint import content_digest
from mmrl.runs.records import Outcome, ResumableRows, SampleRecord, short_digest
from mmrl.runs.statistics import mean_or_nan, with_interval
from mmrl.training.evaluation import EpisodeMeasure, Trial, part_metric
from mmrl.training.settings import EvaluationConfig
from robotics.episodes.episode_evaluation import success_table
from robotics.flow3d.closed_loop.flow_episodes import FlowEpisode, LoopConfig
from robotics.flow3d.closed_loop.runner import FlowEpisodeRunner, Row, Source
from robotics.flow3d.flow_model import FlowModel

LOGGER = logging.getLogger("mmrl")
SUCCESS = "success/closed_loop"
PARTS = ("task", "family", "arm", "shape", "layouts", "colours", "background")
"""Columns of a row that success is broken down by."""
SWAP = "accuracy/language_swap"


@dataclass
class SampledEvaluationConfig(EvaluationConfig):
    """Evaluation of flow, which is always sampled at temperature 1."""

    greedy: bool = False
    """Not available for flow; must stay false."""

    def validate(self) -> None:
        """Reject options without effect; raises ValueError."""
        super().validate()
        if self.greedy or self.temperature != 1.0:
            raise ValueError("evaluation.greedy and evaluation.temperature have no effect on flow; leave them out")


@dataclass
class LoopEvaluationConfig(SampledEvaluationConfig):
    """Evaluation in closed loop: each episode once."""

    videos: int = bounded(2, at_least=0)
    """Number of episodes per task and arm to record as video and point cloud, starting with the first; 0 = none."""


@dataclass
class FlowLoopMeasure(EpisodeMeasure[FlowEpisode]):
    """Success of a source of flow over episodes; `loop_metrics` lists the metrics."""

    runner: FlowEpisodeRunner
    evaluation: LoopEvaluationConfig
    split: str
    run_dir: Path
    conditions: Mapping[str, Any]
    """Settings and digest of the model, on which stored rows depend in addition to the episodes."""

    protocol = "closed_loop"

    def __post_init__(self) -> None:
        self._recorded: Counter[tuple[str, str]] = Counter()

    @property
    def batch_size(self) -> int:
        """Episodes run one after the other."""
        return 1

    def run(self, batch: Sequence[Trial[FlowEpisode]], start: int) -> list[Row]:
        """Run an episode."""
        rows = []
        for trial in batch:
            video = self._video(trial.task)
            row = {"index": trial.index, "repeat": trial.repeat, **self.runner.run(trial.task, video)}
            if video is not None:
                self.runner.write_cloud(self.run_dir / "clouds" / f"{video.stem}.html")
            row["video"] = str(video.relative_to(self.run_dir)) if video is not None and video.is_file() else None
            # images are kept only for the report's samples
            if trial.index < self.evaluation.records:
                row["images"] = self.runner.images()
            rows.append(row)
        return rows

    def metrics(self, rows: Sequence[Row], tasks: Sequence[FlowEpisode]) -> dict[str, float]:
        """See `loop_metrics`."""
        return loop_metrics(rows)

    def record(self, row: Row) -> SampleRecord:
        """An episode with its flow, predicted outcome and numbers."""
        errors = "no flow" if row.get("ade_cm") is None else f"ADE {row['ade_cm']:.1f} cm, FDE {row['fde_cm']:.1f} cm"
        tries = row["tries"]
        return SampleRecord(
            id=row["id"],
            prompt=f"{row['arm']}: {row['instruction']}",
            response=f"{len(tries)} predictions, {errors}",
            outputs=row.get("images", []),
            reward=float(row["success"]),
            finish=_ending(row),
            correct=row["success"],
        )

    def outcome(self, row: Row) -> Outcome | None:
        """Success of an episode; None if it failed with an error."""
        if row["failed"]:
            return None
        scores = {SUCCESS: float(row["success"])}
        if row["ade_cm"] is not None:
            scores["flow/ade_cm"] = row["ade_cm"]
        return Outcome(row["id"], scores, {name: row[name] for name in PARTS})

    def about(self) -> Row:
        """The settings of the loop."""
        # the protocol does not depend on the model, only on how its flow is disturbed
        disturbed = str(self.conditions.get("weights", "")).partition(", ")[2]
        settings = {**self.conditions, "weights": disturbed}
        version = f"mujoco {settings.get('mujoco', '')}".strip()
        return {"suite": "flow3d", "version": version, "decodings": {"closed_loop": 1}, "settings": settings}

    def state_of(self, row: Row) -> str:
        """The episode's scene and instruction."""
        return row["id"]

    def columns(self, row: Row) -> Row:
        """Task, tries and ending."""
        return {"task": row["task"], "length": len(row["tries"]), "ending": _ending(row)}

    def saved_rows(self, tasks: Sequence[FlowEpisode], processes: int) -> ResumableRows:
        """The episodes file of this model, these settings and episodes."""
        # rows of other episodes, another model or other settings must not be taken for finished ones
        digest = short_digest("\n".join(map(repr, tasks)).encode())
        conditions = {"episodes": digest, **self.conditions}
        return ResumableRows(self.run_dir / "episodes", self.split, conditions, {"images"})

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Log the table of successes."""
        LOGGER.info("%s:\n%s", self.split, loop_table(rows))

    def _video(self, episode: FlowEpisode) -> Path | None:
        kind = episode.scene.task, episode.scene.actor_name
        # counted per task and arm, so that each combination has a video
        self._recorded[kind] += 1
        if self._recorded[kind] > self.evaluation.videos:
            return None
        return self.run_dir / "videos" / f"step-000000-{self.split}-{shortened_name(episode.id.replace('/', '-'))}.mp4"


@contextmanager
def measure_in_loop(model: nn.Module, settings: LoopConfig, split: str, run_dir: Path) -> Iterator[FlowLoopMeasure]:
    """A measure of a model during its training; scenes are open inside the context."""
    # of the average that is evaluated, not of the policy that it replaces
    weights = content_digest(sorted(model.state_dict().items()))
    # through JSON, in the form in which stored rows are compared
    conditions = {"weights": weights, "settings": json.loads(json.dumps(dataclasses.asdict(settings)))}
    with FlowEpisodeRunner(settings, cast(FlowModel, model)) as runner:
        yield FlowLoopMeasure(runner, LoopEvaluationConfig(videos=0), split, run_dir, conditions)


def evaluate_flow(
    source: Source, episodes: Sequence[FlowEpisode], settings: LoopConfig | None = None
) -> tuple[dict[str, float], list[Row]]:
    """Run episodes and measure them, without files.

    Args:
        source: a flow model, such as a `FlowWorldModel`, or a function from a scene to one, such as `TrueFlow`.
        episodes: see `list_episodes`.
        settings: verifier, planning and execution; None for the defaults.

    Returns:
        The metrics of `loop_metrics`, and a row per episode as described in `EpisodeRunner.run`.

    Raises:
        UserError: an option is out of range.
    """
    with FlowEpisodeRunner(settings or LoopConfig(), source) as runner:
        rows = [runner.run(episode) for episode in episodes]
    return loop_metrics(rows), rows


def loop_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Metrics of the rows of `EpisodeRunner.run`.

    success/closed_loop with Wilson's 95% interval, overall and by task, family, arm, shape and held-out property;
    success/of_families, the mean over place, pour, insert and drawer; errors of the flow; accuracy/language_swap; the
    verifier's precision and recall; tries per episode; counts of errors and early ends.
    """
    # a row that failed with an error measures nothing; it only counts in episode/failed
    valid = [row for row in rows if not row["failed"]]
    found = with_interval(SUCCESS, [[float(row["success"])] for row in valid], None)
    for column in PARTS:
        values = list(dict.fromkeys(row[column] for row in valid))
        # a single value would repeat the overall success
        for value in values if len(values) > 1 or column == "arm" else ():
            own = [[float(row["success"])] for row in valid if row[column] == value]
            found |= with_interval(part_metric(SUCCESS, column, value), own, None)
    # every family counts the same, no matter how many tasks it has
    families = [
        np.mean([row["success"] for row in valid if row["family"] == name])
        for name in dict.fromkeys(row["family"] for row in valid)
    ]
    found["success/of_families"] = mean_or_nan(families)
    for name in ("ade_cm", "fde_cm", "rotation_deg"):
        known = [row[name] for row in valid if row[name] is not None]
        # a rotation about a symmetry axis is arbitrary, and one such episode would dominate a mean
        middle = np.median if name == "rotation_deg" else np.mean
        found[f"flow/{name}"] = float(middle(known)) if known else float("nan")
    found |= swap_metrics(valid)
    found |= _verifier(valid)
    found["plan/tries"] = mean_or_nan([len(row["tries"]) for row in valid])
    found["episode/failed/closed_loop"] = float(len(rows) - len(valid))
    for reason, count in Counter(row["failure"] for row in valid if row["failure"]).most_common():
        found[f"plan/ended/{reason}"] = float(count)
    return found


def loop_table(rows: Sequence[Row]) -> str:
    """Successes of each task with each arm and overall, with Wilson intervals and how the failures ended."""
    return success_table(rows, lambda row: f"{row['task']} {row['arm']}", _ending, "all")


def _ending(row: Row) -> str:
    if row["failed"]:
        return "error"
    if row["success"]:
        return "success"
    return str(row["failure"]) or "not " + ", not ".join(row["failed_criteria"])


def swap_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """Fraction of the alternative instructions whose goal the object then reaches, with its interval.

    The answers of a row are not independent, so each row counts once.
    """
    swaps = [[float(np.mean(row["swaps"]))] for row in rows if row["swaps"]]
    return with_interval(SWAP, swaps, None) if swaps else {}


def _verifier(rows: Sequence[Row]) -> dict[str, float]:
    """Precision and recall of the verifier over judged predictions."""
    tries = [each for row in rows for each in row["tries"] if each["ok"] is not None and each["meets"] is not None]
    judged = [(bool(each["ok"]), bool(each["meets"])) for each in tries]
    if not judged:
        return {}
    accepted, right = [meets for ok, meets in judged if ok], [ok for ok, meets in judged if meets]
    return {
        "verifier/precision": mean_or_nan(accepted),
        "verifier/recall": mean_or_nan(right),
        "verifier/accepts": len(accepted) / len(judged),
        "verifier/judged": float(len(judged)),
    }
