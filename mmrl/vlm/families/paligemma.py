"""PaliGemma (arXiv 2407.07726): the prompt attends to all of itself, the response causally."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from mmrl.vlm.families.family import VlmFamily


@dataclass(frozen=True)
class PaliGemma(VlmFamily):
    """Token types distinguish prompt from response."""

    def token_inputs(self, types: Tensor, is_prompt: Tensor, accepted: Collection[str]) -> dict[str, Tensor]:
        """Types 0 for the prompt, 1 for the response."""
        return {"token_type_ids": (~is_prompt).long()}


FAMILY = PaliGemma()
