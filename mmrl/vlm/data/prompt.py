"""Tokenised prompts: chat template, media, placeholder tokens and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from mmrl.core.loss import Metric
from mmrl.core.payload import Payload, per_decision, per_group, per_row
from mmrl.errors import UserError
from mmrl.hub.building import first_line
from mmrl.hub.video_sampling import Frames
from mmrl.vlm.data.task import OPEN_THINK, TaskError, VlmTask, load_videos
from mmrl.vlm.data.turn_template import (
    HIDDEN,
    PLACEHOLDER,
    TemplateError,
    TurnTemplate,
    hide_in_turns,
    special_tokens,
)
from mmrl.vlm.families.family import IMAGE, TEXT, VIDEO, TokenTables


@dataclass(eq=False)
class Prompt:
    """A tokenised question with its images and videos and its positions."""

    input_ids: Tensor
    """(P,) int64, with one placeholder token for each feature that the vision tower makes."""
    mm_token_type_ids: Tensor
    """(P,) int64: 0 text, 1 image, 2 video."""
    position_ids: Tensor
    """(3, P) int64, positions along time, height and width; all three are equal if the model family has one axis."""
    next_position: int
    """Position of the first response token, the same along all axes."""
    media: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of the images and videos, by the names of the model's arguments, such as `pixel_values`
    and `image_grid_thw`; empty for text alone."""
    text: str = ""
    """The question as the chat template rendered it, with one placeholder for each image or video."""
    images: tuple[Image.Image, ...] = ()
    """The images themselves, if the layout keeps them for an engine that does its own preprocessing."""
    parts: tuple[Prompt, ...] = ()
    """Prompts that this prompt was joined from and whose features it shares; see `join_prompts`. Its own `media` is
    empty."""

    def __len__(self) -> int:
        """Number of tokens P."""
        return self.input_ids.shape[0]

    @property
    def answer_start(self) -> str:
        """The `<think>` at the end of some chat templates' prompts: the response begins inside its thinking."""
        found = OPEN_THINK.search(self.text)
        return "" if found is None else found[0]

    @property
    def has_vision(self) -> bool:
        """Whether the prompt has an image or a video."""
        return bool(self.media) or any(part.has_vision for part in self.parts)

    def to(self, device: torch.device | str) -> Prompt:
        """Return the prompt with its pixels on a device; the small tables that rows are built from stay."""
        # integer tables such as grids are read on the host, where rows are built
        media = {name: value.to(device) if value.is_floating_point() else value for name, value in self.media.items()}
        # the same object if nothing moved, since prompts are compared by identity
        moved = any(value is not self.media[name] for name, value in media.items())
        return dataclasses.replace(self, media=media) if moved else self


@dataclass(eq=False)
class Insert:
    """Tokens and images inside a response that were not sampled: the input between two turns."""

    start: int
    """Index of its first token in the response."""
    prompt: Prompt
    """Its tokens and pixels; its positions are relative."""

    @property
    def stop(self) -> int:
        """Index of the token after it."""
        return self.start + len(self.prompt)


@dataclass(eq=False)
class Context:
    """The rest of a response after another prompt, without its earlier tokens."""

    start: int
    """Index of that token in the response."""
    prompt: Prompt
    """The other prompt, such as the history without its oldest images."""


