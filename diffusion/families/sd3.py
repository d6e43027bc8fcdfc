"""Stable Diffusion 3 and 3.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diffusion.families.base import Family, KohyaNames, LatentSides, Text, TextPart, scheduler_grid

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Projections of the image stream and of the text stream.

Source: yifan123/flow_grpo scripts/train_sd3.py, scxue/advantage_weighted_matching."""


class Sd3Family(Family):
    """Stable Diffusion 3: two CLIP encoders and an optional T5, times spaced by the scheduler, linear guidance."""

    pipeline_class = "StableDiffusion3Pipeline"
    summary = "Stable Diffusion 3, 3.5 medium and large"
    citation = "Esser et al., arXiv 2403.03206"
    lora_targets: Sequence[str] = ATTENTION
    text_parts = (
        TextPart("text_encoder", "tokenizer", is_clip=True),
        TextPart("text_encoder_2", "tokenizer_2", is_clip=True),
        TextPart("text_encoder_3", "tokenizer_3", optional=True),
    )
    text_length = 256
    text_width = "joint_attention_dim"
    kohya = KohyaNames("lora_transformer_", by_diffusers=False)

    def __init__(self, pipeline: Any, options: Any = None) -> None:
        super().__init__(pipeline, options)
        transformer = getattr(pipeline, "transformer", None)
        if transformer is not None and transformer.config.num_layers == 1:
            self.lora_targets = ATTENTION[:-1]  # the last block has no output of the text stream

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) of the encoders side by side, and pooled CLIP embeddings (P,)."""
        t5 = self.read_text(self.text_parts[2], prompt)
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompt,
            None,
            t5,
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def text_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tokens of T5 behind those of CLIP."""
        shapes = super().text_shapes()
        length, width = shapes["tokens"]
        return shapes | {"tokens": (self.pipeline.tokenizer_max_length + length, width)}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W)."""
        velocity: Tensor = network(
            hidden_states=latents,
            timestep=sigma * 1000,
            encoder_hidden_states=text["tokens"],
            pooled_projections=text["pooled"],
            return_dict=False,
        )[0]
        return velocity

    def sides(self) -> LatentSides:
        """Positions are a table of a fixed size."""
        config = self.pipeline.transformer.config
        return LatentSides(config.patch_size, config.sample_size, config.pos_embed_max_size * config.patch_size)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """The scheduler's own times."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape))
