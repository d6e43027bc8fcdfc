"""Results of `LeRobotReader`: episodes, and frames with the actions around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from robotics.data.metadata import named_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class EpisodeData:
    """One episode of T frames."""

    number: int
    """Index of the episode."""
    state: NDArray[np.float32]
    """(T, S) before each action; (T, 0) where the dataset has none."""
    action: NDArray[np.float32]
    """(T, A); (T, 0) where the dataset has none."""
    images: Mapping[str, NDArray[np.uint8]]
    """(T, H, W, 3) RGB by camera, decoded at each access."""
    depth_m: Mapping[str, NDArray[np.float32]]
    """(T, H, W) metres by depth camera, decoded at each access."""
    task: str
    """Instruction of the first frame."""
    frame_tasks: Sequence[str]
    """T instructions; they differ where the task changes within the episode."""
    success: bool | None
    """Whether the task was done; None where the dataset does not say."""
    timestamp_s: NDArray[np.float32]
    """(T,) seconds since the first frame."""
    extra: Mapping[str, NDArray]
    """(T, ...) the other features by name in their own type, such as `next.reward`; texts as objects."""

    def __len__(self) -> int:
        return len(self.action)


@dataclass(frozen=True)
class FrameSample:
    """A frame and the actions around it."""

    episode: int
    """Index of the episode."""
    frame: int
    """Index of the frame within the episode."""
    state: NDArray[np.float32]
    """(S,)."""
    action: NDArray[np.float32]
    """(K, A) an action for each requested time; the nearest of the episode beyond its ends."""
    valid: NDArray[np.bool_]
    """(K,) False where the time is beyond the episode's ends."""
    images: Mapping[str, NDArray[np.uint8]]
    """(H, W, 3) by requested camera."""
    task: str
    """Instruction of the frame."""


def action_chunks(actions: NDArray, offsets: Sequence[int]) -> tuple[NDArray, NDArray[np.bool_]]:
    """Actions around each frame of an episode.

    Args:
        actions: (T, A).
        offsets: K frames from the current one, 0 is its own action.

    Returns:
        (T, K, A) actions, the first or last of the episode beyond its ends, and (T, K) whether there was one.
    """
    index = np.arange(len(actions))[:, None] + np.asarray(offsets, np.int64)
    inside = np.clip(index, 0, len(actions) - 1)
    return actions[inside], inside == index


class LazyImages(Mapping[str, "NDArray[Any]"]):
    """Images by camera, decoded on access."""

    def __init__(self, decoders: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
        self._decoders = decoders

    def __getitem__(self, camera: str) -> NDArray[Any]:
        if camera not in self._decoders:
            raise KeyError(f"no camera {camera!r}; there are: {', '.join(self._decoders) or 'none'}")
        with named_errors(f"the images of camera {camera!r} of an episode"):
            return self._decoders[camera]()

    def __contains__(self, camera: object) -> bool:
        return camera in self._decoders

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoders)

    def __len__(self) -> int:
        return len(self._decoders)