@dataclass
class VlmPayload(Payload):
    """Prompts of N groups and responses of B rows."""

    prompts: list[Prompt] = per_group()
    """The prompt of each group."""
    tasks: list[VlmTask] = per_group()
    """The task of each group."""
    response_ids: Tensor = per_decision()
    """(B, T) int64, sampled tokens, right-padded; those under the rollouts' mask count."""
    texts: list[str] = per_row()
    """The decoded response of each row, without control tokens."""
    finish: list[str] = per_row()
    """Reason why each row ended: "eos", "stop" or "length"."""
    views: dict[str, list[Prompt | None]] = per_group(blank=None, default_factory=dict)
    """Other forms of each group's prompt, such as "masked"; None if a group has no such form."""
    greedy: list[tuple[str, list[int]]] = per_group(blank=("", []), default_factory=list)
    """Text and tokens of the greedy answer to each group's prompt, if the objective uses it."""
    embeddings: dict[str, Tensor] = per_row(default_factory=dict)
    """The policy's states for each row, (B, H) each, by name, for rewards that see them."""
    inserts: list[tuple[Insert, ...]] = per_row(blank=(), default_factory=list)
    """Parts of each response that were not sampled, in order; their tokens in `response_ids` have mask 0."""
    contexts: list[tuple[Context, ...]] = per_row(blank=(), default_factory=list)
    """Later prompts that each response continues after, in order, instead of its group's prompt."""
    mixed: dict[str, Tensor] = per_decision(default_factory=dict)
    """Soft tokens, which are read as mixtures of embeddings: `soft` (B, T), 1 on these, and of each K tokens `ids`
    (B, T, K), with `weights` (B, T, K), and the `scores` (B, T, K) that these follow from."""

    def sampled_tokens(self, mask: Tensor) -> list[list[int]]:
        """The tokens of each response, without padding, for rows with a mask (B, T)."""
        return token_lists(self.response_ids, mask)

    def prompts_of(self, view: str) -> list[Prompt]:
        """Prompts of a view, one for each group."""
        if view == "original":
            return self.prompts
        if view not in self.views:
            known = ", ".join(["original", *self.views])
            raise ValueError(f"these prompts have no view {view!r}; available: {known}.")
        # a group without this form keeps its usual prompt
        pairs = zip(self.views[view], self.prompts, strict=True)
        return [prompt if other is None else other for other, prompt in pairs]

    @property
    def finished_fraction(self) -> Metric:
        """Fraction of the responses that ended before the length limit; NaN without any."""
        # rows without a reason were not sampled
        ended = [finish != "length" for finish in self.finish if finish]
        return Metric(float(sum(ended)), float(len(ended)))


def join_prompts(parts: Sequence[Prompt]) -> Prompt:
    """Concatenate prompts; each keeps its own pixels and features."""
    # nothing is left of an answer that ended inside its thought, once thoughts are dropped
    parts = [part for part in parts if len(part)]
    if len(parts) == 1:
        return parts[0]
    positions, start = [], 0
    # each part begins where the one before ended, on all axes
    for part in parts:
        offset = start - int(part.position_ids.min())
        positions.append(part.position_ids + offset)
        start = part.next_position + offset
    return Prompt(
        input_ids=torch.cat([part.input_ids for part in parts]),
        mm_token_type_ids=torch.cat([part.mm_token_type_ids for part in parts]),
        position_ids=torch.cat(positions, 1),
        next_position=start,
        text="".join(part.text for part in parts),
        # flat: a part may have been joined from parts itself
        parts=tuple(leaf for part in parts for leaf in leaves(part)),
    )


def leaves(prompt: Prompt) -> tuple[Prompt, ...]:
    """The prompts that a prompt was joined from; itself if it was not joined."""
    return prompt.parts or (prompt,)


