"""What a task scores: the control steps of one scene."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class SceneSteps:
    """K control steps of one scene."""

    actions: NDArray[np.float64]
    """(K, nu) controls."""
    qpos: NDArray[np.float64]
    """(K, nq) positions after each control step."""
    qvel: NDArray[np.float64]
    """(K, nv) velocities after each control step."""
    sensordata: NDArray[np.float64]
    """(K, nsensordata) sensor values; as `mj_step` leaves them, those at the start of the last physics step."""
