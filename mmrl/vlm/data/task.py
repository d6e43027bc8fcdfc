"""Questions with images and videos, and errors that concern a single question."""

from __future__ import annotations

import base64
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeAlias

import numpy as np
from PIL import Image, ImageDraw

from mmrl.core.state import Tally
from mmrl.errors import UserError
from mmrl.fields import UNSET, bounded, only_with, rare
from mmrl.files import expanded, is_file, without_scheme
from mmrl.hub.foreign import MalformedError, to_rgb
from mmrl.hub.images import (
    MAX_IMAGE_PIXELS,
    ImageError,
    check_pixels,
    decode_image,
    read_image_file,
    resize_image,
    upright,
)
from mmrl.hub.tables import ArrowImage, BadRowError
from mmrl.hub.video_reading import VideoError
from mmrl.hub.video_sampling import FILE_OPTIONS, FRAME_LIST_OPTIONS, Frames, frame_times, sample_file, sample_frames
from mmrl.rewards import RewardResult, RewardSum, TrainerState
from mmrl.rewards.sum import IMAGES, reward_columns, tell_renamed
from mmrl.vlm.families import MEDIA_TOKENS

LOGGER = logging.getLogger("mmrl")
LONGEST_NAME = 255
"""Maximum characters in a file name on common file systems."""


SOURCE_KEYS = ("video", "path", "url", "frames")
GIVEN = ("completion_ids", "completion_lengths")
"""Columns about the sampled responses that are passed to reward functions."""
TRIED_ANSWERS = 64
"""Number of correct answers, spread over a dataset, that built-in rewards parse before the run."""


FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm")
"""Names of frames; a GIF is a video."""


OPEN_THINK = re.compile(r"<think>\s*\Z")
"""A `<think>` at the end of a text, which opens a thought."""
MAY_BE_ZERO = ("video_start", "video_end")
STRIP_COLUMNS, STRIP_ROWS = 4, 4
"""Frames per strip and strips per video; longer videos are shown by evenly spaced frames."""
CELL, MARGIN, CAPTION = 112, 2, 16
"""Pixels: width of a frame with its margins, each margin, and height of its time."""
GROUND, INK = (24, 26, 30), (235, 235, 235)


class TaskError(BadRowError):
    """A task that cannot be used; it is counted by kind, logged and skipped. `place` is the id of the task."""


class Skipped(Tally):
    """Number of skipped questions, by kind."""

    def note(self, error: TaskError) -> None:
        """Count a question, and log the first of each kind."""
        if not self[error.kind]:
            LOGGER.warning("question skipped (%s): %s", error.kind, error)
        self[error.kind] += 1


class StoredImage(Protocol):
    """An image that is read from its dataset on demand."""

    def read(self) -> Any:
        """Return the dataset's cell: a path, bytes, a {"bytes", "path"} mapping or a PIL image."""


ImageSource: TypeAlias = "Image.Image | str | bytes | Mapping[str, Any] | StoredImage"


