"""Episodes whose frames are labelled as showing the solved task or not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.files import expanded
from mmrl.hub.building import BuiltPath, build_if_missing
from robotics.data import EpisodeData, LeRobotReader


@dataclass
class LabelledEpisodesConfig(BuiltPath):
    """Successful and failed episodes in the LeRobotDataset v3 format."""

    path: str = ""
    """Folder of the dataset."""
    camera: str = "front"
    """Camera to look at."""
    label: str = ""
    """Column that is above 0.5 in frames that show success, such as next.reward. A column whose name begins with
    `next.` describes the frame after its own."""
    positive_frames: int = bounded(0, at_least=0)
    """Without a `label`: the last so many frames of a successful episode show success, and all others do not. A dataset
    has no frame after the last action, so set this only if episodes were recorded for a while after success."""

    def validate(self) -> None:
        """Check that it is known which frames are positive; raises ValueError."""
        if self.path and bool(self.label) == bool(self.positive_frames):
            raise ValueError(
                f"label is '{self.label}' and positive_frames is {self.positive_frames} for {self.path}; set one of "
                "them, since a dataset does not say by itself which frames show success"
            )


@dataclass(frozen=True)
class LabelledEpisode:
    """One episode of T frames."""

    name: str
    """Dataset and number of the episode."""
    images: NDArray[np.uint8]
    """(T, H, W, 3)."""
    labels: NDArray[np.bool_]
    """(T,) whether a frame shows success."""
    instruction: str


def read_episodes(config: LabelledEpisodesConfig, where: str) -> list[LabelledEpisode]:
    """Read labelled episodes; a missing folder is built first if there is a builder.

    Raises:
        UserError: no such dataset, camera or label, or an episode that does not say whether it succeeded.
    """
    build_if_missing(config, where)
    reader = LeRobotReader(expanded(config.path))
    if config.camera not in reader.cameras:
        raise UserError(
            f"{where}.camera is '{config.camera}', but {config.path} has {', '.join(reader.cameras) or 'no cameras'}"
        )
    found = []
    for episode in reader:
        labels = _labels(config, episode, where)
        name = f"{reader.folder.name}-{episode.number}"
        found.append(LabelledEpisode(name, episode.images[config.camera], labels, episode.task))
    return found


def _labels(config: LabelledEpisodesConfig, episode: EpisodeData, where: str) -> NDArray[np.bool_]:
    """(T,) whether a frame shows success."""
    if not config.label:
        if episode.success is None:
            raise UserError(
                f"{where}.path: {config.path} does not store whether its episodes succeeded; set {where}.label"
            )
        return episode.success & (np.arange(len(episode)) >= len(episode) - config.positive_frames)
    if config.label not in episode.extra:
        raise UserError(
            f"{where}.label is '{config.label}', but {config.path} has {', '.join(episode.extra) or 'none'}"
        )
    values = np.asarray(episode.extra[config.label], np.float32).reshape(len(episode)) > 0.5
    # an observation comes before its action, the `next.` columns after it
    return np.append(False, values[:-1]) if config.label.startswith("next.") else values
