"""A row's question as chat turns, with content items at the positions of its images and videos."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded, is_file, read_text, without_scheme
from mmrl.hub.tables import ArrowImage
from mmrl.vlm.data.task import ImageSource, TaskError, VideoClip, VlmTask, no_such_file, read_video_cell

MARKS = re.compile(r"(<image>|<video>)")
MEDIA = ("image", "video")
ROLES = {"human": "user", "gpt": "assistant"} | {
    role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")
}
"""Roles of turns, with ShareGPT's names; chat templates silently write any other name into the prompt."""
SOURCE_KEYS = ("bytes", "image", "video", "image_url", "url", "path")


@dataclass
class MediaCells:
    """The media cells of one row and how they are read."""

    images: Any
    videos: Any
    folder: Path
    marked: bool
    """Whether the dataset's texts mark where images go."""
    text_only: bool | None


def has_marks(prompt: Any) -> bool:
    """Whether a prompt cell marks where its images or videos go."""
    if isinstance(prompt, str):
        return MARKS.search(prompt) is not None
    if not isinstance(prompt, Sequence):
        return False
    contents = [turn.get("content") for turn in prompt if isinstance(turn, dict)]
    items = [item for content in contents if isinstance(content, list) for item in content]
    media = any(isinstance(item, dict) and _media_type(item) in MEDIA for item in items)
    return media or any(has_marks(content) for content in contents if isinstance(content, str))


def split_marks(text: str) -> list[dict[str, Any]]:
    """Split a text at `<image>` and `<video>` into content items, in order.

    Source: hiyouga/EasyR1 verl/utils/dataset.py (`_build_messages`).
    """
    items: list[dict[str, Any]] = []
    # the marks themselves are the odd parts of a split with a group
    for part in MARKS.split(text):
        if part in ("<image>", "<video>"):
            items.append({"type": part[1:-1]})
        elif part:
            items.append({"type": "text", "text": part})
    return items


def build_messages(
    prompt: Any, media: MediaCells, render: Callable[[str], str], place: str
) -> tuple[list[dict[str, Any]], list[ImageSource], list[VideoClip]]:
    """Turn the prompt and media cells of a row into chat turns, image sources and videos."""
    messages = _turns(prompt, render, place)
    items = [item for message in messages for item in message["content"]]
    # one image may be given without a list
    listed = list(media.images) if isinstance(media.images, list | tuple) else [media.images]
    column = [] if media.images is None or media.images == "" else listed
    images = [_locate(source, media.folder) for source in _take_inline("image", items, column, place) or column]
    videos = read_video_cell(_take_inline("video", items, media.videos, place) or media.videos, media.folder, place)
    marked = any(item["type"] in MEDIA for item in items)
    # no mark in the whole data set: media go before the first text
    if not marked and not media.marked and (images or videos):
        _put_media_first(messages, len(images), len(videos))
    elif not marked and not images and not _may_be_text_only(media):
        found = "its image cell is empty or missing" if media.images is None else "its image list is empty"
        message = f"the row has no image: {found}; set data.text_only=true if questions without images are intended"
        raise TaskError("missing_image", place, message)
    # every mark needs its file, and every file its mark
    _check_counts(messages, len(images), len(videos), place)
    _check_files(images, videos, place)
    return messages, images, videos


def split_conversation(turns: Any, place: str) -> tuple[Any, str | None]:
    """The turns before a final assistant turn, and its text; all turns and None if the last turn is another role's."""
    if not isinstance(turns, list) or not turns or _turn(turns[-1], str, place)["role"] != "assistant":
        return turns, None
    items = _turn(turns[-1], str, place)["content"]
    if any(item["type"] != "text" for item in items):
        raise TaskError("bad_prompt", place, "the assistant's last turn, which is the answer, contains more than text")
    return turns[:-1], "".join(item["text"] for item in items)


