"""Questions about long videos, with their candidate frames, their needle and the CLIP query."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.files import open_file, without_scheme
from mmrl.hub.images import MAX_IMAGE_PIXELS
from mmrl.hub.tables import LoadedRows
from mmrl.hub.video_reading import ROUNDING_S, VideoError, VideoIndex, decode_frames, read_index
from mmrl.vlm.data.dataset import DataConfig, load_tasks
from mmrl.vlm.data.task import TaskError, VideoClip, VlmTask

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image


@dataclass(frozen=True)
class Candidates:
    """T candidate frames of a file, decoded one at a time when they are needed."""

    index: VideoIndex
    numbers: tuple[int, ...]
    """(T) increasing indices of the frames in the file."""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def seconds(self) -> list[float]:
        """Presentation time of each frame from the start of the video."""
        return [self.index.times_s[number] for number in self.numbers]

    @property
    def digest(self) -> str:
        """Digest of the file's content and of its candidate frames; raises VideoError."""
        try:
            state = os.stat(self.index.path)
            content = _file_digest(self.index.path, state.st_size, state.st_mtime_ns)
        except OSError as error:
            raise VideoError("missing_video", f"it can no longer be read: {error}") from None
        return hashlib.blake2b(f"{content} {list(self.numbers)}".encode(), digest_size=16).hexdigest()

    def frames(self) -> Iterator[NDArray[np.uint8]]:
        """All candidates, (H, W, 3) uint8, one at a time; raises VideoError."""
        return decode_frames(self.index, self.numbers)

    def images(self, picks: Sequence[int]) -> dict[int, Image]:
        """Some candidates as images; raises VideoError."""
        from PIL import Image

        rising = sorted(set(picks))
        frames = decode_frames(self.index, [self.numbers[pick] for pick in rising])
        return {pick: Image.fromarray(frame) for pick, frame in zip(rising, frames, strict=True)}


def open_candidates(path: str, fps: float = 1.0, max_frames: int = 0, max_pixels: int = MAX_IMAGE_PIXELS) -> Candidates:
    """List `fps` (0: all) candidate frames per second of a video, at most `max_frames` (0: no limit), undecoded.

    Each is a different frame: while a video of variable rate shows one for long, there are no further candidates.
    """
    index = read_index(path, max_pixels)
    numbers = _evenly(index, fps) if index.constant else _by_time(index, fps)
    if max_frames and len(numbers) > max_frames:
        spread_s = np.linspace(index.times_s[0], index.times_s[-1], max_frames)
        numbers = (
            np.linspace(0, index.total - 1, max_frames).round().astype(int)
            if index.constant
            else np.unique([index.frame_at(time_s) for time_s in spread_s])
        )
    return Candidates(index, tuple(numbers.tolist()))


def _evenly(index: VideoIndex, fps: float) -> NDArray[np.int_]:
    step = max(index.fps / fps, 1.0) if fps else 1.0
    count = max(int((index.total - 1) / step + 1e-6) + 1, 1)
    return np.minimum((np.arange(count) * step).round().astype(int), index.total - 1)


def _by_time(index: VideoIndex, fps: float) -> NDArray[np.int_]:
    """Frames that are shown at 0, 1 / fps, 2 / fps, ... seconds from the first one."""
    if not fps:
        return np.arange(index.total)
    appears_s = np.array(index.times_s) - index.times_s[0] - ROUNDING_S
    first_point = np.ceil(appears_s * fps)  # the first of these times that is not before the frame
    next_point = np.append(first_point[1:], np.floor((index.times_s[-1] - index.times_s[0]) * fps + 1e-6) + 1)
    return np.flatnonzero(first_point < next_point)


def read_needle(value: Any, place: str) -> list[tuple[int, int]]:
    """Intervals of a needle in frames of the file, end excluded."""
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
    """Whether each candidate belongs to a needle, (T,) bool."""
    total, numbers = candidates.index.total, np.array(candidates.numbers)
    found = np.zeros(len(numbers), dtype=bool)
    for start, stop in needle:
        if stop > total:
            message = f"its needle is frames {start} to {stop - 1}, but the video has {total} frames"
            raise TaskError("needle_outside", place, message)
        found |= (numbers >= start) & (numbers < stop)
    if needle and not found.any():
        message = "none of its needle's frames is a candidate; raise features.fps or features.max_frames"
        raise TaskError("needle_missed", place, message)
    return found


