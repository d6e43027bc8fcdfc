"""Interface of simulators of many episodes, in any engine or process.

R episodes run at the same time, each in a row. Actions come in chunks of K control steps that run open loop, after
which the live rows are observed. A row whose environment failed has no result: its reward is NaN, and it does not count
as an episode without success.

A policy that takes several observations asks `begin_episodes` for a past of P control steps, those within a chunk
included. At control step t it is t - P .. t - 1; steps before the episode repeat its first observation.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to run; equal specifications start from the same state, bit for bit."""

    task: str
    """A key of `sim.tasks()`: a tabletop task (reach, push, ...), a Gymnasium environment's id, or a suite's task."""
    instruction: str
    """Language instruction; may be empty."""
    layout: int
    """Number of the initial state within its split."""
    split: str = "train"
    """train or held_out, which share no layout."""
    draw: int | None = 0
    """Number of the domain randomisation's draw; None = the nominal scene."""


@dataclass(frozen=True)
class RobotObservation:
    """Observation of the given rows; the arrays belong to the caller."""

    rows: NDArray[np.int64]
    """(R,) numbers of the episodes, ascending."""
    state: NDArray[np.float32]
    """(R, S) proprioception and other state, as the simulator's docstring lists."""
    images: NDArray[np.uint8] | None
    """(R, H, W, 3) RGB; None without images."""
    views: NDArray[np.uint8] | None = None
    """(R, V, H, W, 3) RGB of V additional cameras, in the order of the simulator's `views`."""
    past_state: NDArray[np.float32] | None = None
    """(R, P, S) of the past, the oldest first; zeros if the episode has ended."""
    past_images: NDArray[np.uint8] | None = None
    """(R, P, H, W, 3) of the past."""
    past_views: NDArray[np.uint8] | None = None
    """(R, P, V, H, W, 3) of the past."""

    def of(self, rows: ArrayLike) -> RobotObservation:
        """Observation of the given rows (ascending numbers); shares memory if these are all rows."""
        wanted = np.asarray(rows, np.int64)
        if np.array_equal(wanted, self.rows):
            return self
        # rows are ascending, so a binary search finds them
        index = np.searchsorted(self.rows, wanted)
        parts = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "rows"}
        chosen = {name: None if part is None else part[index] for name, part in parts.items()}
        return RobotObservation(wanted, **chosen)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChunkResult:
    """Result of a chunk of K actions in L rows; control steps after the end of an episode do not count."""

    rows: NDArray[np.int64]
    """(L,) numbers of the episodes, ascending."""
    rewards: NDArray[np.float64]
    """(L, K) the environment's rewards; 0 after the end, all NaN if the environment failed."""
    steps: NDArray[np.int64]
    """(L,) control steps that count; 0 if the environment failed."""
    success: NDArray[np.bool_]
    """(L,) whether the task was solved at one of these control steps."""
    terminated: NDArray[np.bool_]
    """(L,) whether the task itself ended the episode, with or without success."""
    truncated: NDArray[np.bool_]
    """(L,) whether a time limit cut it off: the horizon, or the environment's own limit."""
    failed: NDArray[np.bool_]
    """(L,) whether the environment failed: raised, hung, died or diverged."""
    observation: RobotObservation
    """Observation of `rows` at the end of the chunk or of the episode; zeros if the environment failed."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Reasons of failures by row, and the environment's own explanations of an end."""
    frames: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    """Frames (steps, H, W, 3) of the control steps, by recorded row."""
    object_poses: NDArray[np.float64] | None = None
    """(L, 4, 4) T_world_object of the piece that the task acts on, at the end; NaN if the environment failed, None if
    the simulator does not report it."""
    full_state: NDArray[np.float32] | None = None
    """(L, F) full state at the end of the chunk or of the episode; None if the simulator does not report it."""
    drawn: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Draw of the domain randomisation by row, for episodes that begin."""
    true_success: NDArray[np.bool_] | None = None
    """(L,) the environment's own success, if `success` is the verdict of somebody else; None otherwise."""
    executed: NDArray[np.float32] | None = None
    """(L, K, A) actions in -1..1 as executed, if a person inside the environment may replace them; None otherwise."""
    by_person: NDArray[np.bool_] | None = None
    """(L, K) whether that person chose the action; None if there is none."""

    @classmethod
    def empty(
        cls,
        rows: NDArray[np.int64],
        length: int,
        state_size: int,
        image_size: tuple[int, int] | None,
        views: int = 0,
        past: int = 0,
    ) -> ChunkResult:
        """Zeros for a chunk of K = length actions in the given rows, with V views and a past of P control steps."""
        count, shape = len(rows), None if image_size is None else (*image_size, 3)
        observation = RobotObservation(
            rows,
            np.zeros((count, state_size), np.float32),
            images=_black(shape, count),
            views=_black(shape, count, views),
            past_state=np.zeros((count, past, state_size), np.float32) if past else None,
            past_images=_black(shape, count, past),
            past_views=_black(shape, count, past, views),
        )
        success, terminated, truncated, failed = (np.zeros(count, bool) for _ in range(4))
        rewards, steps = np.zeros((count, length)), np.zeros(count, np.int64)
        return cls(rows, rewards, steps, success, terminated, truncated, failed, observation)