def last_turn(task: VlmTask, name: str, cell: Any) -> str:
    """The assistant's text of an answer given as chat turns, with or without the question's turns before it."""
    turns = cell if isinstance(cell, list) else []
    roles = [turn.get("role") if isinstance(turn, dict) else None for turn in turns]
    # templates may add a system turn, so it takes no part in the comparison
    asked = [turn["role"] for turn in task.messages if turn["role"] != "system"]
    before = [role for role in roles[:-1] if role != "system"]
    if not roles or roles[-1] != "assistant" or before not in ([], asked):
        expected = f"a text, or one assistant turn, optionally after the question's own turns ({', '.join(asked)})"
        found = f"the roles {', '.join(map(str, roles))}" if roles else f"a {type(cell).__name__}"
        raise TaskError("bad_side", task.id, f"column '{name}' has {found}; expected {expected}")
    _refuse_calls(turns[-1], "bad_side", task.id)
    content = turns[-1].get("content")
    items = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None for item in items]
    if not all(isinstance(text, str) for text in texts):
        raise TaskError(
            "bad_side", task.id, f"the assistant turn of column '{name}' contains something other than text"
        )
    return "".join(str(text) for text in texts)


def make_renderer(template: str | None) -> Callable[[str], str]:
    """A function that wraps a question's text in the format prompt."""
    if template is None:
        return lambda text: text
    render = make_template(template, ("content",), "data.format_prompt", "the question")
    return lambda text: render(content=text)


def read_template(template: str, option: str = "data.format_prompt") -> str:
    """The text of a template, which may be the path of a .jinja file."""
    if not template.endswith((".jinja", ".jinja2", ".j2")):
        return template
    if not is_file(expanded(template)):
        raise UserError(f"{option} is the file {template}, which does not exist")
    return read_text(expanded(template))


def make_template(
    template: str, names: Sequence[str], option: str, lost: str, further: Sequence[str] = ()
) -> Callable[..., str]:
    """A function that fills in a template; filled-in values are not read as templates themselves."""
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    template = read_template(template, option)
    places = {name: f"\N{SNOWMAN}{name}\N{SNOWMAN}" for name in (*names, *further)}
    try:
        compiled = SandboxedEnvironment(undefined=jinja2.StrictUndefined).from_string(template)
        sample = compiled.render(places)
    except jinja2.TemplateError as error:
        allowed = ", ".join(f"{{{{ {name} }}}}" for name in places)
        raise UserError(f"{option}: {error}; it may only use {allowed}") from None
    for name in names:
        if places[name] not in sample:
            raise UserError(f"{option} never uses {{{{ {name} }}}}, so {lost} would be lost")
    return compiled.render


def _turns(prompt: Any, render: Callable[[str], str], place: str) -> list[dict[str, Any]]:
    if prompt is None or (isinstance(prompt, str | list) and not prompt):
        raise TaskError("missing_prompt", place, "the question is empty")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise TaskError("missing_prompt", place, "the question is blank")
        if _is_written_chat(prompt):
            message = "the question is a string with chat turns in JSON; store the list itself (json.loads)"
            raise TaskError("bad_prompt", place, message)
        return [{"role": "user", "content": split_marks(render(prompt))}]
    if not isinstance(prompt, list):
        found = type(prompt).__name__
        raise TaskError("bad_prompt", place, f"the question is a {found}; expected a text or a list of turns")
    last_user = max((i for i, turn in enumerate(prompt) if _role(turn) == "user"), default=-1)
    unchanged = make_renderer(None)
    return [_turn(turn, render if i == last_user else unchanged, place) for i, turn in enumerate(prompt)]


def _is_written_chat(text: str) -> bool:
    if not text.lstrip().startswith("[{"):
        return False
    try:
        turns = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return all(isinstance(turn, dict) and {*turn} >= {*part} for turn in turns for part in [_parts(turn)])


def _parts(turn: dict[str, Any]) -> tuple[str, str]:
    """Names of a turn's role and content: ShareGPT's are from and value."""
    return ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")


def _role(turn: Any) -> Any:
    role = turn.get(_parts(turn)[0]) if isinstance(turn, dict) else None
    return ROLES.get(role, role) if isinstance(role, str) else None


def _refuse_calls(turn: Any, kind: str, place: str) -> None:
    """Refuse what a turn says next to its content, which nothing here reads; raises TaskError."""
    for key in ("tool_calls", "function_call", "reasoning_content"):
        if isinstance(turn, dict) and turn.get(key):
            message = f"a chat turn has {key}, which is not read and would be lost; write it into the content, as the "
            raise TaskError(kind, place, f"{message}model's chat template does")