def token_lists(response_ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The tokens (B, T) of each response without padding, as reward functions receive them."""
    lengths = mask.sum(1).int().tolist()
    return [row[:length] for row, length in zip(response_ids.tolist(), lengths, strict=True)]


TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "second_per_grid_ts")
"""Outputs of processors that describe tokens; all others describe images and videos."""


class PromptTooLong(TaskError):  # noqa: N818 - named after what it is, like the kinds of TaskError
    """A prompt with more tokens than the model or the settings allow."""

    def __init__(self, task_id: str, tokens: int, limit: int, source: str) -> None:
        message = (
            f"the prompt has {tokens} tokens, but {source} is {limit}; lower model.max_pixels, shorten the text or "
            "raise the limit"
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
    """Maximum prompt length in tokens."""
    limit_source: str
    """Name of the setting that `max_tokens` comes from, for error messages."""
    merge_size: int
    """Patches on a side that the vision tower merges into one token."""
    tables: TokenTables
    """Finds the types and positions of a prompt's tokens."""
    fits_frames: bool = True
    """Whether the processor leaves the frames of videos as they are; else it resizes them."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    keeps_images: bool = False
    """Whether prompts keep their images."""


def encode_prompt(
    task: VlmTask,
    processor: Any,
    layout: PromptLayout,
    images: Sequence[Image.Image] | None = None,
    videos: Sequence[Frames] | None = None,
) -> Prompt:
    """Turn a task into the model's tokens, pixels and positions, optionally with other images or frames.

    A turn of the assistant at the end is the start of its answer, which the model continues, as in TRL.
    """
    given = {"role": "assistant", "content": task.answer_start}
    hidden, [*messages, given] = hide_in_turns([*task.messages, given], processor.tokenizer, ())
    begun = messages[-1]["role"] == "assistant"
    form = {**layout.template, "add_generation_prompt": not begun, "continue_final_message": begun}
    text = _render(task, processor, messages, form)
    start = given["content"].removeprefix("<think>") if OPEN_THINK.search(text) else given["content"]
    whole = text + start
    return _encode(task, whole, hidden, processor, layout, images, videos, opens=_lacks_bos(whole, processor))


def encode_turn(task: VlmTask, turns: TurnTemplate, processor: Any, layout: PromptLayout, *, end: int | None) -> Prompt:
    """Turn further messages into the tokens between two answers; `end` is the token that ended the first, or None."""
    hidden, messages = hide_in_turns(task.messages, processor.tokenizer, ())
    calls = [str(turn.get("name", "")) for turn in messages if turn["role"] == "tool"]
    try:
        text = turns.follow(messages, end=end, tools=task.tools, calls=calls)
    except TemplateError as error:
        raise TaskError("bad_prompt", task.id, f"{turns.blame} rejects it: {error}") from error
    return _encode(task, text, hidden, processor, layout, None)


def encode_history(
    task: VlmTask,
    turns: TurnTemplate,
    processor: Any,
    layout: PromptLayout,
    known: dict[Any, Prompt],
    image_keys: Sequence[Any],
) -> Prompt:
    """Turn a whole conversation into the tokens before its next answer; its pieces are kept in `known`.

    Raises:
        TemplateError: the chat template rejects the conversation.
    """
    hidden, pieces = turns.render_history(task.messages, task.tools)
    token, parts, start = getattr(processor, "image_token", None), list[Prompt](), 0
    for piece in pieces:
        stop = start + (piece.count(token) if token else 0)
        used = tuple(hidden[int(number)] for number in PLACEHOLDER.findall(piece))
        opens = not parts and _lacks_bos(piece, processor)
        # a piece that was written before is one object, so that its images pass the vision tower once
        key = PLACEHOLDER.sub(HIDDEN, piece), used, tuple(image_keys[start:stop]), opens
        if key not in known:
            own = dataclasses.replace(task, images=task.images[start:stop])
            known[key] = _encode(own, piece, hidden, processor, layout, None, opens=opens)
        parts.append(known[key])
        start = stop
    if start != len(task.images):
        raise TaskError("placeholder_mismatch", task.id, f"its {len(task.images)} images have {start} places")
    return join_prompts(parts)


def _lacks_bos(text: str, processor: Any) -> bool:
    """Whether a conversation lacks the token that texts begin with, so that the processor adds it (LLaVA, Idefics2).

    Source: huggingface/transformers processing_utils.py (`apply_chat_template`); language models never add it.
    """
    bos = getattr(processor.tokenizer, "bos_token", None)
    return bos is not None and not text.startswith(bos)


def _encode(
    task: VlmTask,
    text: str,
    hidden: Sequence[str],
    processor: Any,
    layout: PromptLayout,
    images: Sequence[Image.Image] | None,
    videos: Sequence[Frames] | None = None,
    *,
    opens: bool = False,
) -> Prompt:
    loaded = task.load_images() if images is None else list(images)
    for name, count, kind in (("image_token", len(loaded), "images"), ("video_token", len(task.videos), "videos")):
        token = getattr(processor, name, None)
        if token is None and count:
            raise TaskError("placeholder_mismatch", task.id, f"it has {count} {kind}, which the model cannot read")
        if token is not None and (found := text.count(token)) != count:  # a question may also hold a literal one
            message = f"the rendered prompt has {found} {token} tokens for {count} {kind}"
            raise TaskError("placeholder_mismatch", task.id, message)
    frames = load_videos(task, layout.patch_size) if videos is None else list(videos)
    inputs = _process(task, processor, text, hidden, loaded, frames, resize=not layout.fits_frames, opens=opens)
    if loaded:
        _check_sizes(task, inputs.get("image_grid_thw"), layout.patch_size)
    ids = inputs["input_ids"][0]
    if len(ids) > layout.max_tokens:
        raise PromptTooLong(task.id, len(ids), layout.max_tokens, layout.limit_source)
    types, positions = layout.tables(inputs)
    if loaded and frames:
        check_mixture(task, processor, ids, types)
    return Prompt(
        input_ids=ids,
        mm_token_type_ids=types,
        position_ids=positions,
        next_position=int(positions.max()) + 1,
        media={name: value for name, value in inputs.items() if name not in TEXT_INPUTS and isinstance(value, Tensor)},
        text=PLACEHOLDER.sub(lambda found: hidden[int(found[1])], text),
        images=tuple(loaded) if layout.keeps_images else (),
    )


def check_mixture(task: VlmTask, processor: Any, ids: Tensor, types: Tensor) -> None:
    """Refuse images next to videos if the model takes one for the other; raises TaskError."""
    parts = (getattr(processor, name, None) for name in ("image_processor", "video_processor"))
    # SmolVLM's processor returns both under one name, so that the images are lost
    images, videos = ({*getattr(part, "model_input_names", ())} for part in parts)
    # GLM-4.1V has one token for both, and counts all of them for either
    tokens = {*ids[types == IMAGE].tolist()} & {*ids[types == VIDEO].tolist()}
    if images & videos or tokens:
        message = (
            f"it has images and videos, which {type(processor).__name__} cannot read in one question; pass the images "
            "as a video of frames, or ask with one kind"
        )
        raise TaskError("unusable_video", task.id, message)


def _render(task: VlmTask, processor: Any, messages: list[dict[str, Any]], form: Mapping[str, Any]) -> str:
    tools = {"tools": task.tools} if task.tools else {}
    try:
        rendered = processor.apply_chat_template(messages, tokenize=False, **form, **tools)
    except Exception as error:  # templates raise their own errors, for instance on an unknown role
        raise TaskError("bad_prompt", task.id, f"the chat template rejects it: {error}") from error
    if task.tools and task.tools[0]["function"]["name"] not in rendered:
        raise UserError(
            "the model's chat template does not show tools; remove them (conversation.tools, or the column `tools` of "
            "the data), or set model.chat_template to a template that shows them"
        )
    return str(rendered)


def _process(
    task: VlmTask,
    processor: Any,
    text: str,
    hidden: Sequence[str],
    images: Sequence[Any],
    frames: Sequence[Any],
    *,
    resize: bool,
    opens: bool,
) -> dict[str, Any]:
    # elsewhere the template has written the special tokens already
    options: dict[str, Any] = {} if opens else {"add_special_tokens": False}
    if frames:
        options |= _frame_options(processor, frames, resize=resize)
    spelled = [hidden[int(number)] for number in PLACEHOLDER.findall(text)]
    tokenizer = processor.tokenizer
    taken = [getattr(processor, name, None) for name in ("image_token", "video_token")]
    taken += [tokenizer.bos_token, tokenizer.eos_token] if opens else []
    # The processor tokenises one text: a control token that occurs nowhere else is the placeholder for those in texts.
    stand_in = next((token for token in special_tokens(tokenizer) if token not in text and token not in taken), "")
    if spelled and not stand_in:
        raise TaskError(
            "bad_prompt", task.id, f"its text contains {spelled[0]}, and the template uses every control token"
        )
    text = PLACEHOLDER.sub(stand_in, text)
    try:
        # one list per prompt: LLaVA-OneVision cuts an image that is alone in its prompt into tiles
        shown = [list(images)] if images else None
        inputs = dict(processor(text=[text], images=shown, return_tensors="pt", **options))
    except ValueError as error:  # for instance an aspect ratio above 200
        lengths = [len(pixels) for pixels, _ in frames]
        if len({*lengths}) > 1:  # InternVL and LLaVA-OneVision have one tensor for all videos
            message = (
                f"the processor rejects videos of {' and '.join(map(str, lengths))} frames together "
                f"({first_line(error)}); data.video.nframes gives all videos the same number"
            )
            raise TaskError("unusable_video", task.id, message) from error
        raise TaskError("unusable_image", task.id, f"the image processor rejects it: {error}") from error
    return inputs | _spelled(inputs, stand_in, spelled, tokenizer) if spelled else inputs


def _frame_options(processor: Any, frames: Sequence[Frames], *, resize: bool) -> dict[str, Any]:
    sampling: dict[str, Any] = {"video_metadata": [metadata for _, metadata in frames], "do_sample_frames": False}
    if not resize:
        sampling["do_resize"] = False  # the frames fit the pixel budget already
    if hasattr(processor.video_processor, "cap_pixels_per_frame"):
        sampling["cap_pixels_per_frame"] = False  # only resizing reads it, and unset it logs a warning
    return {"videos": [pixels for pixels, _ in frames], "videos_kwargs": sampling}


def _spelled(inputs: dict[str, Any], stand_in: str, spelled: Sequence[str], tokenizer: Any) -> dict[str, Tensor]:
    """Tokens (1, P) and their types, with each placeholder replaced by the characters of its control token."""
    number, left = tokenizer.convert_tokens_to_ids(stand_in), iter(spelled)
    ids: list[int] = []
    types: list[int] = []
    kinds = inputs.get("mm_token_type_ids", torch.full_like(inputs["input_ids"], TEXT))
    for token, kind in zip(inputs["input_ids"][0].tolist(), kinds[0].tolist(), strict=True):
        found = [token]
        if token == number:
            found = tokenizer.encode(next(left), add_special_tokens=False, split_special_tokens=True)
        ids += found
        types += [kind] * len(found)
    return {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.tensor([types])}


def _check_sizes(task: VlmTask, grids: Tensor | None, patch_size: int) -> None:
    """Coordinates in a prompt or an answer are pixels of `image_wh`, so the model must see exactly that size."""
    if not task.image_wh:
        return
    if grids is None and task.points_in_pixels:
        raise UserError(
            f"{task.id}: its points are pixels of the image as the model sees it, but this model's processor does not "
            "report that size (image_grid_thw); use a Qwen-VL model, or points in a relative space such as rel1000"
        )
    if grids is None:
        return
    found = [(int(width) * patch_size, int(height) * patch_size) for _, height, width in grids.tolist()]
    if found != [tuple(size) for size in task.image_wh]:
        sizes = " and ".join(", ".join(f"{w} x {h}" for w, h in pairs) for pairs in (task.image_wh, found))
        raise UserError(
            f"{task.id}: image and model size differ ({sizes} pixels), so the processor resizes again; give the model "
            "the pixel budget of the data (model.min_pixels, model.max_pixels) and the factor of its family"
        )
