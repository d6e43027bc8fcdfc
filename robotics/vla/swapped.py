"""Images of another episode, to measure what a policy does without looking.

A policy may gain success by a motion that works from most initial states. Shown the first images of another initial
state throughout, it loses the success that it owes to looking; the rest does not depend on the images.
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
    """Assign each episode another layout of its task, the one half the number of layouts further."""
    by_task: dict[str, list[EpisodeSpec]] = {}
    for episode in dict.fromkeys(episodes):
        by_task.setdefault(episode.task, []).append(episode)
    swapped: dict[EpisodeSpec, EpisodeSpec] = {}
    for task, own in by_task.items():
        layouts = list(dict.fromkeys(episode.layout for episode in own))
        if len(layouts) < 2:
            raise UserError(f"evaluation.swapped needs two initial states of each task; {task} has {len(layouts)}")
        half = len(layouts) // 2
        other = {layout: layouts[(index + half) % len(layouts)] for index, layout in enumerate(layouts)}
        swapped |= {episode: replace(episode, layout=other[episode.layout]) for episode in own}
    return swapped


class FirstImages:
    """First images of some episodes, shown in place of those of the episodes in the same rows."""

    def __init__(self, sim: RobotSim, episodes: Sequence[EpisodeSpec]) -> None:
        started = sim.reset(episodes)
        images, views = started.observation.images, started.observation.views
        if images is None:
            raise UserError("evaluation.swapped needs images, which the simulator does not render; set sim.image_size")
        if started.failed.any():
            row = int(started.failed.argmax())
            why = started.reasons.get(row, "no reason given")
            raise RunError(f"the environment whose images were to be shown did not start: {episodes[row]}: {why}")
        self._images, self._views = images.copy(), None if views is None else views.copy()

    def replace_in(self, observation: RobotObservation) -> RobotObservation:
        """The observation of some rows with these images, in its past too."""
        images, views = (None if part is None else part[observation.rows] for part in (self._images, self._views))
        found = replace(observation, images=images, views=views)
        if observation.past_state is None:
            return found
        steps = observation.past_state.shape[1]
        past = [None if part is None else np.repeat(part[:, None], steps, 1) for part in (images, views)]
        return replace(found, past_images=past[0], past_views=past[1])
