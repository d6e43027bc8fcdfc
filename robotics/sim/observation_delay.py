"""A scene as it was some control steps ago, for environments that step one scene."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import mujoco
    from numpy.typing import NDArray


class ObservationDelay:
    """Remembers the last states of an episode and shows the oldest of them."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, steps: int) -> None:
        import mujoco

        self._lib, self._model, self._steps = mujoco, model, steps
        self._state, self._now = int(mujoco.mjtState.mjSTATE_INTEGRATION), data
        self._size = mujoco.mj_stateSize(model, self._state)
        self._past: deque[tuple[NDArray[np.float64], NDArray[np.float64]]] = deque(maxlen=steps + 1)
        self.data: mujoco.MjData = mujoco.MjData(model) if steps else data
        """What is shown; its poses are as old as `mj_setState` leaves them, see `update_poses`."""
        self.note(data)

    @property
    def sensordata(self) -> NDArray[np.float64]:
        """(nsensordata,) sensor values of the moment that is shown."""
        return self._past[0][1] if self._steps else self._now.sensordata

    def note(self, data: mujoco.MjData) -> None:
        """Take the state after another control step."""
        if not self._steps:
            return
        state = np.empty(self._size)
        self._lib.mj_getState(self._model, data, state, self._state)
        self._past.append((state, np.array(data.sensordata)))
        self._lib.mj_setState(self._model, self.data, self._past[0][0], self._state)
