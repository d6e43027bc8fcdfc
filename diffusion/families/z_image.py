"""Z-Image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import PATCH, Family, KohyaNames, LatentSides, Text, TextPart, scheduler_grid

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SIDE = 1024
"""Default size in pixels, as in the pipeline's call."""


class ZImageFamily(Family):
    """Z-Image: ragged tokens of Qwen3, lists instead of batches, time 1 - sigma and a velocity of opposite sign.

    The pipeline's guidance scale g corresponds to g + 1 here: it adds g times the difference to the positive half.
    """

    pipeline_class = "ZImagePipeline"
    summary = "Z-Image, Z-Image-Turbo"
    citation = "Z-Image, arXiv 2511.22699"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 512
    text_width = "cap_feat_dim"
    kohya = KohyaNames("", dotted=True)
    ragged = ("tokens",)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) of the prompt in its chat template."""
        # a new list on each call: the pipeline writes the template into it
        tokens, _ = self.pipeline.encode_prompt(
            [self.read_text(self.text_parts[0], prompt)],
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"tokens": tokens[0]}

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """Tokens of the prompt in its chat template."""
        message = [{"role": "user", "content": self.read_text(part, prompt)}]
        options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": True}
        return self.tokenized(part, self.pipeline.tokenizer.apply_chat_template(message, tokenize=False, **options))

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W) in the latents' dtype."""
        lengths = text["tokens_mask"].sum(1).tolist()
        prompts = [tokens[:length] for tokens, length in zip(text["tokens"], lengths, strict=True)]
        # the network takes each image with a frame axis, and its time and velocity run from noise to image
        found = network([*latents[:, :, None]], 1 - sigma, prompts, return_dict=False)[0]
        return -torch.stack([*found])[:, :, 0].to(latents.dtype)

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """The pipeline's scale is 0 without guidance."""
        return super().guidance_call(scale, negative) | {"guidance_scale": scale - 1}

    def sides(self) -> LatentSides:
        """Positions are rotary; the default is the pipeline's."""
        return LatentSides(PATCH, DEFAULT_SIDE // self.factor)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps, shifted once."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape), even=True)