@dataclass(frozen=True)
class VideoClip:
    """A video and the options for sampling its frames."""

    source: str | list[ImageSource]
    """Path of a file, or the frames."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """FILE_OPTIONS of `mmrl.hub.video_sampling` for a file, FRAME_LIST_OPTIONS for frames."""


@dataclass
class VlmTask:
    """A question as a chat, with its images, its videos and the other columns of its dataset."""

    id: str
    """Unique within the dataset: the `id` column, or the index of the row."""
    messages: list[dict[str, Any]]
    """Chat turns {"role", "content"}; content items are {"type": "text", "text"}, {"type": "image"} or
    {"type": "video"}, in the order in which the model reads them."""
    images: list[ImageSource] = field(default_factory=list)
    """One source for each image item, in the same order."""
    videos: list[str | VideoClip] = field(default_factory=list)
    """One file or clip for each video item, in the same order."""
    columns: dict[str, Any] = field(default_factory=dict)
    """All other columns of the row; the reward functions get them by name."""
    conversational: bool = False
    """Whether the dataset has chat turns; reward functions then also receive chat turns."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Images and video frames with more pixels are not decoded."""
    image_wh: list[tuple[int, int]] = field(default_factory=list)
    """(width, height) that each image is resized to before the processor, which must not resize it again. Empty: the
    processor resizes."""
    points_in_pixels: bool = True
    """Whether points are pixels of `image_wh`; the processor must then report the sizes of images."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of functions that the chat template describes to the model."""

    def load_images(self) -> list[Image.Image]:
        """Open the images as RGB, resized to `image_wh` if that is set; raises TaskError."""
        images = [
            open_image(source, self.id, f"image {number} of {len(self.images)}", self.max_image_pixels)
            for number, source in enumerate(self.images, start=1)
        ]
        if not self.image_wh:
            return images
        # the processor must not resize again, or boxes and points would no longer fit
        return [resize_image(image, size) for image, size in zip(images, self.image_wh, strict=True)]

    def shown_frames(self, frames: Any, number: int) -> Any:
        """The frames of video `number` (from 0) that the model sees, given the decoded frames."""
        return frames

    @property
    def answer_start(self) -> str:
        """Fixed text at the start of the response; not sampled, but part of the response."""
        return ""


def open_image(
    source: ImageSource,
    task_id: str,
    where: str = "the image",
    max_pixels: int = MAX_IMAGE_PIXELS,
    *,
    still: bool = False,
) -> Image.Image:
    """Open one image source as RGB, upright and without transparency: an animation's first frame, unless `still`."""
    # sources nest: a table's cell holds a mapping, which holds a path
    name, raw = image_content(source, task_id, where, max_pixels)
    label = f"{where} ({shortened(name)})" if name else where
    if isinstance(raw, bytes) and not raw:
        raise TaskError("empty_image", task_id, f"{label} is empty (0 bytes)")
    try:
        if isinstance(raw, bytes):
            raw = decode_image(raw, max_pixels, "data.max_image_pixels")
        elif raw.width == 0 or raw.height == 0:
            raise TaskError("empty_image", task_id, f"{label} is {raw.width} x {raw.height} pixels")
        # again for images that were given as objects, which no header has announced
        check_pixels(raw.width, raw.height, max_pixels, "data.max_image_pixels")
        # cameras add views of another size to a JPEG, which is no animation
        if still and getattr(raw, "is_animated", False) and raw.format != "MPO":
            message = f"{label} is itself a video, an animated {raw.format}; give it as the path of a GIF or mp4 file"
            raise TaskError("bad_video", task_id, message)
        raw = upright(raw)
    except ImageError as error:
        raise TaskError("unreadable_image", task_id, f"{label} cannot be decoded: {error}") from None
    try:
        rgb: Image.Image = to_rgb(raw)
        return rgb
    except MalformedError as error:
        raise TaskError("unreadable_image", task_id, f"{label} has {error}") from None


def shortened(text: str, longest: int = 120) -> str:
    """Shorten a text for a message, keeping both ends."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}...{text[-longest // 4 :]} ({len(text)} characters)"


def no_such_file(path: str, kind: str) -> str:
    """Message for a missing image or video, or for a URL or base64 content where a path belongs."""
    if path.startswith(("http://", "https://")):
        return f"{shortened(path)} is a URL; download the {kind} and use the path of the file"
    if len(Path(path).name) > LONGEST_NAME:
        base64_start = f"data:{kind}/png;base64,"
        return f"{shortened(path)} is too long for a file path; base64 content must begin with {base64_start}"
    return f"{kind} file {shortened(path)} not found"


def check_no_media(task: VlmTask, column: str, text: str, kind: str) -> None:
    """Reject a given answer that contains an image or video token; raises TaskError."""
    found = next((token for token in MEDIA_TOKENS if token in text), None)
    if found is not None:
        raise TaskError(kind, task.id, f"column '{column}' contains {found}, which is not allowed in an answer")


def question_text(task: VlmTask) -> str:
    """Text of a task's last user turn, with <image> and <video> where its images and videos belong."""
    content = task.messages[last_user_turn(task)]["content"]
    return "".join(item["text"] if item["type"] == "text" else f"<{item['type']}>" for item in content)


