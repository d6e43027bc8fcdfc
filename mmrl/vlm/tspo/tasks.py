"""Questions about long videos with their candidate frames, their needle and the query of the CLIP."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.hub.video_reading import VideoError
from mmrl.vlm.data import DataConfig, LoadedTasks, load_tasks
from mmrl.vlm.task import TaskError, VideoClip, VlmTask
from mmrl.vlm.tspo.candidates import Candidates, needle_mask, open_candidates, read_needle

TYPES = ("specific", "general")
OPTIONS = re.compile(r"\n\s*\(?A[).:]")
"""Start of the options of a multiple-choice question."""


@dataclass
class NeedleTask:
    """A question about a long video."""

    task: VlmTask
    """The question for a model."""
    query: str
    """The text that frames are compared with: the question without its options."""
    video: Candidates
    """The T candidate frames."""
    needle: np.ndarray
    """(T,) bool, the candidates that show the answer; all False where that is not known."""
    specific: bool
    """Whether picks in the needle are rewarded (rows of type "specific")."""

    @property
    def id(self) -> str:
        """Id of the question."""
        return self.task.id

    @property
    def answer(self) -> str:
        """The right answer, empty where the row has none."""
        return str(self.task.columns.get("answer") or "")

    def share_in_needle(self, picks: Sequence[int]) -> float:
        """R_T, the share of some picks in the needle; 1 for rows of type "general", as in the public code."""
        return float(self.needle[list(picks)].mean()) if self.specific else 1.0

    def contents(self) -> dict[str, Any]:
        """Everything that a run depends on, for a digest."""
        needle = np.flatnonzero(self.needle).tolist()
        return {"task": self.task, "query": self.query, "frames": list(self.video.numbers), "needle": needle}


def load_needle_tasks(config: DataConfig, fps: float, max_frames: int) -> tuple[list[NeedleTask], dict[str, int]]:
    """Read questions and list the candidate frames of their videos, without decoding them."""
    loaded = load_tasks(config)
    usable = LoadedTasks([], on_bad_row=config.on_bad_row)
    tasks: list[NeedleTask] = []
    for task in loaded.tasks:
        try:
            tasks.append(_make(task, fps, max_frames))
            usable.tasks.append(task)
        except TaskError as error:
            usable.leave_out(error)
    usable.check_left(config.path)
    return tasks, dict(Counter(loaded.skipped) + Counter(usable.skipped))


def question_without_options(text: str) -> str:
    """A question up to its first option, such as "(A) a dog" or "A. a dog" on a line of its own."""
    return OPTIONS.split(text, maxsplit=1)[0].strip()


def _make(task: VlmTask, fps: float, max_frames: int) -> NeedleTask:
    try:
        video = open_candidates(_path_of(task), fps, max_frames)
    except VideoError as error:
        raise TaskError(error.kind, task.id, f"its video cannot be used: {error}") from None
    columns = task.columns
    pairs = read_needle(columns.get("needle"), task.id)
    kind = columns.get("type") or ("specific" if pairs else "general")
    if kind not in TYPES or (kind == "specific" and not pairs):
        lacks = " and it has no needle" if kind == "specific" else ""
        raise TaskError("bad_needle", task.id, f"its type is {kind!r}{lacks}; there are: {', '.join(TYPES)}")
    mask = needle_mask(video, pairs, task.id)
    query = str(columns.get("query") or question_without_options(_text_of(task)))
    return NeedleTask(task, query, video, mask, kind == "specific")


def _path_of(task: VlmTask) -> str:
    if len(task.videos) != 1:
        raise TaskError("one_video", task.id, f"it has {len(task.videos)} videos; frames are picked from one")
    video = task.videos[0]
    source = video.source if isinstance(video, VideoClip) else video
    if not isinstance(source, str):
        raise TaskError("one_video", task.id, "its video is a list of frames; frames are picked from a video file")
    return source.removeprefix("file://")


def _text_of(task: VlmTask) -> str:
    texts: Sequence[str] = [
        item["text"] for turn in task.messages if turn["role"] == "user" for item in turn["content"] if "text" in item
    ]
    return " ".join(text.strip() for text in texts)
