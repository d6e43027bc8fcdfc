"""FLUX as a flow model on ordinary latents: patches of 2 x 2 become image tokens, and tokens patches again.

Shapes: B rows (images), C channels, H x W latent pixels, L text tokens of width D, P width of the pooled embedding.
sigma runs from 1 (noise) to 0 (image); velocity = noise - image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError

PATCH = 2
"""Latent pixels on a side of one image token."""


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
            # the transformer multiplies by 1000 itself
            timestep=sigma,
            guidance=guidance,
            encoder_hidden_states=tokens,
            pooled_projections=pooled,
            txt_ids=torch.zeros(tokens.shape[1], 3, device=latents.device),
            img_ids=_image_ids(height // PATCH, width // PATCH, latents.device),
            return_dict=False,
        )[0]
        return unpack_latents(velocity, height, width)


def pack_latents(latents: Tensor) -> Tensor:
    """Cut latents into patches of 2 x 2, row by row, each one token.

    Args:
        latents: (B, C, H, W) with even H and W.

    Returns:
        (B, H/2 * W/2, 4 C); the channels of a token are those of the latent, of each its 2 x 2 pixels.
    """
    rows, channels, height, width = latents.shape
    if height % PATCH or width % PATCH:
        raise UserError(f"latents of {height} x {width} cannot be cut into patches of {PATCH} x {PATCH}")
    patches = latents.reshape(rows, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def unpack_latents(tokens: Tensor, height: int, width: int) -> Tensor:
    """Put tokens back to where `pack_latents` took them from.

    Args:
        tokens: (B, H/2 * W/2, 4 C).
        height: H.
        width: W.

    Returns:
        Latents (B, C, H, W).

    Raises:
        ValueError: the tokens are not those of H x W latent pixels.
    """
    rows, count, channels = tokens.shape
    down, across = height // PATCH, width // PATCH
    if height % PATCH or width % PATCH or count != down * across or channels % PATCH**2:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} are not those of {height} x {width} latent pixels.")
    patches = tokens.reshape(rows, down, across, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(rows, -1, height, width)


def _image_ids(down: int, across: int, device: torch.device) -> Tensor:
    """Place of each image token (down * across, 3): 0, row, column; text tokens are all at 0, 0, 0."""
    row, column = torch.meshgrid(torch.arange(down, device=device), torch.arange(across, device=device), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1).float()
