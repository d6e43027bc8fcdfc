"""Base of the latents of whole trajectories: batches, a cache, and rows that fail one by one."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from mmrl.errors import UserError

if TYPE_CHECKING:
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
    """Why not, by row."""


class TrajectoryLatent(Protocol):
    """Embeds whole trajectories."""

    @property
    def size(self) -> int:
        """E, entries of a latent."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Rows since the start: embedded, from the cache, invalid."""
        ...

    def embed(
        self, frames: Sequence[NDArray[np.uint8] | None], states: Sequence[NDArray[np.float32]]
    ) -> EmbeddedTrajectories:
        """Embed trajectories of any lengths.

        Args:
            frames: (F_i, H, W, 3) uint8 images of each, in order; None without images.
            states: (F_i, S) float32 states of each, in order.

        Returns:
            Latents, and which rows have none and why. Up to rounding, a latent does not depend on the other rows.

        Raises:
            ValueError: the numbers of frames and states differ.
        """
        ...


class RowLatent(ABC):
    """Embeds the rows that it can, with a cache, and gives the reason for the others.

    A latent that has to be fitted first says by `fit_episodes` to how many episodes of the run, and `ready` is False
    until then.
    """

    needs_images: ClassVar[bool] = True
    """Whether it looks at images."""
    looks_at: ClassVar[str] = "robot"
    """What the states are that it is given: those of the robot, or positions (F, 3) of the object."""
    fit_episodes: int = 0

    def __init__(self, size: int, batch_size: int = 1, cache: int = 0) -> None:
        self.size = size
        self.counts: Counter[str] = Counter()
        self._batch, self._room = batch_size, cache
        self._kept: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()

    @property
    def ready(self) -> bool:
        """Whether it can embed."""
        return True

    def fit(
        self,
        frames: Sequence[NDArray[np.uint8] | None],
        states: Sequence[NDArray[np.float32]],
        labels: Sequence[Hashable],
    ) -> None:
        """Fit what the latent depends on to the first episodes of a run; equal episodes give an equal latent.

        Args:
            frames: (F_i, H, W, 3) uint8 images of each, in order; None without images.
            states: (P_i, S) float32 states of each.
            labels: their initial states.
        """
        raise TypeError(f"{type(self).__name__} is not fitted to episodes")

    def state_dict(self) -> dict[str, Any]:
        """What `fit` found, for a checkpoint; empty where nothing is fitted."""
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
        """Embed trajectories of any lengths; see `TrajectoryLatent.embed`."""
        if len(frames) != len(states):
            raise ValueError(f"{len(frames)} trajectories of frames and {len(states)} of states")
        latents = np.full((len(frames), self.size), np.nan, np.float32)
        inputs, rows, reasons = self._sort(frames, states)
        outcomes = self._run(inputs, 1 if one_by_one else self._batch, reuse)
        for key, places in rows.items():
            outcome = outcomes[key]
            if isinstance(outcome, str):
                reasons |= dict.fromkeys(places, outcome)
            else:
                latents[places] = outcome
        self.counts["invalid"] += len(reasons)
        valid = np.array([row not in reasons for row in range(len(frames))], np.bool_)
        return EmbeddedTrajectories(latents, valid, dict(sorted(reasons.items())))

    def _sort(
        self, frames: Sequence[NDArray[np.uint8] | None], states: Sequence[NDArray[np.float32]]
    ) -> tuple[dict[bytes, NDArray[Any]], dict[bytes, list[int]], dict[int, str]]:
        """Distinct inputs, the rows of each, and why the other rows have none."""
        inputs: dict[bytes, NDArray[Any]] = {}
        rows: dict[bytes, list[int]] = {}
        reasons: dict[int, str] = {}
        for row, (images, path) in enumerate(zip(frames, states, strict=True)):
            try:
                given = self._prepare(images, path)
            except ValueError as error:
                reasons[row] = str(error)
                continue
            key = _content(given)
            inputs[key] = given
            rows.setdefault(key, []).append(row)
        return inputs, rows, reasons

    def _run(
        self, inputs: Mapping[bytes, NDArray[Any]], batch: int, reuse: bool
    ) -> dict[bytes, NDArray[np.float32] | str]:
        """Latents of distinct inputs, or the reason why there is none."""
        kept = self._kept if reuse else {}
        outcomes: dict[bytes, NDArray[np.float32] | str] = {key: kept[key] for key in inputs if key in kept}
        self.counts["reused"] += len(outcomes)
        new = [key for key in inputs if key not in outcomes]
        for start in range(0, len(new), batch):
            part = new[start : start + batch]
            outcomes |= dict(zip(part, self._attempt([inputs[key] for key in part]), strict=True))
        for key, outcome in outcomes.items():
            if reuse and not isinstance(outcome, str):
                self._keep(key, outcome)
        self.counts["embedded"] += sum(not isinstance(outcomes[key], str) for key in new)
        return outcomes

    def _attempt(self, given: list[NDArray[Any]]) -> list[NDArray[np.float32] | str]:
        try:
            found = self._compute(given)
        except Exception as error:  # a row that the network cannot take must not fail the others
            if len(given) > 1:
                return [outcome for one in given for outcome in self._attempt([one])]
            return [f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]]
        return [row if np.isfinite(row).all() else "the latent is not finite" for row in found]

    def _keep(self, key: bytes, latent: NDArray[np.float32]) -> None:
        if self._room:
            self._kept[key] = latent
            self._kept.move_to_end(key)
        while len(self._kept) > self._room:
            self._kept.popitem(last=False)

    @abstractmethod
    def _prepare(self, frames: NDArray[np.uint8] | None, states: NDArray[np.float32]) -> NDArray[Any]:
        """What the latent depends on; raises ValueError, naming what is missing."""

    @abstractmethod
    def _compute(self, given: list[NDArray[Any]]) -> NDArray[np.float32]:
        """(b, E) latents of what `_prepare` returned."""


def check_path(path: str, kind: str) -> None:
    """Refuse a latent that runs a network without the folder of its model; raises UserError."""
    if not path:
        raise UserError(f"latent.kind={kind} needs latent.path, the folder of its model")


def check_frames(frames: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
    """Images (F, H, W, 3) uint8 of an episode; raises ValueError if they are missing or of another shape or type."""
    if frames is None or not len(frames):
        raise ValueError("there are no images of the episode")
    images = np.asarray(frames)
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"images are {images.dtype} of shape {images.shape}; expected uint8 (F, H, W, 3)")
    return images


def _content(given: NDArray[Any]) -> bytes:
    digest = hashlib.blake2b(f"{given.dtype}{given.shape}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(given).data)
    return digest.digest()
