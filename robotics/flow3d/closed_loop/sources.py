"""Flow that a scene itself knows, and flow that is disturbed on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.scenes.demonstrator import Demonstrator

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from robotics.flow3d.clip import Observation
    from robotics.flow3d.given import FlowModel
    from robotics.flow3d.scenes.scene import FlowScene


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


class StillPoints:
    """A model some of whose points stay where they are, as points on the background in a box around an object do."""

    def __init__(self, model: FlowModel, share: float) -> None:
        self._model, self._share = model, share
        self.encoding = getattr(model, "encoding", None)
        """That of the model, where it has one."""

    def predict(
        self, observation: Observation, points: NDArray[np.float64], samples: int = 1, seed: int = 0
    ) -> NDArray[np.float64]:
        """The model's flow with still points, which count as visible; see `robotics.flow3d.given.FlowModel`."""
        flow = np.array(self._model.predict(observation, points, samples, seed), dtype=np.float64)
        count = points.shape[0] * points.shape[1]
        chosen = np.random.default_rng([seed, 5]).choice(count, round(self._share * count), replace=False)
        rows, columns = np.unravel_index(chosen, points.shape[:2])
        flow[:, :, rows, columns, :VISIBLE], flow[:, :, rows, columns, VISIBLE] = points[rows, columns], 1.0
        return flow
