"""Pictures of the wrong episode: what a policy does without looking.

A policy may gain success by a motion that works from most initial states. Shown the first pictures of another initial
state throughout, its success falls by what it owes to looking; success that stays is not owed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.sim.episodes import EpisodeSpec, RobotObservation

__all__ = ["SwappedPictures"]

Pictures = tuple["NDArray[np.uint8]", "NDArray[np.uint8] | None"]
"""(H, W, 3) image and (V, H, W, 3) views of one episode."""


class SwappedPictures:
    """Shows every episode the first pictures of another layout of its task; the robot's own state stays its own.

    Layouts that were seen in earlier batches count, so a batch may hold a single one unless it is the first.
    """

    def __init__(self) -> None:
        self._first: dict[str, dict[int, Pictures]] = {}
        self._shown: list[Pictures] = []

    def begin(self, episodes: Sequence[EpisodeSpec], observation: RobotObservation) -> None:
        """Note the first pictures of episodes and choose whose they are shown.

        Args:
            episodes: those that begin in rows 0..R-1.
            observation: the first one of all rows.

        Raises:
            UserError: there are no images, or a task has one layout only.
        """
        images, views = observation.images, observation.views
        if images is None:
            raise UserError("evaluation.swapped needs images, which the simulator does not render; set sim.image_size")
        for row, episode in enumerate(episodes):
            seen = self._first.setdefault(episode.task, {})
            seen.setdefault(episode.layout, (images[row].copy(), None if views is None else views[row].copy()))
        self._shown = [self._other(episode) for episode in episodes]

    def __call__(self, observation: RobotObservation) -> RobotObservation:
        """The observation with the pictures of others."""
        chosen = [self._shown[row] for row in observation.rows.tolist()]
        images = np.stack([image for image, _ in chosen])
        views = None if observation.views is None else np.stack([view for _, view in chosen if view is not None])
        return replace(observation, images=images, views=views)

    def _other(self, episode: EpisodeSpec) -> Pictures:
        """The first pictures of the layout half the way round."""
        seen = self._first[episode.task]
        if len(seen) < 2:
            raise UserError(
                f"evaluation.swapped needs at least two initial states of {episode.task} in a batch; there is layout "
                f"{episode.layout} only (evaluation.batch_tasks and the simulator's capacity set the batch)"
            )
        layouts = list(seen)
        return seen[layouts[(layouts.index(episode.layout) + len(layouts) // 2) % len(layouts)]]