def _turn(turn: Any, render: Callable[[str], str], place: str) -> dict[str, Any]:
    _refuse_calls(turn, "bad_prompt", place)
    content = turn.get(_parts(turn)[1]) if isinstance(turn, dict) else None
    role = _role(turn)
    if not isinstance(role, str) or not isinstance(content, str | list):
        raise TaskError("bad_prompt", place, f"a chat turn needs a role and a content, found {turn!r:.80}")
    if role not in ROLES.values():
        known = ", ".join(dict.fromkeys(ROLES.values()))
        raise TaskError("bad_prompt", place, f"a chat turn has the role {role!r}; expected: {known}")
    if isinstance(content, str):
        return {"role": role, "content": split_marks(render(content))}
    items = [_item(item, place) for item in content]
    texts = [item for item in items if item["type"] == "text"]
    if texts:
        texts[-1]["text"] = render(texts[-1]["text"])
    return {"role": role, "content": items}


def _item(item: Any, place: str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if isinstance(item, dict):
        kind = _media_type(item)
        if kind in MEDIA:
            source = next((item[key] for key in SOURCE_KEYS if item.get(key) is not None), None)
            if kind == "video" and source is not None:  # with the options of its frames
                source = {key: value for key, value in item.items() if key != "type"}
            return {"type": kind} if source is None else {"type": kind, "source": source}
        if isinstance(item.get("text"), str):
            return {"type": "text", "text": item["text"]}
    raise TaskError("bad_prompt", place, f"a content item must be text, image or video, found {item!r:.80}")


def _media_type(item: dict[str, Any]) -> Any:
    kind = item.get("type")
    return "image" if kind == "image_url" else kind


def _take_inline(kind: str, items: list[dict[str, Any]], cell: Any, place: str) -> list[Any]:
    """Media of one kind that are written into the chat items themselves; then the column must have none."""
    inline = [item.pop("source") for item in items if item["type"] == kind and "source" in item]
    if inline and cell:
        message = f"{kind}s are given both in the chat and in the column; use one of them"
        raise TaskError("placeholder_mismatch", place, message)
    return inline


def _locate(source: Any, folder: Path) -> Any:
    """Make relative paths start from the media folder; leave every other source as it is."""
    if isinstance(source, ArrowImage):
        return replace(source, folder=folder)
    if isinstance(source, dict):
        inner = next((source[key] for key in ("image", "image_url", "url") if source.get(key) is not None), None)
        if inner is not None:
            return _locate(inner, folder)
        relative = source.get("bytes") is None and isinstance(source.get("path"), str)
        return _locate(source["path"], folder) if relative else source
    if not isinstance(source, str) or source.startswith(("data:", "http://", "https://")):
        return source
    return str(folder / expanded(without_scheme(source)))


def _put_media_first(messages: list[dict[str, Any]], images: int, videos: int) -> None:
    """Put all media before the text of the first user turn.

    Source: huggingface/trl trl/data_utils.py (`prepare_multimodal_messages`).
    """
    turn = next((message for message in messages if message["role"] == "user"), messages[0])
    turn["content"] = [{"type": "image"}] * images + [{"type": "video"}] * videos + turn["content"]


def _may_be_text_only(media: MediaCells) -> bool:
    if media.text_only is not None:
        return media.text_only
    return media.marked or isinstance(media.images, list | tuple) or media.videos is not None


def _check_counts(messages: list[dict[str, Any]], images: int, videos: int, place: str) -> None:
    items = [item["type"] for message in messages for item in message["content"]]
    for kind, found in (("image", images), ("video", videos)):
        places = items.count(kind)
        if places != found:
            message = (
                f"the text has {places} <{kind}> place{'s' * (places != 1)} but the row has {found} "
                f"{kind}{'s' * (found != 1)}; the numbers must match"
            )
            raise TaskError("placeholder_mismatch", place, message)


def _check_files(images: list[Any], videos: list[VideoClip], place: str) -> None:
    """Find missing files before the run starts; reading them is left to the rollout."""
    files: list[tuple[str, Any]] = [("image", source) for source in images]
    for clip in videos:
        whole = isinstance(clip.source, str)
        files += [("video", clip.source)] if whole else [("image", frame) for frame in clip.source]
    for kind, source in files:
        if isinstance(source, int | float | list) or source is None:
            message = f"an image is {source!r:.40}; expected a PIL image, a path, bytes or a mapping with bytes or path"
            raise TaskError("missing_image", place, message)
        if isinstance(source, str) and not source.startswith("data:") and not is_file(source):
            raise TaskError(f"missing_{kind}", place, no_such_file(source, kind))
