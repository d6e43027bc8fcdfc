"""Evaluation of policies in a simulator: success by task, tables, and videos of replayed failures and successes.

Each finished episode is one line of `episodes/<split>-<protocol>-<fingerprint>.jsonl` in the run's folder. The
fingerprint covers weights, settings and initial states, so an interrupted evaluation continues where it stopped, and
episodes of other weights are never mixed in. Episodes whose environment failed are run again.

`swapped` shows the images of another initial state throughout: success that remains does not come from vision.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mmrl.errors import RunError
from mmrl.fields import bounded, rare
from mmrl.files import shortened_name
from mmrl.hub.video_writing import write_mp4
from mmrl.runs.fingerprint import weights_digest
from mmrl.runs.records import Outcome, ResumableRows, SampleRecord, short_digest
from mmrl.runs.statistics import mean_or_nan, with_interval
from mmrl.training.evaluation import EpisodeMeasure, Row, Trial
from mmrl.training.settings import EvaluationConfig
from robotics.episodes.collect import ActingSettings, Episodes, action_scale, replay_episode, run_episodes
from robotics.episodes.handover import DelaySettings, action_jumps
from robotics.episodes.payload import episode_id
from robotics.policies.base.action_policy import ActionPolicy
from robotics.scenes.videos import Caption, write_caption
from robotics.sim.episodes import EpisodeSpec, RobotSim, keeps_past
from robotics.sim.opening import SimConfig, open_video_sim

LOGGER = logging.getLogger("mmrl")
MACHINE = ("renderer", "numpy", "machine", "python", "assets", "physics")
"""Entries of a simulator's description that belong to the machine, not to the protocol."""
PROTOCOLS = ("greedy", "sampled", "greedy_swapped", "sampled_swapped")
"""Protocols of choosing actions; `_swapped` shows the policy the first images of another episode."""


JUDGED = ("agreement", "false_positives", "false_negatives", "true_success")
"""Numbers that compare a classifier's verdicts with the environment's own success."""


def judged_counts(verdicts: Sequence[bool], true: Sequence[bool]) -> dict[str, int]:
    """Counts of `JUDGED` among episodes, and `compared`, their number."""
    pairs = Counter(zip(verdicts, true, strict=True))
    agreed, wrong, missed = pairs[True, True] + pairs[False, False], pairs[True, False], pairs[False, True]
    counts = dict(zip(JUDGED, (agreed, wrong, missed, pairs[True, True] + missed), strict=True))
    return counts | {"compared": len(verdicts)}


def episode_of(row: Mapping[str, Any]) -> EpisodeSpec:
    """The episode of an evaluation's row."""
    return EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"], row.get("draw", 0))


@dataclass
class ReplayVideos:
    """Writes `<folder>/<label>-<success or failure>-<task>-<layout>.mp4`."""

    sim: RobotSim
    """The run's simulator."""
    config: SimConfig
    """Settings of `sim`."""
    folder: Path
    label: str
    """Beginning of the names, such as step-000010-held_out."""
    count: int
    """Number of videos of failures, and the same number of successes."""
    fps: int
    size: int = 0
    """Height in pixels, rendered by a separate simulator in its presentation look if it has one; 0 = the images of
    `sim`."""
    chunk: int = 8
    """Control steps sent to the simulator in one call."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replay the first failures and successes and write their frames."""
        tried = [row for row in rows if not row["failed"] and row["actions"]]
        chosen = [
            row for success in (True, False) for row in [r for r in tried if r["success"] is success][: self.count]
        ]
        if not chosen or (self.sim.image_size is None and not self.size):
            return
        with ExitStack() as stack:
            sim = stack.enter_context(closing(open_video_sim(self.config, self.size))) if self.size else self.sim
            for row in chosen:
                self._write_one(sim, row)

    def _write_one(self, sim: RobotSim, row: dict[str, Any]) -> None:
        episode = episode_of(row)
        try:
            frames, success = replay_episode(sim, episode, np.asarray(row["actions"], np.float32), self.chunk)
        except RunError as error:
            LOGGER.warning("no video of %s: %s", episode_id(episode), error)
            return
        # a classifier's verdict is not repeated in a replay
        if success not in (row["success"], row.get("true_success")):
            LOGGER.warning("the replay of %s ended differently", episode_id(episode))
        if not len(frames):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        ending = "success" if row["success"] else "failure"
        task = shortened_name(row["task"].replace("/", "."))
        name = f"{self.label}-{ending}-{task}-{row['layout']}.mp4"
        about = sim.describe()
        if about.get("look") == "film":
            write_mp4(self.folder / name, _captioned(frames, row, about["control_hz"], self.fps), self.fps)
        else:
            write_mp4(self.folder / name, frames, self.fps)


