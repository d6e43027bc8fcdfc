"""A question with its images and videos, and the errors that concern only that question."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from PIL import Image

from mmrl.files import is_file
from mmrl.hub.images import MAX_IMAGE_PIXELS, ImageError, check_pixels, decode_image, read_image_file, resize_image

LONGEST_NAME = 255
"""Characters that the usual file systems allow in a name."""


class TaskError(Exception):
    """A single task that cannot be used; it is counted by kind, logged and skipped."""

    def __init__(self, kind: str, task_id: str, message: str) -> None:
        super().__init__(kind, task_id, message)
        self.kind = kind
        self.task_id = task_id
        self.message = message

    def __str__(self) -> str:
        return f"{self.task_id}: {self.message}"


class StoredImage(Protocol):
    """An image that is read from its data set when it is needed."""

    def read(self) -> Any:
        """Return what the data set holds: a path, bytes, a {"bytes", "path"} mapping or a PIL image."""


ImageSource: TypeAlias = "Image.Image | str | bytes | Mapping[str, Any] | StoredImage"


@dataclass(frozen=True)
class VideoClip:
    """A video, and which of its frames the model is shown."""

    source: str | list[ImageSource]
    """Path of a file, or the frames."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """FILE_OPTIONS of `mmrl.hub.video_sampling` for a file, FRAME_LIST_OPTIONS for frames."""


@dataclass
class VlmTask:
    """A question as a chat, with its images, its videos and the other columns of its data set."""

    id: str
    """Unique inside its data set: the `id` column, or the position of the row."""
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
    """Whether the data set has the question as chat turns, so that reward functions get chat turns too."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Images and frames of videos with more are not decoded."""
    image_wh: list[tuple[int, int]] = field(default_factory=list)
    """(width, height) that each image is resized to before the processor sees it, which must then leave it as it is;
    empty: the processor resizes."""

    def load_images(self) -> list[Image.Image]:
        """Open the images as RGB, resized to `image_wh` where it is set; raises TaskError."""
        images = [
            open_image(source, self.id, f"image {number} of {len(self.images)}", self.max_image_pixels)
            for number, source in enumerate(self.images, start=1)
        ]
        if not self.image_wh:
            return images
        return [resize_image(image, size) for image, size in zip(images, self.image_wh, strict=True)]

    def shown_frames(self, frames: Any, number: int) -> Any:
        """The frames of video `number` (from 0) as the model is shown them, from those that were decoded."""
        return frames

    @property
    def answer_start(self) -> str:
        """Text that the answer begins with, not sampled; it counts as part of the answer."""
        return ""


def open_image(
    source: ImageSource, task_id: str, where: str = "the image", max_pixels: int = MAX_IMAGE_PIXELS
) -> Image.Image:
    """Open one image source as RGB, upright and without transparency."""
    name, raw = _resolve(source, task_id, where, max_pixels)
    label = f"{where} ({shortened(name)})" if name else where
    if isinstance(raw, bytes) and not raw:
        raise TaskError("empty_image", task_id, f"{label} has zero bytes")
    try:
        if isinstance(raw, bytes):
            raw = decode_image(raw, max_pixels, "data.max_image_pixels")
        elif raw.width == 0 or raw.height == 0:
            raise TaskError("empty_image", task_id, f"{label} is {raw.width} x {raw.height} pixels")
        check_pixels(raw.width, raw.height, max_pixels, "data.max_image_pixels")
    except ImageError as error:
        raise TaskError("unreadable_image", task_id, f"{label} cannot be decoded: {error}") from None
    return _to_rgb(raw, task_id, label)