@functools.lru_cache(maxsize=65536)
def _file_digest(path: str, size: int, modified: int) -> str:
    """Digest of a file's bytes, read again when its size or the time of its last change differ."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


TYPES = ("specific", "general")
OPTIONS = re.compile(r"\n\s*\(?A[).:]")
"""Start of the options of a multiple-choice question."""


@dataclass
class NeedleTask:
    """A question about a long video."""

    task: VlmTask
    """The question for a model."""
    query: str
    """The text to compare frames with: the question without its options."""
    video: Candidates
    """The T candidate frames."""
    needle: np.ndarray
    """(T,) bool, the candidates that show the answer; all False if unknown."""
    specific: bool
    """Whether picks in the needle are rewarded (rows of type "specific")."""

    @property
    def id(self) -> str:
        """Id of the question."""
        return self.task.id

    @property
    def answer(self) -> str:
        """The correct answer; empty if the row has none."""
        return str(self.task.columns.get("answer") or "")

    def share_in_needle(self, picks: Sequence[int]) -> float:
        """R_T, the fraction of the picks in the needle; 1 for rows of type "general", as in the public code."""
        return float(self.needle[list(picks)].mean()) if self.specific else 1.0

    def contents(self) -> dict[str, Any]:
        """Everything that a run depends on, for a digest."""
        needle = np.flatnonzero(self.needle).tolist()
        return {"task": self.task, "query": self.query, "frames": list(self.video.numbers), "needle": needle}


def load_needle_tasks(config: DataConfig, fps: float, max_frames: int) -> tuple[list[NeedleTask], dict[str, int]]:
    """Read questions and list the candidate frames of their videos, without decoding them."""
    loaded = load_tasks(config)
    asked = {task.id: _text_of(task) for task in loaded.tasks}
    if config.format_prompt is not None:  # it is for the model that answers, and no part of a query
        asked |= {task.id: _text_of(task) for task in load_tasks(replace(config, format_prompt=None)).tasks}

    @functools.cache
    def opened(path: str) -> Candidates:
        """Questions about one video share the list of its frames."""
        return open_candidates(path, fps, max_frames, config.max_image_pixels)

    usable = LoadedRows[NeedleTask](on_bad_row=config.on_bad_row)
    usable.take(loaded.tasks, lambda task: _make(task, asked[task.id], opened))
    usable.check_left(config.path)
    return usable.tasks, loaded.skipped + usable.skipped


def question_without_options(text: str) -> str:
    """A question up to its first option, such as "(A) a dog" or "A. a dog" on a separate line."""
    return OPTIONS.split(text, maxsplit=1)[0].strip()


def _make(task: VlmTask, asked: str, opened: Callable[[str], Candidates]) -> NeedleTask:
    try:
        video = opened(_path_of(task))
    except VideoError as error:
        raise TaskError(error.kind, task.id, f"its video cannot be used: {error}") from None
    columns = task.columns
    pairs = read_needle(columns.get("needle"), task.id)
    kind = columns.get("type") or ("specific" if pairs else "general")
    if kind not in TYPES or (kind == "specific" and not pairs):
        lacks = " and it has no needle" if kind == "specific" else ""
        raise TaskError("bad_needle", task.id, f"its type is {kind!r}{lacks}; expected: {', '.join(TYPES)}")
    mask = needle_mask(video, pairs, task.id)
    query = str(columns.get("query") or question_without_options(asked))
    return NeedleTask(task, query, video, mask, kind == "specific")


def _path_of(task: VlmTask) -> str:
    if len(task.videos) != 1:
        raise TaskError("one_video", task.id, f"it has {len(task.videos)} videos; exactly one is needed")
    if task.images:
        raise TaskError("one_video", task.id, "it has images, too; only the frames of its video are shown")
    video = task.videos[0]
    if isinstance(video, VideoClip) and video.options:
        given = ", ".join(video.options)
        raise TaskError(
            "one_video", task.id, f"its video has the options {given}; frames are picked from the whole video"
        )
    source = video.source if isinstance(video, VideoClip) else video
    if not isinstance(source, str):
        raise TaskError("one_video", task.id, "its video is a list of frames; frames are picked from a video file")
    return without_scheme(source)


def _text_of(task: VlmTask) -> str:
    texts: Sequence[str] = [
        item["text"] for turn in task.messages if turn["role"] == "user" for item in turn["content"] if "text" in item
    ]
    return " ".join(text.strip() for text in texts)