def _captioned(
    frames: NDArray[np.uint8], row: dict[str, Any], control_hz: float, fps: int
) -> Iterator[NDArray[np.uint8]]:
    """Frames with captions; the last one, with the outcome of the episode, stays for a second."""
    for step, frame in enumerate(frames):
        is_last = step == len(frames) - 1
        outcome = "" if not is_last else "success" if row["success"] else "failure"
        captioned = write_caption(frame, Caption(row["instruction"], step / control_hz, outcome))  # type: ignore[arg-type]
        yield from [captioned] * (fps if is_last else 1)


@dataclass
class RobotEvaluationConfig(EvaluationConfig):
    """Evaluation in a simulator: greedy episodes, and sampled ones if `samples` is above 0."""

    samples: int = 0
    """Additional episodes per initial state with sampled actions; 0 = none."""
    swapped: bool = rare(False)
    """Also evaluate while showing the first images of another initial state throughout, as success/greedy_swapped and
    success/sampled_swapped. Any success that remains does not depend on the images."""
    videos: int = bounded(2, at_least=0)
    """Number of failures, and of successes, of the headline split to write as mp4, starting with the first; 0 = none.
    Nothing is written if the simulator renders no images and `video_size` is 0."""
    fps: int = bounded(10, at_least=1)
    """Frames per second of the videos, with one frame per control step."""
    video_size: int = rare(bounded(0, at_least=0))
    """Height of the videos in pixels, rendered by a separate simulator; 0 = use the policy's own images. Above 0,
    videos of the tabletop are made for human viewers: 4:3, with a caption showing the outcome, and different from the
    policy's images."""
    delay: DelaySettings = rare(field(default_factory=DelaySettings))
    """Simulated inference delay, and the way from one chunk to the next."""