def last_user_turn(task: VlmTask) -> int:
    """Index of a task's last user turn; raises TaskError if it has none."""
    users = [index for index, turn in enumerate(task.messages) if turn["role"] == "user"]
    if not users:
        roles = ", ".join(turn["role"] for turn in task.messages)
        raise TaskError("bad_prompt", task.id, f"the question has no user turn; its turns: {roles}")
    return users[-1]


def score_texts(
    rewards: RewardSum,
    state: TrainerState,
    tasks: Sequence[VlmTask],
    texts: Sequence[str],
    tokens: Sequence[list[int]],
) -> RewardResult:
    """Score responses with all rewards."""
    # in TRL's form: text or chat turns, as the data set has them
    turns = [_conversation(*row) for row in zip(tasks, texts, strict=True)]
    columns = columns_of(tasks, tokens)
    if rewards.reads_images:
        # the rows of a group share their task, so its images are opened once
        opened = {number: task.load_images() for number, task in {id(task): task for task in tasks}.items()}
        columns[IMAGES] = [opened[id(task)] for task in tasks]
    return rewards.score([prompt for prompt, _ in turns], [reply for _, reply in turns], columns, state)


def with_start(start: str, answer: str) -> str:
    """Prepend the given start to a response; if both have `<think>` at the seam, only one is kept."""
    # the prompt opened the thought, so the answer's own tag would be the second
    opened = OPEN_THINK.search(start)
    if opened is not None and answer.startswith("<think>"):
        return start[: opened.start()] + answer
    return start + answer


def columns_of(tasks: Sequence[VlmTask], tokens: Sequence[list[int]]) -> dict[str, list[Any]]:
    """Columns of the rows as lists, one entry per row, for reward functions."""
    own: tuple[list[Any], ...] = (list(tokens), [len(row) for row in tokens])
    given = dict(zip(GIVEN, own, strict=True))
    # names that rewards could not take are passed under another one
    passed = reward_columns(_names(tasks), given)
    return {other: [task.columns.get(name) for task in tasks] for name, other in passed.items()} | given


def _names(tasks: Sequence[VlmTask]) -> list[str]:
    return sorted({name for task in tasks for name in task.columns})


def _conversation(task: VlmTask, response: str) -> tuple[Any, Any]:
    """A question and a response in the form that reward functions receive, as in TRL."""
    response = with_start(task.answer_start, response)
    # text in, text out: TRL's functions of plain prompts expect strings
    if not task.conversational:
        return question_text(task), response
    turns = task.messages
    # plain strings without media, as TRL's text rewards expect; content items otherwise
    if not task.images and not task.videos:
        turns = [{**turn, "content": "".join(item["text"] for item in turn["content"])} for turn in turns]
    return turns, [{"role": "assistant", "content": response}]


