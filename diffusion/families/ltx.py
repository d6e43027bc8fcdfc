"""LTX-Video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import (
    MASK,
    Family,
    FamilyOptions,
    KohyaNames,
    LatentSides,
    Text,
    TextPart,
    channel_statistics,
    channels_last,
    scheduler_grid,
)
from mmrl.fields import bounded

if TYPE_CHECKING:
    from torch import Tensor

HEIGHT, WIDTH = 512, 704
"""Default size in pixels, as in the pipeline's call."""


@dataclass
class LtxOptions(FamilyOptions):
    """Options of LTX-Video."""

    frame_rate: float = bounded(25.0, above=0)
    """Frames per second, used for the transformer's positions."""


class LtxFamily(Family):
    """LTX-Video: tokens of T5, with a mask only for the transformer; one token per latent pixel.

    Autoencoders with a time input decode at time 0 without noise, so that the latents determine the video.
    """

    pipeline_class = "LTXPipeline"
    summary = "LTX-Video 0.9 to 0.9.5"
    citation = "LTX-Video, arXiv 2501.00103"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 128
    text_width = "caption_channels"
    kohya = KohyaNames(by_diffusers=False)
    video = True
    default_frames = 161
    options_class = LtxOptions

    @property
    def factor(self) -> int:
        """Pixels on a side of a latent pixel."""
        return int(self.pipeline.vae_spatial_compression_ratio)

    @property
    def frame_factor(self) -> int:
        """Frames of a latent frame."""
        return int(self.pipeline.vae_temporal_compression_ratio)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D), including padding, and their mask (L,) bool."""
        tokens, mask, _, _ = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt),
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"tokens": tokens[0], "tokens" + MASK: mask[0].bool()}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, T, H, W)."""
        frames, height, width = latents.shape[2:]
        velocity = network(
            hidden_states=latents.flatten(2).transpose(1, 2),
            encoder_hidden_states=text["tokens"],
            timestep=self.time(sigma),
            encoder_attention_mask=text["tokens" + MASK],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(self.frame_factor / self.options.frame_rate, self.factor, self.factor),
            return_dict=False,
        )[0]
        return velocity.transpose(1, 2).reshape(latents.shape)

    def call(self, shape: Sequence[int], scale: float, negative: str = "") -> dict[str, Any]:
        """Frames too, decoded at time 0 without noise."""
        found = super().call(shape, scale, negative) | {"num_frames": self.frames(shape)}
        return found | {"frame_rate": self.options.frame_rate, "decode_timestep": 0.0, "decode_noise_scale": 0.0}

    def sides(self) -> LatentSides:
        """Positions are rotary; the default is the pipeline's."""
        return LatentSides(1, HEIGHT // self.factor, width=WIDTH // self.factor)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """Equal steps, shifted, their last time moved to `shift_terminal`."""
        return scheduler_grid(self.pipeline.scheduler, steps, tokens=self.tokens(shape), even=True)

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, F, h, w, 3)."""
        autoencoder = self.pipeline.vae
        encoded = self.denormalise(latents.to(autoencoder.device, autoencoder.dtype))
        time = torch.zeros(len(encoded)).to(encoded) if autoencoder.config.timestep_conditioning else None
        return channels_last(autoencoder.decode(encoded, time, return_dict=False)[0])

    def normalise(self, encoded: Tensor) -> Tensor:
        """Standardise each channel with the mean and standard deviation of the autoencoder and its scaling factor."""
        mean, deviation = channel_statistics(self.pipeline.vae, encoded)
        return (encoded - mean) * self.pipeline.vae.config.scaling_factor / deviation

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo `normalise`."""
        mean, deviation = channel_statistics(self.pipeline.vae, latents)
        return latents * deviation / self.pipeline.vae.config.scaling_factor + mean
