"""Videos of an evaluation: its first failures and successes, made by replaying their recorded actions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.films import Caption, write_caption
from robotics.sim.opening import SimConfig, open_film_sim
from robotics.vla.collect import replay_episode
from robotics.vla.tasks import episode_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.presentation import Outcome

LOGGER = logging.getLogger("mmrl")


def episode_of(row: Mapping[str, Any]) -> EpisodeSpec:
    """The episode that a row of an evaluation is about."""
    return EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"], row.get("draw", 0))


@dataclass
class ReplayVideos:
    """Writes `<folder>/<label>-<success or failure>-<task>-<layout>.mp4`."""

    sim: RobotSim
    """The run's simulator."""
    config: SimConfig
    """What `sim` was opened with."""
    folder: Path
    label: str
    """Beginning of the names, such as step-000010-held_out."""
    count: int
    """Videos of failures, and as many of successes."""
    fps: int
    size: int = 0
    """Height in pixels, rendered by a simulator opened for it, with the look for people where it has one; 0 = the
    images of `sim`."""
    chunk: int = 8
    """Control steps that the simulator is given at once."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replay episodes and write their frames."""
        chosen = self._choose(rows)
        if not chosen or (self.sim.image_size is None and not self.size):
            return
        with self._open() as sim:
            for row in chosen:
                self._write_one(sim, row)

    def _choose(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        tried = [row for row in rows if not row["failed"] and row["actions"]]
        return [row for success in (True, False) for row in [r for r in tried if r["success"] is success][: self.count]]

    @contextmanager
    def _open(self) -> Iterator[RobotSim]:
        """The run's own simulator, or one like it with other images."""
        if not self.size:
            yield self.sim
            return
        sim = open_film_sim(self.config, self.size)
        try:
            yield sim
        finally:
            sim.close()

    def _write_one(self, sim: RobotSim, row: dict[str, Any]) -> None:
        from mmrl.hub.video import write_mp4

        episode = episode_of(row)
        try:
            frames, success = replay_episode(sim, episode, np.asarray(row["actions"], np.float32), self.chunk)
        except RunError as error:
            LOGGER.warning("there is no video of %s: %s", episode_id(episode), error)
            return
        if success != row["success"]:
            LOGGER.warning("the replay of %s ended differently", episode_id(episode))
        if not len(frames):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        ending = "success" if row["success"] else "failure"
        name = f"{self.label}-{ending}-{row['task'].replace('/', '.')}-{row['layout']}.mp4"
        about = sim.describe()
        shown = _film(frames, row, about["control_hz"], self.fps) if about.get("look") == "film" else frames
        write_mp4(self.folder / name, shown, self.fps)


def _film(frames: NDArray[np.uint8], row: dict[str, Any], control_hz: float, fps: int) -> Iterator[NDArray[np.uint8]]:
    """Frames with captions; the last one, which says how the episode ended, stays for a second."""
    for step, frame in enumerate(frames):
        ended = step == len(frames) - 1
        outcome: Outcome = "" if not ended else "success" if row["success"] else "failure"
        captioned = write_caption(frame, Caption(row["instruction"], step / control_hz, outcome))
        yield from [captioned] * (fps if ended else 1)