class RobotSim(Protocol):
    """Many episodes at once. A row is live until its episode ends; only live rows take actions.

    With several cameras it also has an attribute `views`, see `views_of`; if the environment's own units differ from
    -1..1, `action_bounds`, two sequences (A,) of its values for -1 and 1, and `action_integer = True` if these are
    integers. `state_names` (S,), `action_names` (A,), `camera` and `control_hz` describe the numbers, see
    `robotics.sim.interface`; policies and datasets are compared with them. With `potential_rewards = True` its rewards
    are a potential of the state, how far the task has come, which recipes read at the end and do not sum. If it keeps a
    past, `reset` takes `past: int = 0`, P, and fills `RobotObservation.past_state` and so on until the next `reset`.
    """

    @property
    def action_size(self) -> int:
        """A, entries of an action, each in -1..1."""

    @property
    def state_size(self) -> int:
        """S."""

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(H, W) pixels; None without images."""

    @property
    def horizon(self) -> int:
        """Control steps after which an episode is truncated."""

    @property
    def capacity(self) -> int | None:
        """Maximum number of episodes at once; None for any number."""

    @property
    def live(self) -> NDArray[np.int64]:
        """Rows whose episodes have not ended, ascending."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures since the start by kind: crashed, hung, memory, raised, restarted, dropped, diverged."""

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        ...

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        ...

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes in rows 0..R-1, ending those that still run.

        Args:
            episodes: R episodes, at most `capacity`.

        Returns:
            Result of a chunk of no steps: `rewards` is (R, 0), `failed` marks rows that could not start.
        """
        ...

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows.

        Args:
            actions: (L, K, A) in -1..1, in the order of `live`; values outside are clipped.
            record: rows of which every control step is rendered.

        Returns:
            The result; rows that ended or failed are no longer in `live`.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """Everything that a measurement depends on: renderer, versions, horizon, camera, control rate."""
        ...

    def close(self) -> None:
        """Stop threads and processes and free renderers."""
        ...


def views_of(sim: object) -> tuple[str, ...]:
    """Names of a simulator's additional cameras, in the order of `RobotObservation.views`."""
    return tuple(getattr(sim, "views", ()))


def keeps_past(sim: RobotSim) -> bool:
    """Whether a simulator can observe the past."""
    # third-party simulators may have the plain `reset` only
    return "past" in inspect.signature(sim.reset).parameters


def begin_episodes(sim: RobotSim, episodes: Sequence[EpisodeSpec], past: int = 0) -> ChunkResult:
    """Begin episodes, with a past if one is requested and the simulator keeps one."""
    options = {"past": past} if past and keeps_past(sim) else {}
    return sim.reset(episodes, **options)


def _black(shape: tuple[int, ...] | None, *counts: int) -> NDArray[np.uint8] | None:
    """Black images (*counts, *shape); None without images, or with no views or past."""
    # counts[0] are rows, of which there may be none; no views or no past means no array at all
    return None if shape is None or not all(counts[1:]) else np.zeros((*counts, *shape), np.uint8)
