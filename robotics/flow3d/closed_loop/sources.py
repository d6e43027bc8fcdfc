"""Sources of flow: the scene's own, and disturbed flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from robotics.flow3d.clip import VISIBLE
from robotics.flow3d.geometry import FloatArray
from robotics.flow3d.scenes.demonstrator import Demonstrator

if TYPE_CHECKING:
    from robotics.flow3d.clip import Observation
    from robotics.flow3d.given import FlowModel
    from robotics.flow3d.scenes.scene import FlowScene


class TrueFlow:
    """Flow of the scripted motion that does a scene's task: an upper bound for every model.

    Args:
        scene: the scene of the episode.
        num_frames: T.
    """

    def __init__(self, scene: FlowScene, num_frames: int = 8) -> None:
        self._demonstrator, self._frames = Demonstrator(scene), num_frames

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """The true flow, repeated; see `FlowModel`."""
        flow = self._demonstrator.flow_of(points, self._frames)
        return np.repeat(flow[None], samples, axis=0)


class StillPoints:
    """A model with a share of its points standing still, as points on the background would."""

    def __init__(self, model: FlowModel, share: float) -> None:
        self._model, self._share = model, share
        self.encoding = getattr(model, "encoding", None)

    def predict(self, observation: Observation, points: FloatArray, samples: int = 1, seed: int = 0) -> FloatArray:
        """The model's flow with still points, which count as visible; see `FlowModel`."""
        flow = np.array(self._model.predict(observation, points, samples, seed), dtype=np.float64)
        count = points.shape[0] * points.shape[1]
        chosen = np.random.default_rng([seed, 5]).choice(count, round(self._share * count), replace=False)
        rows, columns = np.unravel_index(chosen, points.shape[:2])
        flow[:, :, rows, columns, :VISIBLE], flow[:, :, rows, columns, VISIBLE] = points[rows, columns], 1.0
        return flow
