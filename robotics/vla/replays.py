"""Videos of an evaluation: its first failures and successes, made by replaying their recorded actions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import RunError
from robotics.sim.episodes import EpisodeSpec, RobotSim
from robotics.sim.films import Caption, write_caption
from robotics.sim.opening import SimConfig, open_video_sim
from robotics.vla.collect import replay_episode
from robotics.vla.tasks import episode_id

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOGGER = logging.getLogger("mmrl")


def episode_of(row: Mapping[str, Any]) -> EpisodeSpec:
    """The episode of an evaluation's row."""
    return EpisodeSpec(row["task"], row["instruction"], row["layout"], row["split"], row.get("draw", 0))


@dataclass
class ReplayVideos:
    """Writes `<folder>/<label>-<success or failure>-<task>-<layout>.mp4`."""

    sim: RobotSim
    """The run's simulator."""
    config: SimConfig
    """Settings that `sim` was opened with."""
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
