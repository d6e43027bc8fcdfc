"""Flow that a scene itself knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.scenes.demonstrator import Demonstrator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation
    from robotics.flow3d.scenes.scene import FlowScene

__all__ = ["TrueFlow"]


class TrueFlow:
    """What the scripted motion of a scene's task does to points: an upper bound for every model.

    Args:
        scene: whose episode is asked for.
        num_frames: T.
    """

    def __init__(self, scene: FlowScene, num_frames: int = 8) -> None:
        self._demonstrator, self._frames = Demonstrator(scene), num_frames

    def predict(
        self, observation: Observation, points: NDArray[np.float64], samples: int = 1, seed: int = 0
    ) -> NDArray[np.float64]:
        """The true flow, as often as asked; see `robotics.flow3d.given.FlowModel`."""
        flow = self._demonstrator.flow_of(points, self._frames)
        return np.repeat(flow[None], samples, axis=0)
