"""Base of the latents of whole trajectories: batches, a cache, and rows that fail one by one.

Shapes: B trajectories of F_i frames and P_i states, E entries of a latent.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

REASON_CHARACTERS = 200


@dataclass(frozen=True)
class EmbeddedTrajectories:
    """Latents of B trajectories."""

    latents: NDArray[np.float32]
    """(B, E); NaN in rows that are not valid."""
    valid: NDArray[np.bool_]
    """(B,) whether the trajectory could be embedded."""
    reasons: Mapping[int, str]
    """Reason why a trajectory could not be embedded, by row."""


class TrajectoryLatent(ABC):
    """Embeds whole trajectories; a row that cannot be embedded is invalid, with a reason, and affects no other row."""

    needs_images: ClassVar[bool] = True
    """Whether the latent depends on images."""
    looks_at: ClassVar[str] = "robot"
    """States that it reads: those of the robot, or positions (F, 3) of the object."""

    def __init__(self, size: int, batch_size: int = 1, cache: int = 0) -> None:
        self.size = size
        """E; 0 until the latent is fitted, if it needs to be."""
        self.counts: Counter[str] = Counter()
        """Rows so far: embedded, reused from the cache, invalid."""
        self._batch_size = batch_size
        self._cache_size = cache
        self._cache: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    def fit(self, states: Sequence[NDArray[np.float32]]) -> None:
        """Fit the latent to the states (P_i, S) of the run's first episodes."""
        raise TypeError(f"{type(self).__name__} is not fitted to episodes")

    def state_dict(self) -> dict[str, Any]:
        """The result of `fit`, for a checkpoint; empty if nothing is fitted."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; raises ValueError for the state of a latent of another kind."""
        if state:
            raise ValueError(
                f"{type(self).__name__} is not fitted; the checkpoint has {', '.join(state)} of its latent"
            )

    def embed(
        self,
        frames: Sequence[NDArray[np.uint8] | None],
        states: Sequence[NDArray[np.float32]],
        *,
        one_by_one: bool = False,
        reuse: bool = True,
    ) -> EmbeddedTrajectories:
        """Embed trajectories of frames (F_i, H, W, 3) uint8, None without images, and states (P_i, S).

        `one_by_one` embeds batches of one, so that a latent is bit for bit the same regardless of the other rows;
        `reuse` reads and fills the cache, whose keys are digests of the input.
        """
        if len(frames) != len(states):
            raise ValueError(f"{len(frames)} trajectories of frames and {len(states)} of states")
        inputs: dict[bytes, NDArray[Any]] = {}
        rows: dict[bytes, list[int]] = {}
        reasons: dict[int, str] = {}
        for row, (images, path) in enumerate(zip(frames, states, strict=True)):
            try:
                prepared = self._prepare(images, path)
            except ValueError as error:
                reasons[row] = str(error)
                continue
            # equal inputs are embedded once, with or without the cache
            key = _digest(prepared)
            inputs[key] = prepared
            rows.setdefault(key, []).append(row)
        # NaN marks invalid rows, which later code must not mistake for a latent at the origin
        latents = np.full((len(frames), self.size), np.nan, np.float32)
        for key, outcome in self._embed_distinct(inputs, 1 if one_by_one else self._batch_size, reuse).items():
            if isinstance(outcome, str):
                reasons |= dict.fromkeys(rows[key], outcome)
            else:
                latents[rows[key]] = outcome
        self.counts["invalid"] += len(reasons)
        valid = np.array([row not in reasons for row in range(len(frames))], np.bool_)
        return EmbeddedTrajectories(latents, valid, dict(sorted(reasons.items())))

    def _embed_distinct(
        self, inputs: Mapping[bytes, NDArray[Any]], batch_size: int, reuse: bool
    ) -> dict[bytes, NDArray[np.float32] | str]:
        """The (E,) latent of each distinct input, or the reason why there is none."""
        cached = self._cache if reuse else {}
        outcomes: dict[bytes, NDArray[np.float32] | str] = {key: cached[key] for key in inputs if key in cached}
        self.counts["reused"] += len(outcomes)
        new = [key for key in inputs if key not in outcomes]
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            outcomes |= dict(zip(batch, self._attempt([inputs[key] for key in batch]), strict=True))
        for key, outcome in outcomes.items():
            # failures are not cached: their cause may be a lack of memory
            if reuse and self._cache_size and not isinstance(outcome, str):
                self._cache[key] = outcome
                # the latest used stay, the oldest leave first
                self._cache.move_to_end(key)
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
        self.counts["embedded"] += sum(not isinstance(outcomes[key], str) for key in new)
        return outcomes

    def _attempt(self, inputs: list[NDArray[Any]]) -> list[NDArray[np.float32] | str]:
        try:
            latents = self._compute(inputs)
        except Exception as error:  # a row that the network cannot take must not fail the others
            if len(inputs) > 1:
                # one by one, to find the rows that fail
                return [outcome for one in inputs for outcome in self._attempt([one])]
            return [f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]]
        return [row if np.isfinite(row).all() else "the latent is not finite" for row in latents]

    @abstractmethod
    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        """The part of a trajectory that its latent depends on; raises ValueError for a trajectory without it."""

    def _compute(self, inputs: list[NDArray[Any]]) -> NDArray[np.float32]:
        """(b, E) latents of prepared inputs; by default the inputs themselves."""
        return np.stack(inputs)


def check_frames(frames: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Images (F, H, W, 3) uint8 of an episode; raises ValueError if they are missing or of another shape or type."""
    if frames is None or not len(frames):
        raise ValueError("there are no images of the episode")
    images = np.asarray(frames)
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}; expected uint8 (F, H, W, 3)")
    return images


def _digest(prepared: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(f"{prepared.dtype}{prepared.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(prepared).data)
    return digest.digest()
