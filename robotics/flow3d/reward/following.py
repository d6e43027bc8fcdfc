"""`reward: flow`: reward an episode by how far its object came along a predicted 3D flow, with any arm.

A world model, or the simulator, predicts where points of the object in the first image should go. While the episode
runs, the same points are tracked (never points of the gripper), and after each chunk of actions

    r_k = (tau_k - tau_{k-1}) / T - beta d(tau_k),    tau_k = argmin d(tau) over tau >= tau_{k-1},
    d(tau) = median over i of |x_i - flow_i(tau)|,

with 1 for success. An episode has the sum; `distance: mean` divides beta by the number of chunks, so that a long
episode is not punished more than a short one for the same error.

Source: `progress_reward` below. Tracked points come from the simulator's own poses, or from a tracker of the
user's; the flow of an initial state is predicted once and kept.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare
from mmrl.rewards.reward_loading import load_function
from mmrl.training.processes import stream_seed
from robotics.episodes.payload import EpisodePayload, episode_id
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import FloatArray, apply_pose, inverse_pose
from robotics.flow3d.reward.tabletop_views import TabletopViews, check_moves_object
from robotics.flow3d.rigid_motion import points_in_mask
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.opening import SimConfig

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


LOGGER = logging.getLogger("mmrl")
DISTANCES = ("mean", "sum")
VIEW_PX = 64
"""Size of the first images if the policy sees none, the default of world models."""


@dataclass
class FlowRewardConfig:
    """The reward for following a flow; used by `reward: flow`."""

    model: str = ""
    """Folder of a world model that predicts the flow; empty = the simulator's true flow (tabletop only)."""
    num_frames: int = rare(bounded(8, at_least=1))
    """T of the true flow; a world model uses its own."""
    grid: int = rare(bounded(4, at_least=1))
    """N, points per side of the true flow; a world model uses its own."""
    beta_per_m: float = rare(bounded(BETA_PER_M, at_least=0))
    """Penalty per metre between the object and the flow."""
    distance: str = rare(choice("mean", DISTANCES))
    """mean: average the distance over the chunks of an episode; sum: add it up."""
    view: str = rare("")
    """module:function that is called as function(episode) with an EpisodeSpec and returns its first `Observation`, with
    depth and the object's mask; empty = the simulator's own (tabletop only)."""
    tracker: str = rare("")
    """module:function that tracks the query points; empty = the simulator's own poses. It is called as function(frames,
    observation, points) with the images (F, H, W, 3) before each chunk and at the end, the first observation, and the
    query points (N, N, 3). It returns the points' positions (F, N * N, 3) in metres in the world frame, NaN if a point
    is not visible."""


@dataclass(frozen=True)
class FlowScores:
    """Rewards of B episodes; NaN without a flow or a track."""

    reward: NDArray[np.float32]
    """(B,) with 1 for success."""
    reached: NDArray[np.float32]
    """(B,) tau / T at the end, 0 to 1."""
    off_m: NDArray[np.float32]
    """(B,) mean distance from the nearest frame of the flow; NaN also for an episode without a chunk."""


