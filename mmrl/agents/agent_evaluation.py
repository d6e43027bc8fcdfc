"""Success of an agent on held-out tasks, with videos of some episodes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import CUT
from mmrl.agents.environments.videos import Video, write_videos
from mmrl.agents.rollout.episodes import ENDINGS, Episode
from mmrl.fields import bounded
from mmrl.runs.records import Outcome, SampleRecord, short_digest
from mmrl.runs.run_log import metric_label
from mmrl.runs.statistics import mean_or_nan
from mmrl.training.evaluation import EpisodeMeasure, Row, Trial
from mmrl.training.settings import EvaluationConfig

RunEpisodes = Callable[[Sequence[AgentTask], Sequence[int], bool, Sequence[bool]], list[Episode]]
"""(tasks, seeds, greedy, which are recorded as videos) to their episodes."""


@dataclass
class AgentEvaluationConfig(EvaluationConfig):
    """Evaluation on greedy episodes, and also on sampled ones if `samples` is above 0."""

    samples: int = bounded(0, at_least=0)
    """Additional episodes per task with sampled responses; 0 = none."""
    videos: int = bounded(2, at_least=0)
    """Number of successes and of failures of the headline split to save as mp4 (the first ones); 0 = none."""


@dataclass
class AgentMeasure(EpisodeMeasure[AgentTask]):
    """Success over tasks, with greedy or with sampled responses.

    The metrics are success/<protocol> with its interval (Wilson for greedy, bootstrap over tasks for sampled), the same
    for each name of a task, and the means of return, turns, unreadable answers, cut ones, refused actions, overflows.
    Episodes without a result are counted in episode/no_result and are part of no other number.
    """

    run_episodes: RunEpisodes
    protocol: str
    """greedy or sampled."""
    evaluation: AgentEvaluationConfig
    seed: int
    split: str
    setting: Row = field(default_factory=dict)
    """Environment and limits, for the ledger's protocol."""
    folder: Path | None = None
    """Folder for the videos; None writes none."""
    label: str = ""
    """Start of the videos' names."""
    _videos: list[Video] = field(default_factory=list)

    def __post_init__(self) -> None:
        # greedy episodes repeat nothing: the same answers again
        self.repeats = int(self.evaluation.greedy) if self.greedy else self.evaluation.samples

    @property
    def batch_size(self) -> int:
        """Episodes that start together."""
        return self.evaluation.batch_tasks

    def run(self, batch: Sequence[Trial[AgentTask]], start: int) -> list[Row]:
        """Run some episodes to their ends; a row has a video if it is one of the first of its outcome."""
        seeds = [self.seed_of(trial.task.id, trial.repeat) for trial in batch]
        # frames of every episode, since which ones succeed is known only at the end
        recorded = [self.folder is not None] * len(batch)
        episodes = self.run_episodes([trial.task for trial in batch], seeds, self.greedy, recorded)
        rows = [_row(trial, episode) for trial, episode in zip(batch, episodes, strict=True)]
        for success in (True, False):
            found = [number for number, each in enumerate(episodes) if each.video and each.video.success is success]
            for number in found[: self.evaluation.videos]:
                rows[number]["video"] = episodes[number].video
        return rows

    def take(self, rows: Sequence[Row]) -> None:
        """Keep the first videos of both outcomes."""
        found: list[Video] = [row.pop("video") for row in rows if "video" in row]
        for success in (True, False):
            kept = sum(video.success is success for video in self._videos)
            own = [video for video in found if video.success is success]
            # batches come one after the other; the first of each outcome stay over all of them
            self._videos += own[: max(self.evaluation.videos - kept, 0)]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[AgentTask]) -> dict[str, float]:
        """Success overall and by task name, and the means over episodes."""
        valid = [row for row in rows if not row["failed"]]
        metrics = self.success_rates(rows, "name", fewest=2)
        for key in ("return", "turns", "unreadable", "cut", "refused", "overflow"):
            metrics[f"episode/{key}/{self.protocol}"] = mean_or_nan([row.get(key, 0.0) for row in valid])
        for term in dict.fromkeys(term for row in valid for term in row["terms"]):
            # a reward may fail on single episodes
            scores = [row["terms"][term] for row in valid if math.isfinite(row["terms"].get(term, math.nan))]
            metrics[f"terms/{metric_label(term)}/{self.protocol}"] = mean_or_nan(scores)
        return metrics | {f"episode/no_result/{self.protocol}": float(len(rows) - len(valid))}

    def record(self, row: Row) -> SampleRecord:
        """An episode as its responses and its last image."""
        return row["sample"]

    def failure(self, rows: Sequence[Row]) -> str:
        """Reason why no episode has a result; empty if any episode has one."""
        if not rows or not all(row["failed"] for row in rows):
            return ""
        return f"no episode of {self.split} has a result: {rows[0]['reason']}"

    def outcome(self, row: Row) -> Outcome | None:
        """Success and return of an episode; None without a result."""
        if row["failed"]:
            return None
        scores = {f"success/{self.protocol}": float(row["success"]), f"return/{self.protocol}": row["return"]}
        return Outcome(row["id"], scores, {"task": row["name"]} if row["name"] else {})

    def about(self) -> Row:
        """The environment, its limits and how responses are chosen."""
        return {**self.setting, "decodings": {self.protocol: 1}, "bootstrap": self.seed}

    def state_of(self, row: Row) -> str:
        """The task with its seed."""
        return row["state"]

    def columns(self, row: Row) -> Row:
        """Task, seed, return, turns, ending, and the responses with their digest."""
        return {
            "task": row["name"],
            "seed": self.seed_of(row["id"], row["repeat"]),
            "return": row["return"],
            "length": row["turns"],
            "ending": row["reason"] or row["ending"],
            "output": short_digest(row["sample"].response.encode()),
            "prompt": row["sample"].prompt,
            "text": row["sample"].response,
        }

    def finish(self, rows: Sequence[Row], saved: object) -> None:
        """Write the videos."""
        if self.folder is not None:
            write_videos(self.folder, self.label, self._videos, self.evaluation.videos)


def _row(trial: Trial[AgentTask], episode: Episode) -> Row:
    total = episode.total if episode.has_result else None
    return {
        "index": trial.index,
        "repeat": trial.repeat,
        "id": trial.task.id,
        "name": str(trial.task.task.get("name", "")),
        "state": f"{json.dumps(trial.task.task, sort_keys=True, default=str)} seed {trial.task.seed}",
        "success": episode.success,
        "failed": not episode.has_result,
        "ending": episode.ending,
        "reason": episode.reason or ENDINGS.get(episode.ending, ""),
        "return": total,
        "turns": episode.trajectory.turns,
        "unreadable": episode.unreadable,
        "cut": episode.errors.count(CUT),
        "refused": episode.refused,
        "overflow": float(episode.overflows),
        "terms": episode.terms,
        "sample": SampleRecord(reward=total, terms=episode.terms, **about_episode(episode)),
    }


def about_episode(episode: Episode) -> dict[str, Any]:
    """Fields of a sample for the report: the responses of all turns, and the last image."""
    turns = [f"[turn {number}] {answer}" for number, answer in enumerate(episode.answers, 1)]
    return {
        "id": episode.task.id,
        "prompt": "" if episode.prompt is None else episode.prompt.text,
        "response": "\n".join(turns),
        "outputs": [Image.fromarray(image) for image in episode.last.images[-1:]],
        "finish": episode.ending,
        "correct": episode.success if episode.has_result else None,
    }