@dataclass
class RobotMeasure(EpisodeMeasure[EpisodeSpec]):
    """Success over initial states with one protocol.

    The metrics are success/<protocol> with its interval (Wilson for greedy, bootstrap over initial states for sampled),
    the same for each task, the mean control steps of the successes and the number of failed environments.
    """

    policy: ActionPolicy
    sim: RobotSim
    protocol: str
    """One of `PROTOCOLS`."""
    evaluation: RobotEvaluationConfig
    acting: ActingSettings
    """Acting settings; sampled episodes use `evaluation.temperature` and no ensemble."""
    seed: int
    split: str
    run_dir: Path
    conditions: Mapping[str, Any]
    """Other conditions that the rows depend on, such as the numerical precision and digests of user code."""
    others: Mapping[EpisodeSpec, EpisodeSpec] = field(default_factory=dict)
    """The episode whose images the swapped protocols show, by episode."""
    videos: ReplayVideos | None = None
    """Replays the first failures and successes; None makes no videos."""

    def __post_init__(self) -> None:
        self.swapped = self.protocol.endswith("_swapped")
        self.repeats = int(self.evaluation.greedy) if self.greedy else self.evaluation.samples
        if self.swapped and not self.evaluation.swapped:
            self.repeats = 0
        # sampled episodes have their own temperature, and an ensemble has no meaning for them
        if not self.greedy:
            self.acting = replace(self.acting, temperature=self.evaluation.temperature, ensemble=0.0)

    @property
    def batch_size(self) -> int:
        """Number of episodes that run at the same time."""
        largest = self.evaluation.batch_tasks
        return min(self.sim.capacity or largest, largest)

    def run(self, batch: Sequence[Trial[EpisodeSpec]], start: int) -> list[Row]:
        """Run some episodes to their ends."""
        episodes = run_episodes(
            self.policy,
            self.sim,
            [trial.task for trial in batch],
            self.acting,
            # by episode and repeat, so that a resumed evaluation draws the same numbers
            [self.seed_of(*trial.key) for trial in batch],
            greedy=self.greedy,
            images_of=[self.others[trial.task] for trial in batch] if self.swapped else (),
            delay=self.evaluation.delay,
        )
        return [_row(trial, episodes, row) for row, trial in enumerate(batch)]

    def metrics(self, rows: Sequence[Row], tasks: Sequence[EpisodeSpec]) -> dict[str, float]:
        """Success overall and of each task, and the counts."""
        finished = [row for row in rows if not row["failed"]]
        metrics = self.success_rates(rows, "task")
        steps = [row["steps"] for row in finished if row["success"]]
        metrics[f"episode/steps_to_success/{self.protocol}"] = mean_or_nan(steps)
        # a sum of potentials says nothing
        if finished and not getattr(self.sim, "potential_rewards", False) and finished[0]["return"] is not None:
            metrics[f"episode/return/{self.protocol}"] = mean_or_nan([row["return"] for row in finished])
        if compared := [row for row in finished if "true_success" in row]:
            parts = [[bool(row[name]) for row in compared] for name in ("success", "true_success")]
            counts = judged_counts(*parts)
            metrics |= {f"judged/{name}/{self.protocol}": counts[name] / len(compared) for name in JUDGED}
        metrics |= {f"episode/{place}/{self.protocol}": jump for place, jump in self._jumps(rows).items()}
        return metrics | {f"episode/failed/{self.protocol}": float(len(rows) - len(finished))}

    def record(self, row: Row) -> SampleRecord:
        """An episode with its first, middle and last frame."""
        from PIL import Image

        frames: Any = row.get("frames")
        shown = [] if frames is None else sorted({0, len(frames) // 2, len(frames) - 1})
        return SampleRecord(
            id=episode_id(episode_of(row)),
            prompt=row["instruction"],
            response=f"{row['steps']} control steps",
            outputs=[Image.fromarray(frames[index]) for index in shown],
            reward=float(row["success"]),
            finish=row["reason"] or row["ending"],
            correct=row["success"],
        )

    def outcome(self, row: Row) -> Outcome | None:
        """Whether an episode succeeded; None if its environment failed."""
        if row["failed"]:
            return None
        spec = episode_of(row)
        return Outcome(episode_id(spec), {f"success/{self.protocol}": float(row["success"])}, {"task": row["task"]})

    def about(self) -> Row:
        """The simulator, its limits and how actions are chosen."""
        # the same protocol on another machine has to compare as equal
        described = {name: value for name, value in self.sim.describe().items() if name not in MACHINE}
        names = (described.get(name) for name in ("suite", "environment", "simulator"))
        versions = described.get("versions") or {name: described[name] for name in ("mujoco",) if name in described}
        acting = self.acting
        return {
            "suite": next(filter(None, names), None),
            "version": ", ".join(f"{name} {value}" for name, value in versions.items()),
            "horizon": self.sim.horizon,
            "replan": acting.n_action_steps or self.policy.chunk,
            "decodings": {self.protocol: 1},
            "bootstrap": self.seed,
            "temperature": acting.temperature,
            "ensemble": acting.ensemble,
            **({"delay": asdict(self.evaluation.delay)} if self.evaluation.delay.active else {}),
            "precision": self.conditions.get("precision"),
            "code": self.conditions.get("code"),
            "simulator": described,
        }

    def state_of(self, row: Row) -> str:
        """The initial state with its draw of the domain randomisation."""
        spec = episode_of(row)
        return episode_id(spec) + (f"/draw {spec.draw}" if spec.draw else "")

    def columns(self, row: Row) -> Row:
        """Task, seed, return, control steps, ending and a digest of the actions."""
        return {
            "task": row["task"],
            "seed": self.seed_of(row["index"], row["repeat"]),
            "return": row["return"],
            "length": row["steps"],
            "ending": row["reason"] or row["ending"],
            "output": short_digest(json.dumps(row["actions"]).encode()),
            "parts": {"task": row["task"]},
            "scores": {},
        }

    def saved_rows(self, tasks: Sequence[EpisodeSpec], processes: int) -> ResumableRows:
        """The episodes file of these weights, settings and initial states."""
        policy, acting = self.policy, self.acting
        scale, bounds = action_scale(policy, acting), policy.action_range
        conditions = {
            "protocol": self.protocol,
            "repeats": self.repeats,
            # stored rows are only reused if all of these are equal: anything else would mix two experiments
            "initial_states": short_digest(json.dumps([asdict(task) for task in tasks]).encode()),
            "seed": self.seed,
            "batch": self.batch_size,
            "processes": processes,
            "chunk": policy.chunk,
            "n_action_steps": acting.n_action_steps or policy.chunk,
            "temperature": acting.temperature,
            "ensemble": acting.ensemble,
            **({"delay": asdict(self.evaluation.delay)} if self.evaluation.delay.active else {}),
            "scale": acting.scale if scale is None else scale.as_dict(),
            "weights": weights_digest(policy)[:16],
            **({"past": policy.past if keeps_past(self.sim) else 0} if policy.past else {}),
            **({} if bounds is None else {"action_range": bounds.as_dict()}),
            **self.conditions,
            "device": next(policy.parameters(), torch.zeros(0)).device.type,
            "torch": torch.__version__,
            "simulator": dict(self.sim.describe()),
        }
        return ResumableRows(self.run_dir / "episodes", f"{self.split}-{self.protocol}", conditions, {"frames"})

    def finish(self, rows: Sequence[Row], saved: ResumableRows | None) -> None:
        """Write the videos and log the table of successes."""
        if self.videos is not None:
            self.videos.write(rows)
        shown: dict[str, Any] = {}
        if saved is not None:
            names = ("seed", "chunk", "n_action_steps", "weights")
            shown = {**{name: saved.conditions[name] for name in names}, **saved.conditions["simulator"]}
        delay = self.evaluation.delay
        shown |= {"delay": delay.steps, "mode": delay.mode} if delay.active else {}
        about = ", ".join(f"{name} {value}" for name, value in shown.items() if not isinstance(value, dict))
        LOGGER.info(
            "%s, %s (%s):\n%s",
            self.split,
            self.protocol,
            about,
            success_table(rows, bootstrap=None if self.greedy else self.seed),
        )
        jumps = self._jumps(rows) if self.evaluation.delay.active else {}
        if jumps:
            LOGGER.info(
                "actions change by %.3f from one control step to the next at seams, by %.3f inside of chunks",
                *(jumps[name] for name in ("jump_at_seams", "jump_inside")),
            )

    def _jumps(self, rows: Sequence[Row]) -> dict[str, float]:
        """Mean changes of executed actions at the seams of chunks and inside; empty if each action is a new chunk."""
        taken = self.acting.n_action_steps or self.policy.chunk
        if self.acting.ensemble or taken < 2:
            return {}
        actions = [row["actions"] for row in rows if not row["failed"]]
        seams, inside = action_jumps(actions, taken, self.evaluation.delay.steps)
        return {"jump_at_seams": mean_or_nan(seams.tolist()), "jump_inside": mean_or_nan(inside.tolist())}


def success_table(
    rows: Sequence[Row],
    kind_of: Callable[[Row], str] = lambda row: row["task"],
    ending_of: Callable[[Row], str] = lambda row: row["reason"] or row["ending"],
    total: str = "all tasks",
    bootstrap: int | None = None,
) -> str:
    """Successes of each kind of episode and overall, with the intervals of the metrics and how the failures ended."""
    kinds = list(dict.fromkeys(map(kind_of, rows)))
    width = max(map(len, [*kinds, total]))
    lines = [f"{'task':<{width}}  success  95% interval    failures"]
    for kind in [*kinds, None]:
        own = [row for row in rows if kind in (None, kind_of(row))]
        finished = [row for row in own if not row["failed"]]
        done = sum(row["success"] for row in finished)
        rng = None if bootstrap is None else np.random.default_rng(bootstrap)
        # repeats of one initial state are not independent, so intervals are over states
        states: dict[int, list[float]] = {}
        for number, row in enumerate(finished):
            states.setdefault(row.get("index", number), []).append(float(row["success"]))
        low, high = list(with_interval("success/", list(states.values()), rng).values())[1:]
        share = done / len(finished) if finished else float("nan")
        reasons = Counter(ending_of(row) for row in own if not row["success"] or row["failed"])
        ends = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        label = total if kind is None else kind
        lines.append(f"{label:<{width}}  {done:>3}/{len(finished):<3} {share:5.3f}  [{low:.3f}, {high:.3f}]  {ends}")
    return "\n".join(lines)


def _row(trial: Trial[EpisodeSpec], episodes: Episodes, row: int) -> Row:
    payload, task = episodes.payload, trial.task
    failed, success = bool(payload.failed[row]), bool(payload.success[row])
    drawn = payload.drawn[row] if payload.drawn else None
    ending = "terminated" if bool(payload.terminated[row]) else "horizon"
    return {
        **({} if task.draw == 0 else {"draw": task.draw}),
        **({"randomization": dict(drawn)} if drawn else {}),
        **({} if payload.true_success is None else {"true_success": bool(payload.true_success[row])}),
        "index": trial.index,
        "repeat": trial.repeat,
        "task": task.task,
        "instruction": task.instruction,
        "split": task.split,
        "layout": task.layout,
        "success": success,
        "failed": failed,
        "ending": "failed" if failed else "success" if success else ending,
        "reason": payload.reasons[row] if payload.reasons else "",
        "steps": int(payload.lengths[row]),
        "return": None if payload.chunk_returns is None else float(payload.returns[row]),
        # the shortest text that reads back as the same float32, so that a replay ends the same way
        "actions": [[float(str(entry)) for entry in action] for action in episodes.actions[row]],
        "frames": payload.frames_of(row),
    }
