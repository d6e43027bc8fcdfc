"""Videos of an evaluation: its first failures and successes, made by replaying their recorded actions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import RunError
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.opening import SimConfig, open_sim
from robotics.vla.collect import replay_episode
from robotics.vla.tasks import episode_id

__all__ = ["ReplayVideos"]

LOGGER = logging.getLogger("mmrl")


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
    """Side in pixels, rendered by a simulator opened for it; 0 = the images of `sim`."""
    chunk: int = 8
    """Control steps that the simulator is given at once."""

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replay episodes and write their frames.

        Args:
            rows: of an evaluation, see `robotics.vla.evaluation`.
        """
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
        if not self.size or (self.size, self.size) == self.sim.image_size:
            yield self.sim
            return
        sim = open_sim(replace(self.config, image_size=self.size, workers=1))
        try:
            yield sim
        finally:
            sim.close()

    def _write_one(self, sim: RobotSim, row: dict[str, Any]) -> None:
        from mmrl.hub.video import write_mp4

        episode = EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"])
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
        write_mp4(self.folder / name, frames, self.fps)
