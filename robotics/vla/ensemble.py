"""From chunks of actions to the action of a control step: the first n of a chunk in order, or a mean over chunks.

Shapes: R rows, L of them at once, K control steps of a chunk, D entries of an action.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError


class ActionQueue:
    """Returns the first n actions of a chunk one by one; then the row needs a new chunk.

    queue = ActionQueue(rows=1, chunk=8, action_size=5, n_action_steps=4)
    while running:
        if queue.empty([0])[0]:
            queue.push(policy_chunks, [0])
        environment.step(queue.pop([0])[0])
    """

    def __init__(self, rows: int, chunk: int, action_size: int, n_action_steps: int = 0) -> None:
        _check(rows, chunk, action_size)
        if not 0 <= n_action_steps <= chunk:
            raise UserError(f"n_action_steps is {n_action_steps}; must be at most the chunk of {chunk}, 0 = all of it")
        self.n_action_steps = n_action_steps or chunk
        self._chunks = np.zeros((rows, chunk, action_size), np.float32)
        self._left = np.zeros(rows, np.int64)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Drop the actions left of some rows; None for all."""
        self._left[slice(None) if rows is None else np.asarray(rows, np.int64)] = 0

    def empty(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """(L,) whether each row needs a chunk."""
        return self._left[np.asarray(rows, np.int64)] == 0

    def push(self, chunks: ArrayLike, rows: ArrayLike) -> None:
        """Give rows a new chunk; actions left of the old one are dropped.

        Args:
            chunks: (L, K, D).
            rows: (L,) their numbers.

        Raises:
            ValueError: another shape.
        """
        numbers = np.asarray(rows, np.int64)
        self._chunks[numbers] = _checked(chunks, (len(numbers), *self._chunks.shape[1:]))
        self._left[numbers] = self.n_action_steps

    def pop(self, rows: ArrayLike) -> NDArray[np.float32]:
        """Take the next action of some rows.

        Args:
            rows: (L,) their numbers.

        Returns:
            (L, D).
        """
        numbers = np.asarray(rows, np.int64)
        if self.empty(numbers).any():
            raise ValueError(f"rows {numbers[self.empty(numbers)].tolist()} have no action left; push a chunk first")
        taken: NDArray[np.float32] = self._chunks[numbers, self.n_action_steps - self._left[numbers]]
        self._left[numbers] -= 1
        return taken


class TemporalEnsemble:
    """Averages the predictions of the last chunks for the present control step; a chunk is predicted at every step.

    The weight of the i-th oldest prediction is exp(-decay i), i = 0 for the oldest, so the oldest counts most and a
    small decay reacts slowly to new observations. The mean is no decision of the policy and has no log-probability:
    this is for evaluation only.

    Source: ACT, arXiv 2304.13705, section IV-B and algorithm 2; tonyzhaozh/act imitate_episodes.py (m = 0.01).
    """

    def __init__(self, rows: int, chunk: int, action_size: int, decay: float = 0.01) -> None:
        _check(rows, chunk, action_size)
        self._decay = decay
        self._chunks = np.zeros((rows, chunk, chunk, action_size), np.float32)
        """Chunk of j control steps ago at place j."""
        self._count = np.zeros(rows, np.int64)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Drop the chunks of some rows, whose episodes begin; None for all."""
        self._count[slice(None) if rows is None else np.asarray(rows, np.int64)] = 0

    def step(self, chunks: ArrayLike, rows: ArrayLike) -> NDArray[np.float32]:
        """Add the chunks that were just predicted and return the actions of this control step.

        Args:
            chunks: (L, K, D).
            rows: (L,) their numbers.

        Returns:
            (L, D).

        Raises:
            ValueError: another shape.
        """
        numbers = np.asarray(rows, np.int64)
        size = self._chunks.shape[1]
        new = _checked(chunks, (len(numbers), *self._chunks.shape[2:]))
        self._chunks[numbers] = np.concatenate([new[:, None], self._chunks[numbers, :-1]], 1)
        self._count[numbers] = np.minimum(self._count[numbers] + 1, size)
        count = self._count[numbers][:, None]
        age = np.arange(size)
        # the oldest of them has the age count - 1
        weight = np.where(age < count, np.exp(-self._decay * (count - 1 - age)), 0.0)
        said = self._chunks[numbers][:, age, age]
        return ((weight[..., None] * said).sum(1) / weight.sum(1)[:, None]).astype(np.float32)


def _check(rows: int, chunk: int, action_size: int) -> None:
    if min(rows, chunk, action_size) < 1:
        raise UserError(f"rows={rows}, chunk={chunk} and action_size={action_size} must be at least 1")


def _checked(chunks: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float32]:
    found = np.asarray(chunks, np.float32)
    if found.shape != shape:
        raise ValueError(f"chunks have the shape {found.shape}; expected {shape}")
    return found