def shortened(text: str, longest: int = 120) -> str:
    """The two ends of a text that is too long for a message."""
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}...{text[-longest // 4 :]} ({len(text)} characters)"


def _resolve(source: Any, task_id: str, where: str, max_pixels: int) -> tuple[str, Image.Image | bytes]:
    """Follow a source to a PIL image or to the bytes of an image file, with a name for the errors."""
    if isinstance(source, Image.Image):
        return "", source
    if isinstance(source, bytes | bytearray | memoryview):
        return "", bytes(source)
    if isinstance(source, str | Path):
        return _read_file(str(source), task_id, where, max_pixels)
    if isinstance(source, Mapping):
        inner = source.get("path") if source.get("bytes") is None else source["bytes"]
        if inner is None:
            raise TaskError("missing_image", task_id, f"{where} holds neither bytes nor a path")
        return _resolve(inner, task_id, where, max_pixels)
    if hasattr(source, "read"):
        return _resolve(source.read(), task_id, where, max_pixels)
    found = "nothing" if source is None else f"a {type(source).__name__}"
    message = f"{where} is {found}; expected a PIL image, a path, bytes or a mapping with bytes or path"
    raise TaskError("missing_image", task_id, message)


def _read_file(path: str, task_id: str, where: str, max_pixels: int) -> tuple[str, bytes]:
    if path.startswith("data:"):
        head, _, body = path.partition(",")
        try:
            return head, base64.b64decode(body, validate=True)
        except ValueError as error:
            raise TaskError("unreadable_image", task_id, f"{where}: broken data URI ({error})") from None
    if path.startswith(("http://", "https://")):
        message = f"{where} is the address {shortened(path)}; download it and give the file's path"
        raise TaskError("missing_image", task_id, message)
    path = path.removeprefix("file://")
    if not is_file(path):
        raise TaskError("missing_image", task_id, f"{where}: {no_such_file(path, 'image')}")
    try:
        return path, read_image_file(Path(path), max_pixels)
    except (OSError, ValueError) as error:
        raise TaskError("unreadable_image", task_id, f"{where}: cannot read {shortened(path)} ({error})") from None


def no_such_file(path: str, kind: str) -> str:
    """Message for a missing image or video, or for base64 content where a path belongs."""
    if len(Path(path).name) > LONGEST_NAME:
        base64_start = f"data:{kind}/png;base64,"
        return f"{shortened(path)} is too long for the path of a file; content in base64 begins with {base64_start}"
    return f"there is no {kind} file {shortened(path)}"


def _to_rgb(image: Image.Image, task_id: str, label: str) -> Image.Image:
    """Convert to RGB: transparency onto white (as qwen-vl-utils does), 16-bit greys scaled, not clipped."""
    try:
        if image.mode.startswith("I"):
            low, high = (float(value) for value in image.convert("F").getextrema())  # type: ignore[arg-type]
            if low < 0 or high > 65535:
                raise ValueError(f"32-bit values from {low:g} to {high:g}; save it with 8 or 16 bits")
            return image.convert("F").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
        if image.mode == "F":
            raise ValueError("floating-point pixels have no known range; save it with 8 bits a channel")
        if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
            image = image.convert("RGBA")
            white = Image.new("RGB", image.size, (255, 255, 255))
            white.paste(image, mask=image.getchannel("A"))
            return white
        return image.convert("RGB")
    except (ValueError, OSError) as error:
        raise TaskError("unreadable_image", task_id, f"{label} has mode {image.mode}: {error}") from None


TASK_ERRORS: dict[str, str] = {
    "invalid_json": "A line is not a JSON object, too long or holds half of a surrogate pair.",
    "missing_prompt": "The row has no question.",
    "bad_prompt": "The question is neither a text nor a list of chat turns with role and content.",
    "missing_answer": "The row has no answer although the data set has an answer column.",
    "missing_image": "The row has no image, or the file it names does not exist.",
    "placeholder_mismatch": "The text has more or fewer <image> or <video> places than the row has files.",
    "empty_image": "An image has zero bytes or zero pixels.",
    "unreadable_image": "An image cannot be decoded or has more than data.max_image_pixels.",
    "long_prompt": "The question has more than data.max_prompt_chars characters.",
    "missing_video": "A video file does not exist.",
    "bad_video": "A video is neither a path nor a list of frames nor a mapping of these with options for its frames.",
}