def check_columns(rewards: RewardSum, data: Mapping[str, Sequence[VlmTask]]) -> None:
    """Check that every scored dataset has the columns of the rewards, and answers that they can parse."""
    for key, tasks in data.items():
        try:
            rewards.check_columns([*columns_of(tasks, []), IMAGES])
            tell_renamed(key, _names(tasks), GIVEN)
            # evenly spaced, since a data set may be sorted by kind of answer
            some = tasks[:: -(-len(tasks) // TRIED_ANSWERS)]
            rewards.check_answers([task.id for task in some], columns_of(some, [[]] * len(some)))
        except UserError as error:
            raise UserError(f"{key}: {error}") from error


def splits_by_key(splits: Mapping[str, Sequence[VlmTask]]) -> dict[str, Sequence[VlmTask]]:
    """Held-out questions by their configuration key."""
    return {f"eval_data.{name}": tasks for name, tasks in splits.items()}


@dataclass
class VideoOptions:
    """Which frames of a video file the model sees; options in a row override these."""

    fps: float | None = rare(only_with(bounded(None, above=0), nframes=UNSET))
    """Frames per second. Default: 2, as in qwen-vl-utils."""
    nframes: int | None = rare(bounded(None, at_least=2))
    """Number of frames, rounded to an even number; replaces `fps`."""
    min_frames: int | None = rare(bounded(None, at_least=2))
    """Minimum number of frames when sampling by `fps`, if the video has that many. Default: 4."""
    max_frames: int | None = rare(bounded(None, at_least=2))
    """Maximum number of frames when sampling by `fps`, or of a list of frames. Default: 768."""
    min_pixels: int | None = rare(bounded(None, at_least=1))
    """Minimum frame size in pixels; smaller frames are enlarged. Default: 128 tokens."""
    max_pixels: int | None = rare(bounded(None, at_least=1))
    """Maximum frame size in pixels; larger frames are reduced. Default: 768 tokens, fewer for videos with many
    frames."""
    total_pixels: int | None = rare(bounded(None, at_least=1))
    """Pixel budget of all frame pairs of a video. Default: 115,200 tokens."""

    def complete(self, clip: VideoClip) -> VideoClip:
        """A clip with these options as defaults."""
        # a list of frames is not sampled, so it takes none of the options of sampling
        fits = FILE_OPTIONS if isinstance(clip.source, str) else FRAME_LIST_OPTIONS
        # a row with one of the two overrides both, since they exclude each other
        set_here = () if not {"fps", "nframes"} & set(clip.options) else ("fps", "nframes")
        usual = {
            name: value
            for name, value in vars(self).items()
            if value is not None and name in fits and name not in set_here
        }
        return replace(clip, options={**usual, **clip.options})


def read_video_cell(cell: Any, folder: Path, place: str) -> list[VideoClip]:
    """List the videos of a row."""
    if cell is None or cell == "":
        return []
    # a list is ambiguous: several videos, or the frames of one
    several = isinstance(cell, list | tuple) and not _are_frames(cell)
    return [_clip(item, folder, place) for item in (cell if several else [cell])]


def load_videos(task: VlmTask, patch_size: int) -> list[Frames]:
    """Decode the frames of a task's videos that the model sees.

    Args:
        task: question with videos.
        patch_size: pixels on a side of one patch of the vision tower.

    Returns:
        Frames and their metadata, one pair a video.

    Raises:
        TaskError: a video cannot be used; the kind is one of `VIDEO_ERRORS` or of an image.
        UserError: qwen-vl-utils is not installed.
    """
    return [task.shown_frames(_load(task, number, patch_size), number) for number in range(len(task.videos))]


def _load(task: VlmTask, number: int, patch_size: int) -> Frames:
    video = task.videos[number]
    clip = video if isinstance(video, VideoClip) else VideoClip(video)
    try:
        if isinstance(clip.source, str):
            path = without_scheme(clip.source)
            return sample_file(path, clip.options, patch_size, task.max_image_pixels)
        frames = clip.source
        images = (
            open_image(frame, task.id, f"frame {place} of video {number + 1}", task.max_image_pixels, still=True)
            for place, frame in enumerate(frames, start=1)
        )
        return sample_frames(images, len(frames), clip.options, patch_size)
    except VideoError as error:
        name = f" ({shortened(clip.source)})" if isinstance(clip.source, str) else ""
        raise TaskError(error.kind, task.id, f"video {number + 1} of {len(task.videos)}{name}: {error}") from None


def image_content(source: Any, task_id: str, where: str, max_pixels: int) -> tuple[str, Image.Image | bytes]:
    """Resolve a source to a PIL image or the bytes of an image file, with a name for error messages."""
    if isinstance(source, Image.Image):
        return "", source
    if isinstance(source, bytes | bytearray | memoryview):
        return "", bytes(source)
    if isinstance(source, str | Path):
        return _read_file(str(source), task_id, where, max_pixels)
    if isinstance(source, Mapping):
        # bytes win: a path in the same cell may be where they came from
        inner = source.get("path") if source.get("bytes") is None else source["bytes"]
        if inner is None:
            raise TaskError("missing_image", task_id, f"{where} contains neither bytes nor a path")
        return image_content(inner, task_id, where, max_pixels)
    if hasattr(source, "read"):
        return image_content(source.read(), task_id, where, max_pixels)
    found = "nothing" if source is None else f"a {type(source).__name__}"
    message = f"{where} is {found}; expected a PIL image, a path, bytes or a mapping with bytes or path"
    raise TaskError("missing_image", task_id, message)


def _read_file(path: str, task_id: str, where: str, max_pixels: int) -> tuple[str, bytes]:
    if path.startswith("data:"):
        # data URIs are content, not paths
        head, _, body = path.partition(",")
        try:
            return head, base64.b64decode(body, validate=True)
        except ValueError as error:
            raise TaskError("unreadable_image", task_id, f"{where}: broken data URI ({error})") from None
    path = without_scheme(path)
    if not is_file(path):
        raise TaskError("missing_image", task_id, f"{where}: {no_such_file(path, 'image')}")
    try:
        return path, read_image_file(Path(path), max_pixels)
    except (OSError, ValueError) as error:
        raise TaskError("unreadable_image", task_id, f"{where}: cannot read {shortened(path)} ({error})") from None


def _clip(value: Any, folder: Path, place: str) -> VideoClip:
    options: dict[str, Any] = {}
    if hasattr(value, "read") and not isinstance(value, Image.Image):
        value = value.read()
    if isinstance(value, Mapping):
        given = {key: item for key, item in value.items() if item is not None}
        # the first key that is there: rows of tables have all columns, most of them null
        key = next((key for key in SOURCE_KEYS if key in given), None)
        if key is None:
            raise _bad(place, f"a mapping with {', '.join(map(str, given)) or 'nothing'}")
        if key == "path" and given.get("bytes") is not None:  # the path is where they came from
            raise _bad(place, "stored as bytes, which are not read")
        value = given.pop(key)
        options = {name: item for name, item in given.items() if name not in SOURCE_KEYS and name != "bytes"}
    if isinstance(value, str | PurePath) and str(value):
        return VideoClip(_located(str(value), folder), _checked(options, FILE_OPTIONS, place))
    if isinstance(value, list | tuple) and _are_frames(value):
        if "fps" in options:  # a list of frames is not sampled again: its rate says how the frames were sampled
            options["sample_fps"] = options.pop("fps")
        frames = [_located_frame(item, folder) for item in value]
        return VideoClip(frames, _checked(options, FRAME_LIST_OPTIONS, place))
    raise _bad(place, f"a {type(value).__name__}")


def _bad(place: str, found: str) -> TaskError:
    keys = ", ".join(SOURCE_KEYS)
    message = f"a video is {found}; expected a path, a list of images or a mapping with one of these under {keys}"
    return TaskError("bad_video", place, message)


def _are_frames(items: Sequence[Any]) -> bool:
    """Whether a list contains images; only its first item is read from a table."""
    if items and hasattr(items[0], "read"):
        items = [items[0].read()]
    return bool(items) and all(_is_frame(item) for item in items)


def holds_images(cell: Any) -> bool:
    """Whether a cell of a table is an image or a list of images, by its kind or by the name of its file."""
    return _are_frames(cell if isinstance(cell, list | tuple) else [cell])


def _is_frame(value: Any) -> bool:
    if isinstance(value, str):
        # a name of an image file, since any text may be a path
        return value.startswith("data:image") or value.lower().endswith(FRAME_SUFFIXES)
    if isinstance(value, Mapping):
        path = value.get("path")
        return _is_frame(path) if isinstance(path, str) else value.get("bytes") is not None
    return isinstance(value, Image.Image | bytes)


def _located_frame(item: Any, folder: Path) -> Any:
    # the folder is only known here, not where the table was read
    if isinstance(item, ArrowImage):
        return replace(item, folder=folder)
    return _located(item, folder) if isinstance(item, str) else item


def _located(path: str, folder: Path) -> str:
    if path.startswith(("data:", "http://", "https://")):
        return path
    return str(folder / expanded(without_scheme(path)))


def _checked(options: dict[str, Any], known: tuple[str, ...], place: str) -> dict[str, Any]:
    for name, value in options.items():
        if name not in known:
            raise TaskError(
                "bad_video", place, f"a video has an unknown option {name!r}; available: {', '.join(known)}"
            )
        # bool is a number in Python
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (value == 0 and name not in MAY_BE_ZERO):
            raise TaskError("bad_video", place, f"a video has {name}={value!r}; it must be a positive number")
    if {"fps", "nframes"} <= set(options):
        raise TaskError("bad_video", place, "a video has both fps and nframes; use one of them")
    return options


TASK_ERRORS: dict[str, str] = {
    "invalid_json": "A line is not a JSON object, is too long or contains half of a surrogate pair.",
    "missing_prompt": "The row has no question.",
    "bad_prompt": "The question is neither a text nor a list of chat turns with role and content.",
    "missing_answer": "The row has no answer, although the dataset has an answer column.",
    "missing_image": "The row has no image, or its image file does not exist.",
    "placeholder_mismatch": (
        "The number of <image> or <video> markers in the text differs from the number of files in the row."
    ),
    "empty_image": "An image has zero bytes or zero pixels.",
    "unreadable_image": "An image cannot be decoded or has more than data.max_image_pixels.",
    "empty_answer": "A given answer has no text.",
    "long_answer": "A given answer is too long for the model's positions or for masked-diffusion responses.",
    "media_in_answer": "A given answer contains a placeholder token for images or videos.",
    "long_prompt": "The question has more than data.max_prompt_chars characters.",
    "missing_video": "A video file does not exist.",
    "bad_video": "A video is not a path, a list of frames, or a mapping with one of these and frame options.",
}


VIDEO_ERRORS = {
    "empty_video": "A video has zero bytes, no video track or no frame.",
    "unreadable_video": "A video cannot be decoded, or its frames differ in size.",
    "truncated_video": "A video is shorter than its index or header states.",
    "unusable_video": "The requested frames cannot be selected from a video, a list of frames is too long, or videos "
    "have unequal numbers of frames, which the model cannot read together.",
}
"""Errors found while decoding a video, in addition to `TASK_ERRORS`."""


def task_images(task: VlmTask, patch_size: int) -> list[Image.Image]:
    """Images of a task, then strips of its videos as sampled for patches of `patch_size` pixels."""
    strips = [strip for frames in load_videos(task, patch_size) for strip in frame_strips(frames)]
    return [*task.load_images(), *strips]


def frame_strips(frames: Frames) -> list[Image.Image]:
    """Lay out the frames of a video in strips of four, each frame with its time in seconds below."""
    pixels, times = frames[0], frame_times(frames)
    places = np.linspace(0, len(times) - 1, min(len(times), STRIP_COLUMNS * STRIP_ROWS))
    # rounding may name a frame twice
    shown = np.unique(places.round().astype(int)).tolist()
    cells = [_cell(pixels[number], times[number]) for number in shown]
    strips = []
    for first in range(0, len(cells), STRIP_COLUMNS):
        part: Sequence[Image.Image] = cells[first : first + STRIP_COLUMNS]
        strips.append(Image.new("RGB", (CELL * len(part), part[0].height), GROUND))
        for number, cell in enumerate(part):
            strips[-1].paste(cell, (number * CELL, 0))
    return strips


def _cell(pixels: object, time_s: float) -> Image.Image:
    """A frame (3, height, width) with its time."""
    frame = Image.fromarray(np.asarray(pixels).transpose(1, 2, 0).clip(0, 255).astype(np.uint8))
    # the longer side fits the cell
    scale = (CELL - 2 * MARGIN) / max(frame.size)
    width, height = (max(1, round(side * scale)) for side in frame.size)
    cell = Image.new("RGB", (CELL, height + 2 * MARGIN + CAPTION), GROUND)
    cell.paste(frame.resize((width, height)), ((CELL - width) // 2, MARGIN))
    ImageDraw.Draw(cell).text((CELL // 2, cell.height - CAPTION // 2), f"{time_s:.2f} s", INK, anchor="mm")
    return cell
