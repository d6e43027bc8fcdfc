"""Qwen-Image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import (
    PATCH,
    ChannelwiseFamily,
    KohyaNames,
    LatentSides,
    Text,
    TextPart,
    pack_latents,
    scheduler_grid,
    unpack_latents,
)

if TYPE_CHECKING:
    from torch import Tensor


class QwenImageFamily(ChannelwiseFamily):
    """Qwen-Image: masked tokens of Qwen2.5-VL, equal steps, guidance rescaled to the norm of the positive velocity.

    It uses a video autoencoder; an image is a single frame.
    """

    pipeline_class = "QwenImagePipeline"
    summary = "Qwen-Image, Qwen-Image-2512"
    citation = "Qwen-Image, arXiv 2508.02324"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 1024
    text_width = "joint_attention_dim"
    kohya = KohyaNames()
    ragged = ("tokens",)

    @property
    def channels(self) -> int:
        """Channels of the autoencoder's latents."""
        return int(self.pipeline.vae.config.z_dim)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) of the prompt and of the rest of its template; its start is dropped."""
        tokens, _ = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt),
            device=self.text_device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"tokens": tokens[0]}

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """Tokens behind the start of the template."""
        ids = self.tokenized(part, self.pipeline.prompt_template_encode.format(self.read_text(part, prompt)))
        return ids[self.pipeline.prompt_template_encode_start_idx :]

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W)."""
        height, width = latents.shape[-2:]
        guidance = torch.ones_like(sigma) if network.config.guidance_embeds else None
        velocity = network(
            hidden_states=pack_latents(latents),
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=text["tokens"],
            encoder_hidden_states_mask=text["tokens_mask"],
            img_shapes=[[(1, height // PATCH, width // PATCH)]] * len(latents),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)

    def combine(self, positive: Tensor, negative: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """Linear guidance, each image token rescaled to its norm without guidance."""
        height, width = positive.shape[-2:]
        alone, other = pack_latents(positive), pack_latents(negative)
        both = other + scale * (alone - other)
        # per token, as the pipeline does it, so packed first
        size = alone.norm(dim=-1, keepdim=True) / both.norm(dim=-1, keepdim=True)
        return unpack_latents(both * size, height, width)

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """The negative prompt has to be passed even if it is empty; the input of a distilled network is 1, as here."""
        embedded = {"guidance_scale": 1.0} if self.pipeline.transformer.config.guidance_embeds else {}
        return embedded | {"true_cfg_scale": scale, **({"negative_prompt": negative} if scale != 1 else {})}

    def sides(self) -> LatentSides:
        """Positions are rotary; the default is the pipeline's."""
        return LatentSides(PATCH, self.pipeline.default_sample_size)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps, shifted, their last time moved to `shift_terminal`."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape), even=True)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, h, w, 3) of the only frame."""
        return super().decode(latents[:, :, None])[:, 0]

    def encode_pixels(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (B, C, H, W) of the only frame."""
        mean, deviation = super().encode_pixels(pixels[:, :, None])
        return mean[:, :, 0], deviation[:, :, 0]
