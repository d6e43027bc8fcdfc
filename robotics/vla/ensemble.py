"""The action of a control step as a mean over overlapping chunks.

Shapes: R rows, L of them at once, K control steps of a chunk, D entries of an action.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mmrl.errors import UserError


class TemporalEnsemble:
    """Averages the predictions of the last chunks for the present control step; a chunk is predicted at every step.

    The weight of the i-th oldest prediction is exp(-decay i), i = 0 for the oldest, so the oldest counts most and a
    small decay reacts slowly to new observations. The mean is no decision of the policy and has no log-probability:
    this is for evaluation only.

    Source: ACT, arXiv 2304.13705, section IV-B and algorithm 2; tonyzhaozh/act imitate_episodes.py (m = 0.01).
    """

    def __init__(self, rows: int, chunk: int, action_size: int, decay: float = 0.01) -> None:
        if min(rows, chunk, action_size) < 1:
            raise UserError(f"rows={rows}, chunk={chunk} and action_size={action_size} must be at least 1")
        self._decay = decay
        self._chunks = np.zeros((rows, chunk, chunk, action_size), np.float32)
        """[row, j] is the chunk of j control steps ago."""
        self._count = np.zeros(rows, np.int64)

    def reset(self, rows: ArrayLike | None = None) -> None:
        """Drop the chunks of rows whose episodes restart; None for all."""
        self._count[slice(None) if rows is None else np.asarray(rows, np.int64)] = 0

    def step(self, chunks: ArrayLike, rows: ArrayLike) -> NDArray[np.float32]:
        """Add the newest chunks (L, K, D) of rows (L,) and return the actions (L, D) of this control step.

        Raises:
            ValueError: another shape.
        """
        index = np.asarray(rows, np.int64)
        size = self._chunks.shape[1]
        new = np.asarray(chunks, np.float32)
        if new.shape != (len(index), *self._chunks.shape[2:]):
            raise ValueError(f"chunks have the shape {new.shape}; expected {(len(index), *self._chunks.shape[2:])}")
        self._chunks[index] = np.concatenate([new[:, None], self._chunks[index, :-1]], 1)
        self._count[index] = np.minimum(self._count[index] + 1, size)
        count = self._count[index][:, None]
        age = np.arange(size)
        # the oldest of them has the age count - 1
        weight = np.where(age < count, np.exp(-self._decay * (count - 1 - age)), 0.0)
        predicted = self._chunks[index][:, age, age]
        return ((weight[..., None] * predicted).sum(1) / weight.sum(1)[:, None]).astype(np.float32)