class FlowFollowing:
    """Predicts a flow for each initial state, once, and rewards episodes for following it."""

    def __init__(self, config: FlowRewardConfig, sim: SimConfig, tasks: Sequence[str], seed: int) -> None:
        self.config = config
        self.seed = seed
        self.failures: Counter[str] = Counter()
        """Number of initial states without a flow (predictions) and episodes without a track (tracks) so far."""
        self._flows: dict[EpisodeSpec, FlowClip | None] = {}
        self._model: Any = None
        if config.model:
            from robotics.flow3d.model.world_model import FlowWorldModel

            self._model = FlowWorldModel.from_pretrained(config.model).eval()
        self._tracker = _loaded(config.tracker, "flow.tracker")
        if self._tracker is not None and not sim.image_size:
            raise UserError("flow.tracker needs images of the episodes, but sim.image_size is 0")
        # opened only if something comes from the simulator: it loads scenes and a renderer
        self._own: TabletopViews | None = _open_views(sim, tasks) if not config.view or not config.model else None
        view = _loaded(config.view, "flow.view")
        self._view: Callable[[EpisodeSpec], Observation] = view or self._own.observe  # type: ignore[union-attr]

    def score(self, payload: EpisodePayload, groups: Sequence[int]) -> FlowScores:
        """Reward B episodes."""
        found = np.full((3, len(groups)), np.nan, np.float32)
        for row, group in enumerate(groups):
            clip = self.flow_of(payload.episodes[group])
            # the row keeps NaN and is left out of the update
            if clip is None or bool(payload.failed[row]):
                continue
            points = self._tracked(payload, row, clip)
            if points is not None:
                found[:, row] = self._follow(clip, points, bool(payload.success[row]))
        return FlowScores(*found)

    def flow_of(self, episode: EpisodeSpec) -> FlowClip | None:
        """The flow that an initial state should follow, predicted at the first call; None if that failed."""
        # a failure is kept too: trying again in every step would only repeat the warning
        if episode not in self._flows:
            try:
                self._flows[episode] = self._predicted(episode)
            except Exception as error:  # functions of the user and models of all kinds must not stop other episodes
                self._flows[episode] = None
                self._failed("predictions", f"no flow for {episode_id(episode)}", error)
        return self._flows[episode]

    def close(self) -> None:
        """Free the renderers."""
        if self._own is not None:
            self._own.close()

    def _predicted(self, episode: EpisodeSpec) -> FlowClip:
        if self._model is None:
            assert self._own is not None
            return self._own.clip(episode, self.config.num_frames, self.config.grid)
        seen = self._view(episode)
        if seen.mask is None or not seen.mask.any():
            raise UserError("the first observation has no mask of the object")
        points = points_in_mask(seen.mask, seen.depth_m, self._model.encoding.grid)
        # the seed depends on the initial state, so that all of its episodes follow the same flow in every process
        flow = self._model.predict(seen, points, 1, stream_seed(self.seed, "flow", episode_id(episode)) % 2**62)[0]
        clip = FlowClip(seen, points, flow)
        if not np.isfinite(clip.flow_world_m).all() or not np.isfinite(clip.points_world_m).all():
            raise UserError("flow or query points are not finite; the object needs depth in the first image")
        return clip

    def _tracked(self, payload: EpisodePayload, row: int, clip: FlowClip) -> NDArray[np.float64] | None:
        """(F, n, 3) points of the object in the world frame; None if they were lost."""
        if self._tracker is None:
            poses = payload.object_poses[row] if payload.object_poses else None
            if poses is None:
                raise UserError(
                    "reward is flow, but this simulator does not report the object's pose; set flow.tracker"
                )
            # from the first pose: the flow's points were taken in the first image
            return apply_pose(poses @ inverse_pose(poses[0]), clip.points_world_m)
        try:
            points = np.asarray(self._tracker(payload.frames_of(row), clip.observation, clip.points), np.float64)
            return _checked(points, len(clip.points_world_m))
        except Exception as error:  # a function of the user must not stop other episodes
            self._failed("tracks", "flow.tracker", error)
            return None

    def _follow(self, clip: FlowClip, points: NDArray[np.float64], success: bool) -> tuple[float, float, float]:
        frames = np.concatenate([clip.points_world_m[None], clip.flow_world_m])
        chunks = max(len(points) - 1, 1)
        # by the number of chunks, so that the penalty of a long episode is not larger for the same distance
        beta = self.config.beta_per_m / (chunks if self.config.distance == "mean" else 1)
        progress = FlowProgress(frames, beta)
        total, off = float(success), []
        for now in points[1:]:
            seen = np.isfinite(now).all(-1)
            # NaN times weight 0 is NaN, so hidden points need some number
            now = np.where(seen[:, None], now, 0.0)
            total += progress.step(now, seen.astype(np.float64))
            off.append(flow_distances(now, frames, seen.astype(np.float64))[progress.reached])
        return total, progress.reached / (len(frames) - 1), float(np.mean(off)) if off else float("nan")

    def _failed(self, kind: str, what: str, error: Exception) -> None:
        if not self.failures[kind]:
            LOGGER.warning("%s: %s: %s; these episodes are excluded from the update", what, type(error).__name__, error)
        self.failures[kind] += 1


def _checked(points: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    if points.ndim != 3 or points.shape[1:] != (count, 3):
        raise UserError(f"it returned points of the shape {points.shape}; expected (F, {count}, 3)")
    if not np.isfinite(points).all(-1).any(-1).all():
        raise UserError("it lost all points in a frame")
    return points


def _loaded(spec: str, what: str) -> Callable[..., Any] | None:
    return load_function(spec, what=what) if spec else None


def _open_views(sim: SimConfig, tasks: Sequence[str]) -> TabletopViews:
    """The tabletop's own first images; raises UserError for other simulators."""
    if sim.kind != "tabletop":
        raise UserError(
            f"reward is flow with sim.kind {sim.kind}, whose first images have no depth; set flow.model and "
            "flow.view, or use sim.kind=tabletop"
        )
    check_moves_object(tasks)
    return TabletopViews(sim.arm, sim.image_size or VIEW_PX, sim.camera or "front")
