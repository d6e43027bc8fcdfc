"""Watched episodes as a LeRobotDataset that grows, also over interruptions.

Each control step has its owner under both names that LeRobot uses: `intervention` (bool, of `lerobot-rollout` with the
strategy dagger) and `complementary_info.is_intervention` (float32, which the replay buffer of HIL-SERL reads). That
buffer also needs `next.reward` and `next.done`. `action` is the executed one, whoever chose it. A
simulator's full state is `observation.environment_state`, for critics that read more than the policy.

`meta/interventions.jsonl` has a line for each attempt, also for those whose environment failed. An unfinished episode
of a live session is in `meta/unfinished.jsonl`: its control steps are executed again when the session continues.

Source: huggingface/lerobot, src/lerobot/rollout/strategies/dagger.py, src/lerobot/rl/buffer.py,
src/lerobot/rl/gym_manipulator.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.files import read_json_object
from mmrl.runs.records import JsonLines, read_jsonl
from robotics.data import EpisodeWriter
from robotics.data.features import FULL_STATE, REWARD
from robotics.data.layout import INFO_PATH
from robotics.episodes.dataset_fit import recorded_features
from robotics.episodes.recording import FPS
from robotics.interventions.overseers import Verdict
from robotics.interventions.watched import WatchedEpisode
from robotics.sim.interface import interface_of

if TYPE_CHECKING:
    from robotics.episodes.pacing import ControlRate
    from robotics.sim.episodes import RobotSim

LOGGER = logging.getLogger("mmrl")
INTERVENTION, IS_INTERVENTION = "intervention", "complementary_info.is_intervention"
DONE = "next.done"
FEATURES: dict[str, dict[str, Any]] = {
    INTERVENTION: {"dtype": "bool", "shape": [1], "names": None},
    IS_INTERVENTION: {"dtype": "float32", "shape": [1], "names": ["is_intervention"]},
    REWARD: {"dtype": "float32", "shape": [1], "names": None},
    DONE: {"dtype": "bool", "shape": [1], "names": None},
}
"""Features of a control step in addition to state, action and images."""
LINES_PATH, JOURNAL_PATH = "meta/interventions.jsonl", "meta/unfinished.jsonl"


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    """Lines of the attempts so far, by number; those whose episode is in the dataset, or that have none.

    An attempt has `episode_index` (None if its environment failed), `task`, `split`, `layout`, `steps`,
    `person_steps`, `starts`, `success`, and in a live session `hz`, `jitter_ms`, `longest_ms`, `late` and `weights`.

    Raises:
        UserError: the dataset has episodes that no line names.
    """
    if not (folder / INFO_PATH).is_file():
        return []
    count = int(read_json_object(folder / INFO_PATH)["total_episodes"])
    # a line is written before its episode, so the last ones may name an episode that was not finished
    known = read_jsonl(folder / LINES_PATH)
    lines = [line for line in known if line["episode_index"] is None or line["episode_index"] < count]
    named = sum(line["episode_index"] is not None for line in lines)
    if named != count:
        raise UserError(
            f"{folder} has {count} episodes, but {LINES_PATH} names {named} of them: it was not recorded by "
            "`mmrl robot intervene` or robot_hg_dagger, or the file was changed; set another interventions.path"
        )
    return lines


class InterventionRecord(AbstractContextManager["InterventionRecord"]):
    """Writes watched episodes to a folder, after those that it has.

    Args:
        folder: of the dataset, made when missing.
        sim: the simulator, which names states, actions and the control rate.
        cameras: names of the policy's camera and the additional ones; empty = no images.
        episodes: number in a round, endless by default; a round that fails in all of them is forgotten and run again.

    Raises:
        UserError: the folder has a dataset with other features or another rate, or another program writes to it.
    """

    def __init__(self, folder: Path, sim: RobotSim, cameras: Sequence[str] = (), episodes: int = 1 << 30) -> None:
        self.folder, self._cameras, self._sim, self._round = folder, list(cameras), sim, episodes
        sizes = {} if sim.image_size is None else dict.fromkeys(cameras, sim.image_size)
        features = recorded_features(sim, sizes) | FEATURES
        full_size = getattr(sim, "full_state_size", 0)
        features |= {FULL_STATE: {"dtype": "float32", "shape": [full_size], "names": None}} if full_size else {}
        about = sim.describe()
        robot = str(about.get("arm") or about.get("environment") or about.get("simulator") or "robot")
        self._writer = EpisodeWriter(folder, interface_of(sim).control_hz or FPS, features, robot)
        self._lines, self._journal = JsonLines(folder / LINES_PATH), JsonLines(folder / JOURNAL_PATH)
        try:
            self.attempts: list[dict[str, Any]] = read_attempts(folder)
            """Lines of the attempts so far."""
            self._lines.drop(lambda line: line not in self.attempts)
            self.unfinished: list[Verdict] = self._read_journal()
            """Control steps of the next attempt that an interrupted session has executed."""
        except BaseException:
            self.close()
            raise

    def note(self, step: Verdict) -> None:
        """Add a control step of one row to the journal of the attempt that runs."""
        if not self._journal.path.exists():
            self._journal.append({"attempt": len(self.attempts)})
        line = {"actions": step.actions.tolist(), "acts": step.acts.tolist(), "presses": list(step.presses)}
        self._journal.append(line)

    def add(self, episode: WatchedEpisode, rate: ControlRate | None = None, weights: int | None = None) -> None:
        """Add a finished attempt; one without control steps, or whose environment failed, only gets a line.

        Raises RunError if that is the whole round.

        Args:
            episode: the attempt.
            rate: of its control steps on the wall clock.
            weights: trainer step of the policy's weights.
        """
        kept = bool(len(episode)) and not episode.failed
        line = {
            **episode.counts(),
            "attempt": len(self.attempts),
            "episode_index": self._writer.episodes if kept else None,
            "task": episode.episode.task,
            "split": episode.episode.split,
            "layout": episode.episode.layout,
            "reason": episode.reason,
            "weights": weights,
            **({} if rate is None else asdict(rate)),
        }
        first = len(self.attempts) // self._round * self._round
        lost = not kept and all(one["episode_index"] is None for one in self.attempts[first:])
        if lost and len(self.attempts) + 1 == first + self._round:
            # before the learner reads it: a robot that was unplugged must not use up the run
            self._lines.drop(lambda one: one["attempt"] >= first)
            text = f"all {self._round} watched episodes of a round failed: {episode.reason}"
            raise RunError(f"{text}; they are not counted, and begin again when the run continues")
        self.attempts.append(line)
        self._lines.append(line)
        if kept:
            self._write(episode)
        self.forget()

    def forget(self) -> None:
        """Discard the journal of the attempt that runs."""
        self.unfinished = []
        self._journal.close()
        self._journal.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Join the files of the dataset, for lerobot's reader; an unfinished attempt stays in its journal."""
        self._lines.close()
        self._journal.close()
        self._writer.finish()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, episode: WatchedEpisode) -> None:
        person = np.array(episode.by_person)[:, None]
        extra = {
            INTERVENTION: person,
            IS_INTERVENTION: person.astype(np.float32),
            DONE: np.arange(len(episode))[:, None] == len(episode) - 1,
        }
        extra |= episode.columns_of(self._writer.features)
        images = episode.images_of(self._cameras) if self._cameras else {}
        states = np.stack(episode.states) if self._sim.state_size else None
        # the same text as in demonstrations and for the policy, which may be empty
        task = episode.episode.instruction
        self._writer.add_episode(states, np.stack(episode.actions), images, task, episode.success, extra)

    def _read_journal(self) -> list[Verdict]:
        head, *steps = read_jsonl(self._journal.path) or [{}]
        if head.get("attempt") != len(self.attempts):
            # of an attempt that was finished right before the interruption
            self.forget()
            return []
        if steps:
            LOGGER.info(
                "attempt %d was interrupted after %d control steps, which are executed again",
                *(len(self.attempts), len(steps)),
            )
        return [
            Verdict(np.array(line["actions"], np.float32), np.array(line["acts"]), tuple(line["presses"]))
            for line in steps
        ]
