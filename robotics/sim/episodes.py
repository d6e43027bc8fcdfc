"""What a simulator of many episodes shows a policy, whatever engine or process it runs in.

R episodes run side by side, each in a row. Actions are given a chunk at a time: K control steps, held open loop, after
which the rows that go on are observed. A row whose environment failed has no result: its reward is NaN and it must not
be taken for an episode without success.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["ChunkResult", "EpisodeSpec", "RobotObservation", "RobotSim"]


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to run; equal ones start from the same bits."""

    task: str
    """Name of a task that the simulator knows."""
    instruction: str
    """Language instruction."""
    layout: int
    """Number of the initial state within its split."""
    split: str = "train"
    """train or held_out; no layout of one is a layout of the other."""


@dataclass(frozen=True)
class RobotObservation:
    """What some rows look like at one moment; the arrays are the caller's to keep."""

    rows: NDArray[np.int64]
    """(R,) numbers of the episodes, ascending."""
    state: NDArray[np.float32]
    """(R, S) proprioception and whatever else the simulator counts as state; its docstring names the entries."""
    images: NDArray[np.uint8] | None
    """(R, H, W, 3) RGB; None without images."""

    def of(self, rows: ArrayLike) -> RobotObservation:
        """Some of the rows.

        Args:
            rows: numbers that are in this observation, ascending.

        Returns:
            Observation of these, sharing memory where it is all of them.
        """
        wanted = np.asarray(rows, np.int64)
        if np.array_equal(wanted, self.rows):
            return self
        places = np.searchsorted(self.rows, wanted)
        return RobotObservation(wanted, self.state[places], None if self.images is None else self.images[places])


@dataclass(frozen=True)
class ChunkResult:
    """What L rows did with a chunk of K actions each; control steps after the end of an episode do not count."""

    rows: NDArray[np.int64]
    """(L,) numbers of the episodes, ascending."""
    rewards: NDArray[np.float64]
    """(L, K) of the environment; 0 after the end, NaN throughout where the environment failed."""
    steps: NDArray[np.int64]
    """(L,) control steps that count; 0 where the environment failed."""
    success: NDArray[np.bool_]
    """(L,) whether the task was done at one of these control steps."""
    terminated: NDArray[np.bool_]
    """(L,) whether the task itself ended the episode, with or without success."""
    truncated: NDArray[np.bool_]
    """(L,) whether the horizon ended it."""
    failed: NDArray[np.bool_]
    """(L,) whether the environment failed: raised, hung, died or diverged."""
    observation: RobotObservation
    """At the end of the chunk or of the episode, a row for each of `rows`; zeros where the environment failed."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Why a row failed, or what the environment says of its end, by row."""
    frames: Mapping[int, NDArray[np.uint8]] = field(default_factory=dict)
    """(steps, H, W, 3) an image of each control step, by row that is recorded."""

    @classmethod
    def empty(
        cls, rows: NDArray[np.int64], length: int, state_size: int, image_size: tuple[int, int] | None
    ) -> ChunkResult:
        """Zeros, to be filled in.

        Args:
            rows: (L,) numbers of the episodes, ascending.
            length: K.
            state_size: S.
            image_size: (H, W); None without images.
        """
        count = len(rows)
        images = None if image_size is None else np.zeros((count, *image_size, 3), np.uint8)
        return cls(
            rows=rows,
            rewards=np.zeros((count, length)),
            steps=np.zeros(count, np.int64),
            success=np.zeros(count, bool),
            terminated=np.zeros(count, bool),
            truncated=np.zeros(count, bool),
            failed=np.zeros(count, bool),
            observation=RobotObservation(rows, np.zeros((count, state_size), np.float32), images),
        )


class RobotSim(Protocol):
    """Many episodes at once. A row is live until its episode ends; only live rows take actions."""

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
        """Most episodes at once; None for any number."""

    @property
    def live(self) -> NDArray[np.int64]:
        """Rows whose episodes go on, ascending."""

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what went wrong since the start: crashed, hung, raised, restarted, dropped, diverged."""

    def tasks(self) -> Mapping[str, str]:
        """Names of the tasks with their instructions."""
        ...

    def layouts(self) -> Mapping[str, int | None]:
        """Names of the splits with their numbers of layouts; None for any number."""
        ...

    def reset(self, episodes: Sequence[EpisodeSpec]) -> ChunkResult:
        """Begin episodes in rows 0..R-1, ending those that still run.

        Args:
            episodes: R of them, at most `capacity`.

        Returns:
            Result of a chunk of no steps: `rewards` is (R, 0), `failed` marks what could not start.
        """
        ...

    def step_chunk(self, actions: ArrayLike, record: Collection[int] = ()) -> ChunkResult:
        """Step the live rows.

        Args:
            actions: (L, K, A) in -1..1, in the order of `live`; what lies outside is clipped.
            record: rows of which every control step is drawn.

        Returns:
            What happened; rows that ended or failed have left `live`.
        """
        ...

    def describe(self) -> Mapping[str, Any]:
        """Everything that a number measured here depends on: renderer, versions, horizon, camera, control rate."""
        ...

    def close(self) -> None:
        """Stop threads and processes and free renderers."""
        ...
