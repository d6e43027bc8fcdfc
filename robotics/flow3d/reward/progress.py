"""A dense reward for following a predicted flow. It only depends on the object, so it is the same for every robot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mmrl.errors import UserError
from robotics.flow3d.geometry import FloatArray

BETA_PER_M = 5.0
"""Penalty per metre between the object and the nearest frame of the flow."""


def flow_distances(points_m: FloatArray, frames_m: FloatArray, visible: FloatArray | None = None) -> FloatArray:
    """(T + 1,) median distances of points (n, 3) from the frames (T + 1, n, 3) of a flow, over visible points."""
    if frames_m.ndim != 3 or frames_m.shape[1:] != points_m.shape:
        raise UserError(f"points {points_m.shape} and frames {frames_m.shape} must be (n, 3) and (T + 1, n, 3)")
    seen = np.ones(len(points_m), np.bool_) if visible is None else np.asarray(visible) > 0.5
    # if nothing is visible, all points count: a median over none would be NaN
    seen = seen if seen.any() else np.ones_like(seen)
    median: FloatArray = np.median(np.linalg.norm(points_m - frames_m, axis=-1)[:, seen], axis=-1)
    return median


def flow_progress_reward(
    points_m: FloatArray,
    frames_m: FloatArray,
    reached: int = 0,
    *,
    visible: FloatArray | None = None,
    success: bool = False,
    beta_per_m: float = BETA_PER_M,
) -> tuple[float, int]:
    """Reward of one step: progress along the flow, less the distance from it.

    Args:
        points_m: (n, 3) points of the object now.
        frames_m: (T + 1, n, 3) the first positions and the flow.
        reached: tau* of the step before; 0 at the start of an episode.
        visible: (n,) whether a point is visible.
        success: whether the task is done now, which is worth 1 more.
        beta_per_m: penalty per metre between the object and the flow.

    Returns:
        r_k = (tau*_k - tau*_{k-1}) / T - beta d(tau*_k) + success, and tau*_k = argmin of d over tau >= tau*_{k-1},
        the first one in case of a tie.
    """
    distances = flow_distances(points_m, frames_m, visible)
    # never backwards, so that progress along a loop cannot be earned twice
    now = reached + int(np.argmin(distances[reached:]))
    return (now - reached) / (len(frames_m) - 1) - beta_per_m * float(distances[now]) + float(success), now


@dataclass
class FlowProgress:
    """The reward over an episode, with the frame reached so far."""

    frames_m: FloatArray
    """(T + 1, n, 3) the first positions and the flow."""
    beta_per_m: float = BETA_PER_M
    """Penalty per metre between the object and the flow."""
    reached: int = field(default=0, init=False)
    """Frame of the flow that has been reached."""

    def step(self, points_m: FloatArray, visible: FloatArray | None = None, success: bool = False) -> float:
        """Reward of the next step; see `flow_progress_reward`."""
        reward, self.reached = flow_progress_reward(
            points_m, self.frames_m, self.reached, visible=visible, success=success, beta_per_m=self.beta_per_m
        )
        return reward
