"""FLUX.1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import (
    PATCH,
    REFERENCE,
    Family,
    FamilyOptions,
    KohyaNames,
    LatentSides,
    Text,
    TextPart,
    pack_latents,
    scheduler_grid,
    unpack_latents,
)
from mmrl.fields import bounded

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class FluxOptions(FamilyOptions):
    """Options of FLUX."""

    guidance_embedding: float = bounded(3.5, at_least=0)
    """Guidance scale, an input of guidance-distilled transformers."""


class FluxFamily(Family):
    """FLUX.1: tokens of T5, pooled CLIP, equal steps.

    A guidance-distilled transformer has the guidance scale as an input and needs one row per image for any scale.
    Guidance with a negative prompt is independent of this.

    Source: black-forest-labs/flux src/flux/sampling.py (`prepare`, `denoise`, `unpack`).
    """

    pipeline_class = "FluxPipeline"
    summary = "FLUX.1 dev and schnell"
    citation = "black-forest-labs/flux"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    text_parts = (
        TextPart("text_encoder", "tokenizer", is_clip=True),
        TextPart("text_encoder_2", "tokenizer_2"),
    )
    text_length = 512
    text_width = "joint_attention_dim"
    kohya = KohyaNames("lora_transformer_")
    options_class = FluxOptions

    @property
    def embedded_guidance(self) -> bool:
        """True for dev, false for schnell."""
        return bool(self.pipeline.transformer.config.guidance_embeds)

    @property
    def few_steps(self) -> str:
        """Schnell is the only released model without a guidance input."""
        return "" if self.embedded_guidance else "its transformer has no guidance input, like FLUX.1 schnell"

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """Two scales: of the input, and of a negative prompt, which has to be passed even if it is empty."""
        embedded = {"guidance_scale": self.options.guidance_embedding} if self.embedded_guidance else {}
        return embedded | ({"true_cfg_scale": scale, "negative_prompt": negative} if scale != 1 else {})

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) of T5 and the pooled CLIP embedding (P,)."""
        t5 = self.read_text(self.text_parts[1], prompt)
        tokens, pooled, _ = self.pipeline.encode_prompt(
            prompt, t5, device=self.text_device, max_sequence_length=self.max_sequence_length
        )
        return {"tokens": tokens[0], "pooled": pooled[0]}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, H, W)."""
        height, width = latents.shape[-2:]
        guidance = None
        if network.config.guidance_embeds:
            scale = self.options.guidance_embedding
            guidance = torch.full((len(latents),), scale, dtype=torch.float32, device=latents.device)
        tokens = pack_latents(latents)
        places = _image_ids(height // PATCH, width // PATCH, latents.device)
        count = len(places)
        if REFERENCE in text:
            image = text[REFERENCE]
            tokens = torch.cat([tokens, pack_latents(image)], 1)
            down, across = image.shape[-2] // PATCH, image.shape[-1] // PATCH
            places = torch.cat([places, _image_ids(down, across, latents.device, number=1)])
        velocity = network(
            hidden_states=tokens,
            timestep=sigma,  # the transformer multiplies by 1000 itself
            guidance=guidance,
            encoder_hidden_states=text["tokens"],
            pooled_projections=text["pooled"],
            txt_ids=torch.zeros(text["tokens"].shape[1], 3, device=latents.device),
            img_ids=places,
            return_dict=False,
        )[0][:, :count]
        return unpack_latents(velocity, height, width)

    def sides(self) -> LatentSides:
        """Positions are rotary, so the transformer supports any size."""
        return LatentSides(PATCH, self.pipeline.vae.config.sample_size // self.factor)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps, shifted."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape), even=True)


class KontextFamily(FluxFamily):
    """FLUX.1 Kontext: FLUX.1 dev with the tokens of the image to be edited appended to the image tokens.

    The reference is resized to the size of the run; choosing among the pipeline's preferred sizes is up to the user.

    Source: FLUX.1 Kontext, arXiv 2506.15742; diffusers pipelines/flux/pipeline_flux_kontext.py.
    """

    pipeline_class = "FluxKontextPipeline"
    summary = "FLUX.1 Kontext dev, with an image to be edited"
    citation = "FLUX.1 Kontext, arXiv 2506.15742"
    takes_image = True
    edits = True

    def call(self, shape: Sequence[int], scale: float, negative: str = "") -> dict[str, Any]:
        """The pipeline fits the size to its own area unless told otherwise."""
        found = super().call(shape, scale, negative)
        return found | {"max_area": found["height"] * found["width"]}

    def edit_call(self, shape: Sequence[int]) -> dict[str, Any]:
        """The image already has the size of the run."""
        return {"_auto_resize": False}


def _image_ids(down: int, across: int, device: torch.device, number: int = 0) -> Tensor:
    """Position of each token (down * across, 3): image 0 or reference 1, row, column; text is all at 0, 0, 0."""
    row, column = torch.meshgrid(torch.arange(down, device=device), torch.arange(across, device=device), indexing="ij")
    return torch.stack([torch.full_like(row, number), row, column], dim=-1).flatten(0, 1).float()
