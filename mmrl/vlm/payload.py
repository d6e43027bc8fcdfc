"""The payload of VLM rollouts: prompts, stored once per group, and the sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.core.payload import Payload, per_decision, per_group, per_row
from mmrl.vlm.task import VlmTask


@dataclass(eq=False)
class Prompt:
    """A tokenised question with its pixels and its rotary positions."""

    input_ids: Tensor
    """(P,) int64, with one placeholder token for each feature that the vision tower makes."""
    mm_token_type_ids: Tensor
    """(P,) int64: 0 text, 1 image, 2 video."""
    position_ids: Tensor
    """(3, P) int64, rotary positions along time, height and width."""
    next_position: int
    """Rotary position of the first response token, the same along all three axes."""
    pixel_values: Tensor | None
    """(patches, features) float32, all images of the prompt; None without images."""
    image_grid_thw: Tensor | None
    """(images, 3) int64, patches of each image along time, height and width."""
    pixel_values_videos: Tensor | None = None
    """(patches, features) float32, all videos of the prompt; None without videos."""
    video_grid_thw: Tensor | None = None
    """(videos, 3) int64, patches of each video along time, height and width."""
    text: str = ""
    """The question as the chat template rendered it, with one placeholder for each image or video."""
    parts: tuple[Prompt, ...] = ()
    """Prompts that this one was joined from, whose features it shares; see `join_prompts`. Its own pixels are None."""

    def __len__(self) -> int:
        """Number of tokens P."""
        return self.input_ids.shape[0]

    @property
    def has_vision(self) -> bool:
        """Whether the prompt has an image or a video."""
        own = self.pixel_values is not None or self.pixel_values_videos is not None
        return own or any(part.has_vision for part in self.parts)

    def to(self, device: torch.device | str) -> Prompt:
        """Return the prompt with its pixels on a device; the small tables that rows are built from stay."""
        pixels = {
            name: value.to(device)
            for name in ("pixel_values", "pixel_values_videos")
            if (value := getattr(self, name)) is not None
        }
        moved = any(value is not getattr(self, name) for name, value in pixels.items())
        return dataclasses.replace(self, **pixels) if moved else self


@dataclass(eq=False)
class Insert:
    """Tokens and images inside a response that were not sampled: what the model sees between two turns."""

    start: int
    """Index of its first token in the response."""
    prompt: Prompt
    """Its tokens and pixels; its positions are relative."""

    @property
    def stop(self) -> int:
        """Index of the token behind it."""
        return self.start + len(self.prompt)


@dataclass(eq=False)
class Context:
    """A response read from one token on behind another prompt, without its earlier tokens."""

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
    """Why each row ended: "eos", "stop" or "length"."""
    views: dict[str, list[Prompt | None]] = per_group(blank=None, default_factory=dict)
    """Other forms of each group's prompt, such as "masked"; None where a group has no such form."""
    inserts: list[tuple[Insert, ...]] = per_row(blank=(), default_factory=list)
    """Parts of each response that were not sampled, in order; their tokens are in `response_ids` and have mask 0."""
    contexts: list[tuple[Context, ...]] = per_row(blank=(), default_factory=list)
    """Contexts in which each response continues behind another prompt than its group's, in order."""

    def prompts_of(self, view: str) -> list[Prompt]:
        """Prompts of a view, one for each group."""
        if view == "original":
            return self.prompts
        if view not in self.views:
            known = ", ".join(["original", *self.views])
            raise ValueError(f"there is no view {view!r} of these prompts; there are: {known}.")
        pairs = zip(self.views[view], self.prompts, strict=True)
        return [prompt if other is None else other for other, prompt in pairs]


def join_prompts(parts: Sequence[Prompt]) -> Prompt:
    """Concatenate prompts; each keeps its own pixels and features."""
    if len(parts) == 1:
        return parts[0]
    positions, start = [], 0
    for part in parts:
        offset = start - int(part.position_ids.min())
        positions.append(part.position_ids + offset)
        start = part.next_position + offset
    return Prompt(
        input_ids=torch.cat([part.input_ids for part in parts]),
        mm_token_type_ids=torch.cat([part.mm_token_type_ids for part in parts]),
        position_ids=torch.cat(positions, 1),
        next_position=start,
        pixel_values=None,
        image_grid_thw=None,
        text="".join(part.text for part in parts),
        parts=tuple(leaf for part in parts for leaf in leaves(part)),
    )


def leaves(prompt: Prompt) -> tuple[Prompt, ...]:
    """The prompts that a prompt was joined from; itself where it was not joined."""
    return prompt.parts or (prompt,)


def token_lists(response_ids: Tensor, mask: Tensor) -> list[list[int]]:
    """The tokens (B, T) of each response without the padding, as reward functions get them."""
    lengths = mask.sum(1).int().tolist()
    return [row[:length] for row, length in zip(response_ids.tolist(), lengths, strict=True)]
