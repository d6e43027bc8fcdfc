"""The model families: how each one's transformer is called, which image sizes it takes and how it embeds text.

A new family is one row of `FAMILIES`. Its transformer becomes a `VelocityModel` on ordinary latents.

Shapes: B rows (images), C channels, H x W latent pixels, L text tokens of width D, P width of the pooled embedding.
sigma runs from 1 (noise) to 0 (image); velocity = noise - image, as Stable Diffusion 3 and FLUX have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmrl.errors import UserError

VelocityModel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(latents (B, C, H, W), sigma (B,), tokens (B, L, D), pooled (B, P)) -> velocity (B, C, H, W)."""
FLUX_PATCH = 2
"""Latent pixels on a side of one image token of FLUX."""


class Sd3Transformer:
    """A diffusers SD3Transformer2DModel as `VelocityModel`.

    Args:
        transformer: the module, plain or wrapped.
        train_timesteps: what sigma = 1 is called in the transformer's own time.
    """

    def __init__(self, transformer: Any, train_timesteps: int = 1000) -> None:
        self.transformer = transformer
        self.train_timesteps = train_timesteps

    def __call__(self, latents: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
        """Velocity (B, C, H, W) in the transformer's dtype."""
        velocity: Tensor = self.transformer(
            hidden_states=latents,
            timestep=sigma * self.train_timesteps,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity


class FluxTransformer:
    """A diffusers FluxTransformer2DModel as `VelocityModel`.

    A guidance-distilled transformer takes the guidance scale as an input and costs one row an image whatever its value.
    `GuidedVelocity` around it is guidance of the other kind, with a negative prompt.

    Args:
        transformer: the module, plain or with adapters.
        guidance_embedding: guidance scale, an input of guidance-distilled transformers; others ignore it.

    Source: black-forest-labs/flux src/flux/sampling.py (`prepare`, `denoise`, `unpack`).
    """

    def __init__(self, transformer: Any, guidance_embedding: float = 3.5) -> None:
        self.transformer = transformer
        self.guidance_embedding = guidance_embedding

    def __call__(self, latents: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
        """Velocity (B, C, H, W) in the transformer's dtype."""
        height, width = latents.shape[-2:]
        guidance = None
        if self.transformer.config.guidance_embeds:
            guidance = torch.full((len(latents),), self.guidance_embedding, dtype=torch.float32, device=latents.device)
        velocity = self.transformer(
            hidden_states=pack_latents(latents),
            timestep=sigma,  # the transformer multiplies by 1000 itself
            guidance=guidance,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=latents.device),
            img_ids=_image_ids(height // FLUX_PATCH, width // FLUX_PATCH, latents.device),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)


def pack_latents(latents: Tensor) -> Tensor:
    """Cut latents (B, C, H, W) into patches of 2 x 2, row by row, each a token (B, H/2 * W/2, 4 C), channels first."""
    rows, channels, height, width = latents.shape
    if height % FLUX_PATCH or width % FLUX_PATCH:
        raise UserError(f"latents of {height} x {width} cannot be cut into patches of {FLUX_PATCH} x {FLUX_PATCH}")
    patches = latents.reshape(rows, channels, height // FLUX_PATCH, FLUX_PATCH, width // FLUX_PATCH, FLUX_PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `pack_latents`: tokens (B, H/2 * W/2, 4 C) to latents (B, C, H, W)."""
    rows, count, channels = tokens.shape
    down, across = height // FLUX_PATCH, width // FLUX_PATCH
    if height % FLUX_PATCH or width % FLUX_PATCH or count != down * across or channels % FLUX_PATCH**2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} are not those of {height} x {width} latent pixels.")
    patches = tokens.reshape(rows, down, across, channels // FLUX_PATCH**2, FLUX_PATCH, FLUX_PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)


def _image_ids(down: int, across: int, device: torch.device) -> Tensor:
    """Position of each image token (down * across, 3): 0, row, column; text tokens are all at 0, 0, 0."""
    row, column = torch.meshgrid(torch.arange(down, device=device), torch.arange(across, device=device), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1).float()


class LatentSides(NamedTuple):
    """Sizes that a transformer can represent, in latent pixels."""

    patch: int
    default: int
    most: int | None


class TextPart(NamedTuple):
    """Attribute names of a text encoder and its tokenizer in a pipeline."""

    encoder: str
    tokenizer: str
    is_t5: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Family:
    """One model family."""

    velocity: Callable[[Any, float], VelocityModel]
    """From the transformer and `ModelConfig.guidance_embedding`."""
    sides: Callable[[Any], LatentSides]
    """From the pipeline."""
    text: tuple[TextPart, ...]
    text_length: int
    """Default length of the T5 encoder in tokens."""
    encode: Callable[[Any, str, int], tuple[Tensor, Tensor]]
    """(pipeline, prompt, length) -> tokens (1, L, D) and pooled (1, P), by the pipeline's own `encode_prompt`."""


def family_of(pipeline: Any) -> Family:
    """The family of a pipeline; raises UserError for others."""
    for base in type(pipeline).__mro__:
        if base.__name__ in FAMILIES:
            return FAMILIES[base.__name__]
    raise UserError(f"{type(pipeline).__name__} is not supported; there are: {', '.join(FAMILIES)}")


def _sd3_sides(pipeline: Any) -> LatentSides:
    config = pipeline.transformer.config
    return LatentSides(config.patch_size, config.sample_size, config.pos_embed_max_size * config.patch_size)


def _flux_sides(pipeline: Any) -> LatentSides:
    # FLUX's positions are rotary, so its transformer has no size of its own
    return LatentSides(FLUX_PATCH, pipeline.vae.config.sample_size // pipeline.vae_scale_factor, None)


def _encode_sd3(pipeline: Any, prompt: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, _, pooled, _ = pipeline.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return tokens, pooled


def _encode_flux(pipeline: Any, prompt: str, length: int) -> tuple[Tensor, Tensor]:
    tokens, pooled, _ = pipeline.encode_prompt(prompt, max_sequence_length=length)
    return tokens, pooled


FAMILIES = {
    "StableDiffusion3Pipeline": Family(
        velocity=lambda transformer, guidance_embedding: Sd3Transformer(transformer),
        sides=_sd3_sides,
        text=(
            TextPart("text_encoder", "tokenizer"),
            TextPart("text_encoder_2", "tokenizer_2"),
            TextPart("text_encoder_3", "tokenizer_3", is_t5=True, optional=True),
        ),
        text_length=256,
        encode=_encode_sd3,
    ),
    "FluxPipeline": Family(
        velocity=FluxTransformer,
        sides=_flux_sides,
        text=(TextPart("text_encoder", "tokenizer"), TextPart("text_encoder_2", "tokenizer_2", is_t5=True)),
        text_length=512,
        encode=_encode_flux,
    ),
}
"""Families by the class name of their pipeline."""
