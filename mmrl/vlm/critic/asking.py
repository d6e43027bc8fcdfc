"""Questions about the answers to a question: the same images and earlier turns, another last user turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.vlm.prompts import MARKS, split_marks
from mmrl.vlm.task import TaskError, VideoClip, VlmTask, shortened


def question_text(task: VlmTask) -> str:
    """Text of a task's last user turn, with <image> and <video> where its images and videos belong."""
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
            f"the new question marks {media or 'nothing'}, the task's own {wanted or 'nothing'}: a text of the data "
            "holds <image> or <video> where none is meant"
        )
        raise TaskError("placeholder_mismatch", task.id, message)
    messages = [*task.messages[:last], {"role": "user", "content": items}]
    return replace(task, id=f"{task.id}/{name}", messages=messages)


def without_marks(text: str) -> str:
    """A model's answer as part of a question: its own <image> and <video> are words."""
    return MARKS.sub(lambda mark: mark[0][1:-1], text)


def check_no_marks(task: VlmTask, where: str, text: str) -> None:
    """Refuse a text of the data that would be read as the mark of an image or video; raises TaskError."""
    if mark := MARKS.search(text):
        message = f"{where} holds {mark[0]}, which marks the place of a file: {shortened(text)!r}; leave it out"
        raise TaskError("media_in_side", task.id, message)


def _last_user_turn(task: VlmTask) -> int:
    users = [index for index, turn in enumerate(task.messages) if turn["role"] == "user"]
    if not users:
        roles = ", ".join(turn["role"] for turn in task.messages)
        raise TaskError("bad_prompt", task.id, f"the question has no user turn; its turns: {roles}")
    return users[-1]


@dataclass
class RowWriter:
    """Rows of a .jsonl file from tasks; an image without a file of its own is written once a task."""

    media: str
    """Name of the media folder next to the file."""
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
