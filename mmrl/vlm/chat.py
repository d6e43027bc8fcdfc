"""From a task to a tokenised prompt: chat template, pixels, placeholder tokens and rotary positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image
from torch import Tensor

from mmrl.errors import UserError
from mmrl.hub.video_sampling import Frames
from mmrl.vlm.payload import Prompt
from mmrl.vlm.rotary import rotary_positions, split_frames
from mmrl.vlm.task import TaskError, VlmTask
from mmrl.vlm.video_input import load_videos

MARK = "\u2063turn\u2063"
"""Stands for the text of earlier turns where the template is rendered; no question holds it."""


class PromptTooLong(TaskError):  # noqa: N818 - named after what it is, like the kinds of TaskError
    """A prompt with more tokens than the model or the settings allow."""

    def __init__(self, task_id: str, tokens: int, limit: int, source: str) -> None:
        message = (
            f"the prompt has {tokens} tokens, {source} is {limit}; "
            "lower model.max_pixels, shorten the text or raise the limit"
        )
        super().__init__("prompt_too_long", task_id, message)
        self.tokens = tokens
        self.limit = limit


@dataclass(frozen=True)
class PromptLayout:
    """Sizes of a model that the encoding of prompts depends on."""

    patch_size: int
    """Pixels on a side of one patch."""
    max_tokens: int
    """Longest prompt in tokens."""
    limit_source: str
    """Name of the setting that `max_tokens` comes from, for errors."""
    merge_size: int
    """Patches on a side that the vision tower merges into one token."""
    tokens_per_second: float | None
    """Rotary positions that a video advances in a second; None where timestamps stand between its frames."""


def encode_prompt(
    task: VlmTask,
    processor: Any,
    layout: PromptLayout,
    images: Sequence[Image.Image] | None = None,
    videos: Sequence[Frames] | None = None,
) -> Prompt:
    """Turn a task, with other images or frames where they are given, into the model's tokens, pixels and positions."""
    text = _render(task, processor, task.messages, add_generation_prompt=True)
    return _encode(task, text + task.answer_start, processor, layout, images, videos)


def encode_turn(
    task: VlmTask, processor: Any, layout: PromptLayout, *, answered: bool, images: Sequence[Image.Image] | None = None
) -> Prompt:
    """Turn the user's next message into the tokens between two answers; `answered`: the first has its end token."""
    before = [{"role": "user", "content": MARK}, {"role": "assistant", "content": MARK}]
    whole = _render(task, processor, before + task.messages, add_generation_prompt=True).rpartition(MARK)[2]
    alone = _render(task, processor, before, add_generation_prompt=False).rpartition(MARK)[2]
    end = processor.tokenizer.eos_token
    if not alone.startswith(end) or not whole.startswith(end):
        message = f"the chat template does not end the assistant's turn with the end token {end}"
        raise TaskError("bad_prompt", task.id, message)
    return _encode(task, whole.removeprefix(end) if answered else whole, processor, layout, images)


def _encode(
    task: VlmTask,
    text: str,
    processor: Any,
    layout: PromptLayout,
    images: Sequence[Image.Image] | None,
    videos: Sequence[Frames] | None = None,
) -> Prompt:
    loaded = task.load_images() if images is None else list(images)
    for token, count, kind in (
        (processor.image_token, len(loaded), "images"),
        (processor.video_token, len(task.videos), "videos"),
    ):
        if (found := text.count(token)) != count:  # a question may also hold a literal one
            message = f"the rendered prompt has {found} {token} for {count} {kind}"
            raise TaskError("placeholder_mismatch", task.id, message)
    frames = load_videos(task, layout.patch_size) if videos is None else list(videos)
    inputs = _process(task, processor, text, loaded, frames)
    _check_sizes(task, inputs.get("image_grid_thw"), layout.patch_size)
    ids, types = inputs["input_ids"][0], inputs["mm_token_type_ids"][0]
    if len(ids) > layout.max_tokens:
        raise PromptTooLong(task.id, len(ids), layout.max_tokens, layout.limit_source)
    positions = _positions(inputs, layout)
    return Prompt(
        input_ids=ids,
        mm_token_type_ids=types,
        position_ids=positions,
        next_position=int(positions.max()) + 1,
        pixel_values=inputs.get("pixel_values"),
        image_grid_thw=inputs.get("image_grid_thw"),
        pixel_values_videos=inputs.get("pixel_values_videos"),
        video_grid_thw=inputs.get("video_grid_thw"),
        text=text,
    )


def _render(task: VlmTask, processor: Any, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    try:
        rendered = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # templates raise their own errors, for instance on an unknown role
        raise TaskError("bad_prompt", task.id, f"the chat template refuses it: {error}") from error
    return str(rendered)


def _process(task: VlmTask, processor: Any, text: str, images: Sequence[Any], frames: Sequence[Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if frames:
        sampling: dict[str, Any] = {
            "video_metadata": [metadata for _, metadata in frames],
            "do_sample_frames": False,
            "do_resize": False,  # the frames fit the pixel budget already
        }
        if hasattr(processor.video_processor, "cap_pixels_per_frame"):
            sampling["cap_pixels_per_frame"] = False  # only resizing reads it, and unset it logs a warning
        options = {"videos": [pixels for pixels, _ in frames], "videos_kwargs": sampling}
    try:
        return dict(processor(text=[text], images=list(images) or None, return_tensors="pt", **options))
    except ValueError as error:  # for instance an aspect ratio above 200
        raise TaskError("unusable_image", task.id, f"the image processor refuses it: {error}") from error


def _check_sizes(task: VlmTask, grids: Tensor | None, patch_size: int) -> None:
    """Coordinates in a prompt or an answer are pixels of `image_wh`, so the model must see exactly that size."""
    if not task.image_wh or grids is None:
        return
    found = [(int(width) * patch_size, int(height) * patch_size) for _, height, width in grids.tolist()]
    if found != [tuple(size) for size in task.image_wh]:
        sizes = " and ".join(", ".join(f"{w} x {h}" for w, h in pairs) for pairs in (task.image_wh, found))
        raise UserError(
            f"{task.id}: image and model size differ, {sizes} pixels: the processor resizes again; give the model the "
            "pixel budget of the data (model.min_pixels, model.max_pixels) and the factor of its family"
        )


def _positions(inputs: dict[str, Any], layout: PromptLayout) -> Tensor:
    videos, steps = inputs.get("video_grid_thw"), []
    if videos is not None and layout.tokens_per_second is not None:
        seconds = inputs.get("second_per_grid_ts")
        steps = [layout.tokens_per_second * s for s in ([1] * len(videos) if seconds is None else seconds)]
    elif videos is not None:
        videos = split_frames(videos)
    types = inputs["mm_token_type_ids"][0]
    return rotary_positions(types, layout.merge_size, inputs.get("image_grid_thw"), videos, steps)


PROMPT_ERRORS: dict[str, str] = {
    "prompt_too_long": "The prompt has more tokens than model.max_prompt_tokens or the model's positions.",
    "unusable_image": "An image has a shape that the image processor refuses.",
}
