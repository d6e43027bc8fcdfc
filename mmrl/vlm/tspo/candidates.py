"""The frames of a video among which the agent picks, and where its needle lies among them."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.hub.video_reading import VideoError, VideoIndex, decode_frames, read_index
from mmrl.vlm.task import TaskError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

READ_BYTES = 2**20


@dataclass(frozen=True)
class Candidates:
    """Candidate frames of a file, decoded one at a time when they are needed."""

    index: VideoIndex
    numbers: tuple[int, ...]
    """Numbers of the frames in the file, rising; T of them."""
    wanted_fps: float
    max_frames: int

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def seconds(self) -> list[float]:
        """When each frame is shown, from the start of the video."""
        return [number / self.index.fps for number in self.numbers]

    @property
    def digest(self) -> str:
        """Digest of the file's content and of which of its frames are candidates; raises VideoError."""
        try:
            state = os.stat(self.index.path)
            content = _file_digest(self.index.path, state.st_size, state.st_mtime_ns)
        except OSError as error:
            raise VideoError("missing_video", f"it cannot be read any more: {error}") from None
        return hashlib.blake2b(f"{content} {self.wanted_fps:g} {self.max_frames}".encode(), digest_size=16).hexdigest()

    def frames(self) -> Iterator[NDArray[np.uint8]]:
        """All candidates, (H, W, 3) uint8, one at a time; raises VideoError."""
        return decode_frames(self.index, self.numbers)

    def pictures(self, picks: Sequence[int]) -> dict[int, Image]:
        """Some candidates as pictures."""
        from PIL import Image

        places = sorted(set(picks))
        frames = decode_frames(self.index, [self.numbers[place] for place in places])
        return {place: Image.fromarray(frame) for place, frame in zip(places, frames, strict=True)}


def open_candidates(path: str, fps: float = 1.0, max_frames: int = 0) -> Candidates:
    """List the candidate frames of a video without decoding it.

    Args:
        path: video file.
        fps: candidates a second; 0 or more than the video has: every frame.
        max_frames: most candidates, evenly spaced where there would be more; 0 for no limit.
    """
    index = read_index(path)
    step = max(index.fps / fps, 1.0) if fps else 1.0
    count = max(int((index.total - 1) / step + 1e-6) + 1, 1)
    numbers = np.minimum((np.arange(count) * step).round().astype(int), index.total - 1)
    if max_frames and count > max_frames:
        numbers = np.linspace(0, index.total - 1, max_frames).round().astype(int)
    return Candidates(index, tuple(int(number) for number in numbers), fps, max_frames)


def read_needle(value: Any, place: str) -> list[tuple[int, int]]:
    """Intervals of a needle: frames of the file, the first and one behind the last."""
    if value is None or value == "" or (hasattr(value, "__len__") and not len(value)):
        return []
    try:
        listed = [value] if not hasattr(value[0], "__len__") else list(value)
        pairs = [(int(pair[0]), int(pair[1])) for pair in listed if len(pair) == 2]
        whole = all(float(pair[i]) == int(pair[i]) for pair in listed for i in range(2))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        pairs, listed, whole = [], [None], False
    if len(pairs) != len(listed) or not whole or any(start >= stop or start < 0 for start, stop in pairs):
        message = (
            f"its needle is {value!r:.100}; expected [start, stop] in frames of the video, or a list of such pairs"
        )
        raise TaskError("bad_needle", place, message)
    return pairs


def needle_mask(candidates: Candidates, needle: Sequence[tuple[int, int]], place: str) -> NDArray[np.bool_]:
    """Which candidates belong to a needle.

    Returns:
        (T,) bool.
    """
    total = candidates.index.total
    for start, stop in needle:
        if stop > total:
            message = f"its needle is frames {start} to {stop - 1}, but the video has {total} frames"
            raise TaskError("needle_outside", place, message)
    numbers = np.array(candidates.numbers)
    found = np.zeros(len(numbers), dtype=bool)
    for start, stop in needle:
        found |= (numbers >= start) & (numbers < stop)
    if needle and not found.any():
        message = "none of its needle's frames is a candidate; raise features.fps or features.max_frames"
        raise TaskError("needle_missed", place, message)
    return found


@functools.lru_cache(maxsize=65536)
def _file_digest(path: str, size: int, modified: int) -> str:
    """Digest of a file's bytes; size and time of the last change tell when to read it again."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


NEEDLE_ERRORS = {
    "bad_needle": "A needle is not [start, stop] in frames or a list of such pairs.",
    "needle_outside": "A needle reaches beyond the end of its video.",
    "needle_missed": "None of a needle's frames is a candidate.",
    "one_video": "A row has no video or several.",
}
"""What may be wrong with a row beside `TASK_ERRORS` and `VIDEO_ERRORS`."""
