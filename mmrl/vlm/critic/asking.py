"""Questions about the answers to a question: the same images and earlier turns, another last user turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.errors import UserError
from mmrl.hub.video_sampling import Frames
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.prompts import MARKS, split_marks
from mmrl.vlm.task import TaskError, VideoClip, VlmTask, shortened
from mmrl.vlm.video_input import load_videos


def question_text(task: VlmTask) -> str:
    """Text of a task's last user turn, with <image> and <video> where its images and videos stand."""
    content = task.messages[_last_user_turn(task)]["content"]
    return "".join(item["text"] if item["type"] == "text" else f"<{item['type']}>" for item in content)


def ask_instead(task: VlmTask, text: str, name: str) -> VlmTask:
    """The task with another last user turn, and without the turns behind it."""
    last = _last_user_turn(task)
    items = split_marks(text)
    media = [item["type"] for item in items if item["type"] != "text"]
    wanted = [item["type"] for item in task.messages[last]["content"] if item["type"] != "text"]
    if media != wanted:
        message = (
            f"the new question has the places {media or 'none'}, the task's own has {wanted or 'none'}: a text of "
        )
        raise TaskError(
            "placeholder_mismatch", task.id, f"{message}the data holds <image> or <video> where none is meant"
        )
    messages = [*task.messages[:last], {"role": "user", "content": items}]
    return replace(task, id=f"{task.id}/{name}", messages=messages)


def without_marks(text: str) -> str:
    """A model's answer as part of a question: its own <image> and <video> are words."""
    return MARKS.sub(lambda mark: mark[0][1:-1], text)


def check_no_marks(task: VlmTask, where: str, text: str) -> None:
    """Refuse a text of the data that would be read as an image's or video's place; raises TaskError."""
    if mark := MARKS.search(text):
        message = f"{where} holds {mark[0]}, which marks the place of a file: {shortened(text)!r}; leave it out"
        raise TaskError("media_in_side", task.id, message)


def _last_user_turn(task: VlmTask) -> int:
    places = [place for place, turn in enumerate(task.messages) if turn["role"] == "user"]
    if not places:
        roles = ", ".join(turn["role"] for turn in task.messages)
        raise TaskError("bad_prompt", task.id, f"the question has no user turn; its turns: {roles}")
    return places[-1]


@dataclass
class LoadedMedia:
    """Images and frames of one task, read once for all questions about it."""

    images: Sequence[Image.Image]
    videos: Sequence[Frames]

    @classmethod
    def of(cls, policy: VlmPolicy, task: VlmTask) -> LoadedMedia:
        """Read them; raises TaskError."""
        return cls(task.load_images(), load_videos(task, policy.layout.patch_size) if task.videos else [])

    def encode(self, policy: VlmPolicy, task: VlmTask) -> Prompt:
        """A question about them as the model reads it; raises TaskError."""
        return policy.encode(task, images=self.images, videos=self.videos if task.videos else None)


@dataclass
class RowWriter:
    """Rows of a .jsonl file out of tasks; an image without a file of its own is written beside it, once a task."""

    media: str
    """Name of the folder beside the file."""
    _written: dict[str, list[Any]] = field(default_factory=dict)

    def row(self, source: VlmTask, asked: VlmTask, folder: Path) -> dict[str, Any]:
        """Columns prompt, images and videos of a question."""
        if source.id not in self._written:
            stem = f"{len(self._written):05d}"
            self._written[source.id] = [self._file(source, n, folder, stem) for n in range(len(source.images))]
        prompt: Any = asked.messages if asked.conversational or len(asked.messages) > 1 else question_text(asked)
        row: dict[str, Any] = {"prompt": prompt, "images": self._written[source.id]}
        if source.videos:
            row["videos"] = [_video_cell(source, clip) for clip in source.videos]
        return row

    def _file(self, task: VlmTask, number: int, folder: Path, stem: str) -> str:
        image = task.images[number]
        if isinstance(image, str) and not image.startswith("data:"):
            return str(Path(image).resolve())
        try:
            task.load_images()[number].save(folder / f"{stem}-{number}.png", compress_level=1)
        except TaskError as error:
            raise UserError(str(error)) from None
        return f"{self.media}/{stem}-{number}.png"


def _video_cell(task: VlmTask, clip: str | VideoClip) -> dict[str, Any]:
    source, options = (clip, {}) if isinstance(clip, str) else (clip.source, clip.options)
    if not isinstance(source, str):
        raise UserError(f"{task.id}: a video given as a list of frames cannot be written to a row; give a video file")
    return {"path": str(Path(source).resolve()), **options}
