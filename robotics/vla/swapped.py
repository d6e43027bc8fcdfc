"""Pictures of the wrong episode: what a policy does without looking.

A policy may gain success by a motion that works from most initial states. Shown the first pictures of another initial
state throughout, its success falls by what it owes to looking; success that stays is not owed to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mmrl.errors import RunError, UserError
from robotics.sim.episodes import EpisodeSpec

if TYPE_CHECKING:
    from robotics.sim.episodes import RobotObservation, RobotSim


def swap_layouts(episodes: Sequence[EpisodeSpec]) -> dict[EpisodeSpec, EpisodeSpec]:
    """Assign to each of some episodes another layout of its task, the one half the way round."""
    by_task: dict[str, list[EpisodeSpec]] = {}
    for episode in dict.fromkeys(episodes):
        by_task.setdefault(episode.task, []).append(episode)
    found: dict[EpisodeSpec, EpisodeSpec] = {}
    for task, own in by_task.items():
        layouts = list(dict.fromkeys(episode.layout for episode in own))
        if len(layouts) < 2:
            raise UserError(f"evaluation.swapped needs two initial states of each task; {task} has {len(layouts)}")
        half = len(layouts) // 2
        other = {layout: layouts[(place + half) % len(layouts)] for place, layout in enumerate(layouts)}
        found |= {episode: replace(episode, layout=other[episode.layout]) for episode in own}
    return found


class FirstPictures:
    """First pictures of some episodes, to be shown instead of those of the episodes in the same rows."""

    def __init__(self, sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> None:
        begun = sim.reset(episodes)
        if begun.observation.images is None:
            raise UserError("evaluation.swapped needs images, which the simulator does not render; set sim.image_size")
        if begun.failed.any():
            row = int(begun.failed.argmax())
            why = begun.reasons.get(row, "no reason given")
            raise RunError(f"the environment whose pictures were to be shown did not start: {episodes[row]}: {why}")
        self._images, self._views = begun.observation.images.copy(), begun.observation.views
        self._views = None if self._views is None else self._views.copy()

    def instead(self, observation: RobotObservation) -> RobotObservation:
        """The observation of some rows with these pictures, in its past too."""
        images, views = (None if part is None else part[observation.rows] for part in (self._images, self._views))
        found = replace(observation, images=images, views=views)
        if observation.past_state is None:
            return found
        steps = observation.past_state.shape[1]
        past = [None if part is None else np.repeat(part[:, None], steps, 1) for part in (images, views)]
        return replace(found, past_images=past[0], past_views=past[1])
