"""What travels with VLM rollouts: prompts, stored once per group, and the tokens that were sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from mmrl.vlm.task import VlmTask

__all__ = ["Prompt", "VlmPayload"]


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

    def __len__(self) -> int:
        """Number of tokens P."""
        return self.input_ids.shape[0]

    @property
    def has_vision(self) -> bool:
        """Whether the prompt has an image or a video."""
        return self.pixel_values is not None or self.pixel_values_videos is not None

    def to(self, device: torch.device | str) -> Prompt:
        """Return the prompt with its pixels on a device; the small tables that rows are built from stay."""
        pixels = {
            name: value.to(device)
            for name in ("pixel_values", "pixel_values_videos")
            if (value := getattr(self, name)) is not None
        }
        moved = any(value is not getattr(self, name) for name, value in pixels.items())
        return dataclasses.replace(self, **pixels) if moved else self


@dataclass
class VlmPayload:
    """Prompts of N groups and responses of B rows."""

    prompts: list[Prompt]
    """One prompt for each group."""
    tasks: list[VlmTask]
    """The task of each group."""
    response_ids: Tensor
    """(B, T) int64, sampled tokens, right-padded; which of them count is the rollouts' mask."""
    texts: list[str]
    """The decoded response of each row, without control tokens."""
    finish: list[str]
    """Why each row ended: "eos", "stop" or "length"."""
    views: dict[str, list[Prompt | None]] = field(default_factory=dict)
    """Other forms of each group's prompt, such as "masked"; None where a group has no such form."""

    def __post_init__(self) -> None:
        rows, groups = self.response_ids.shape[0], len(self.prompts)
        for name, found, expected in (
            ("tasks", len(self.tasks), groups),
            ("texts", len(self.texts), rows),
            ("finish", len(self.finish), rows),
            *((f"views[{name!r}]", len(view), groups) for name, view in self.views.items()),
        ):
            if found != expected:
                raise ValueError(f"{name} has {found} entries; there are {rows} rows in {groups} groups.")

    def prompts_of(self, view: str) -> list[Prompt]:
        """Prompts of a view, one for each group.

        Args:
            view: "original" or a key of `views`.

        Returns:
            The view's prompts; a group that lacks the view is given its original prompt.

        Raises:
            ValueError: there is no such view.
        """
        if view == "original":
            return self.prompts
        if view not in self.views:
            known = ", ".join(["original", *self.views])
            raise ValueError(f"there is no view {view!r} of these prompts; there are: {known}.")
        pairs = zip(self.views[view], self.prompts, strict=True)
        return [prompt if other is None else other for other, prompt in pairs]

    def select(self, rows: Tensor, groups: Tensor) -> Self:
        """Keep rows (b,) and groups (n,), both int64 indices, in the order given."""
        row_list, group_list = rows.tolist(), groups.tolist()
        return dataclasses.replace(
            self,
            prompts=[self.prompts[group] for group in group_list],
            tasks=[self.tasks[group] for group in group_list],
            response_ids=self.response_ids[rows],
            texts=[self.texts[row] for row in row_list],
            finish=[self.finish[row] for row in row_list],
            views={name: [view[group] for group in group_list] for name, view in self.views.items()},
        )

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Join payloads: the rows and the groups of each part follow those of the part before."""
        width = max(part.response_ids.shape[1] for part in parts)
        names = dict.fromkeys(name for part in parts for name in part.views)
        return cls(
            prompts=[prompt for part in parts for prompt in part.prompts],
            tasks=[task for part in parts for task in part.tasks],
            response_ids=torch.cat([_widen(part.response_ids, width) for part in parts]),
            texts=[text for part in parts for text in part.texts],
            finish=[reason for part in parts for reason in part.finish],
            views={
                name: [prompt for part in parts for prompt in part.views.get(name, [None] * len(part.prompts))]
                for name in names
            },
        )

    def to(self, device: torch.device | str) -> Self:
        """Move prompts and responses to a device."""
        return dataclasses.replace(
            self,
            prompts=[prompt.to(device) for prompt in self.prompts],
            response_ids=self.response_ids.to(device),
            views={
                name: [None if prompt is None else prompt.to(device) for prompt in view]
                for name, view in self.views.items()
            },
        )


def _widen(ids: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(ids, (0, width - ids.shape[1]))
