"""Results of `ImageRollout`: observations of scenes, and the outcome of a chunk of actions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Look:
    """One scene after a control step, delayed where its variant has an observation delay."""

    measured: NDArray[np.float64]  # (nsensordata,)
    frame: NDArray[np.uint8] | None  # (H, W, 3) RGB
    views: NDArray[np.uint8] | None  # (V, H, W, 3) RGB of the further cameras


@dataclass(frozen=True)
class SceneObservation:
    """Observation of R scenes; the arrays belong to the caller."""

    scenes: NDArray[np.int64]  # (R,) number of the scene in each row, ascending
    qpos: NDArray[np.float64]  # (R, nq)
    qvel: NDArray[np.float64]  # (R, nv)
    sensordata: NDArray[np.float64]  # (R, nsensordata) of this state
    measured: NDArray[np.float64]  # (R, nsensordata) sensor values with the scene's observation delay
    frames: NDArray[np.uint8] | None  # (R, H, W, 3) RGB, delayed as `measured`; None without images
    views: NDArray[np.uint8] | None = None  # (R, V, H, W, 3) RGB of the further cameras, delayed too
    earlier: list[list[Look]] = field(default_factory=list)
    """R lists with the last control steps of the chunk, at most the past's, the oldest first; empty where the episode
    has ended. No lists without a past, and none at the beginning of an episode."""

    def of(self, scenes: ArrayLike) -> SceneObservation:
        """Rows of some scenes (ascending numbers) without `earlier`; shares memory where it is all of them."""
        wanted = np.asarray(scenes, np.int64)
        if np.array_equal(wanted, self.scenes):
            return self
        rows = np.searchsorted(self.scenes, wanted)
        frames, views = (None if part is None else part[rows] for part in (self.frames, self.views))
        numbers = (self.qpos[rows], self.qvel[rows], self.sensordata[rows], self.measured[rows])
        return SceneObservation(wanted, *numbers, frames, views)


@dataclass(frozen=True)
class Chunk:
    """Outcome of a chunk of K actions in each of L scenes; control steps after the end of an episode do not count."""

    scenes: NDArray[np.int64]  # (L,) number of the scene in each row, ascending
    rewards: NDArray[np.float64]  # (L, K); 0 after the end, NaN throughout where the scene failed
    dones: NDArray[np.bool_]  # (L, K); True at the control step that ended the episode
    steps: NDArray[np.int64]  # (L,) control steps that count; 0 where the scene failed
    truncated: NDArray[np.bool_]  # (L,) whether the horizon was reached without the task's end
    failed: NDArray[np.bool_]  # (L,) whether MuJoCo warned, which is no failure of the policy
    observation: SceneObservation  # at the end of the chunk or of the episode; a row for every scene
    recorded: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # (steps, H, W, 3) by recorded scene


@dataclass(frozen=True)
class SceneSteps:
    """K control steps of one scene."""

    actions: NDArray[np.float64]  # (K, nu) controls
    qpos: NDArray[np.float64]  # (K, nq) positions after each control step
    qvel: NDArray[np.float64]  # (K, nv) velocities after each control step
    sensordata: NDArray[np.float64]  # (K, nsensordata) sensor values after each control step
