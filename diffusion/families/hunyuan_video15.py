"""HunyuanVideo 1.5, text to video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import MASK, Family, LatentSides, Text, TextPart, scheduler_grid

if TYPE_CHECKING:
    from torch import Tensor

HEIGHT, WIDTH = 480, 832
"""Default size in pixels."""


class HunyuanVideo15Family(Family):
    """HunyuanVideo 1.5: masked tokens of Qwen2.5-VL and (for quoted text) ByT5, and an empty image condition.

    The pipeline cannot load adapters, so they are saved for `pipeline.transformer.load_lora_adapter`.
    """

    pipeline_class = "HunyuanVideo15Pipeline"
    summary = "HunyuanVideo 1.5 (text to video)"
    citation = "HunyuanVideo 1.5, arXiv 2511.18870"
    lora_targets = tuple(
        f"attn.{name}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    )
    text_parts = (TextPart("text_encoder", "tokenizer"), TextPart("text_encoder_2", "tokenizer_2"))
    text_length = 1000
    text_width = "text_embed_dim"
    video = True
    default_frames = 121

    def __init__(self, pipeline: Any, options: Any = None) -> None:
        super().__init__(pipeline, options)
        pipeline.tokenizer_max_length = self.max_sequence_length  # no argument of `encode_prompt`

    @property
    def factor(self) -> int:
        """Pixels on a side of a latent pixel."""
        return int(self.pipeline.vae_scale_factor_spatial)

    @property
    def frame_factor(self) -> int:
        """Frames of a latent frame."""
        return int(self.pipeline.vae_scale_factor_temporal)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) of the prompt and glyphs (L', D') of its quoted text, and their masks, bool."""
        tokens, mask, glyphs, glyph_mask = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt), device=self.text_device, batch_size=1
        )
        found = {"tokens": tokens[0], "glyphs": glyphs[0]}
        return found | {"tokens" + MASK: mask[0].bool(), "glyphs" + MASK: glyph_mask[0].bool()}

    def token_ids(self, part: TextPart, prompt: str, *, negative: bool = False) -> list[int]:
        """Tokens of the prompt in its chat template, without the start that is dropped; none of the glyphs."""
        if part.tokenizer != self.text_parts[0].tokenizer:
            return []
        message = [
            {"role": "system", "content": self.pipeline.system_message},
            {"role": "user", "content": self.read_text(part, prompt) or " "},
        ]
        text = self.pipeline.tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return self.tokenized(part, text)[self.pipeline.prompt_template_encode_start_idx :]

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tokens and the glyphs."""
        width = self.pipeline.transformer.config.text_embed_2_dim
        return super().text_shapes() | {"glyphs": (self.pipeline.tokenizer_2_max_length, width)}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, T, H, W)."""
        rows, _, *sides = latents.shape
        # the network also serves image-to-video: without an image, its latents, their mask and its tokens are zeros
        condition = torch.cat([torch.zeros_like(latents), latents.new_zeros(rows, 1, *sides)], 1)
        image = (rows, self.pipeline.vision_num_semantic_tokens, network.config.image_embed_dim)
        velocity: Tensor = network(
            hidden_states=torch.cat([latents, condition], 1),
            timestep=self.time(sigma).to(latents.dtype),
            encoder_hidden_states=text["tokens"],
            encoder_attention_mask=text["tokens" + MASK].to(latents.dtype),
            encoder_hidden_states_2=text["glyphs"],
            encoder_attention_mask_2=text["glyphs" + MASK].to(latents.dtype),
            image_embeds=latents.new_zeros(image),
            return_dict=False,
        )[0]
        return velocity

    def call(self, shape: Sequence[int], scale: float, negative: str = "") -> dict[str, Any]:
        """Frames too."""
        return super().call(shape, scale, negative) | {"num_frames": self.frames(shape)}

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """The scale is the guider's."""
        return {"negative_prompt": negative} if negative and scale != 1 else {}

    def further_call(self) -> dict[str, Any]:
        """The length of the text is the pipeline's."""
        return {}

    def call_lines(self, scale: float) -> list[str]:
        """A guider of the scale, which is 1 for none, and the length of the text."""
        return [
            "from diffusers.guiders import ClassifierFreeGuidance",
            f"pipeline.guider = ClassifierFreeGuidance(guidance_scale={scale!r})",
            f"pipeline.tokenizer_max_length = {self.max_sequence_length}",
        ]

    def call_lacks(self, scale: float, negative: str, steps: int) -> str:
        """The guider takes any scale."""
        return ""

    def sides(self) -> LatentSides:
        """Positions are rotary."""
        patch = self.pipeline.transformer.config.patch_size
        return LatentSides(patch, HEIGHT // self.factor, width=WIDTH // self.factor)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps, shifted once."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape), even=True)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, F, h, w, 3), one video at a time: the autoencoder's attention fails for several."""
        return torch.cat([super(HunyuanVideo15Family, self).decode(one) for one in latents.split(1)])
