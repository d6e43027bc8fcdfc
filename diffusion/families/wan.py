"""Wan 2.1 and 2.2, text to video."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from diffusion.families.base import (
    ChannelwiseFamily,
    FamilyOptions,
    KohyaNames,
    LatentSides,
    Text,
    TextPart,
    grid_of,
    padded,
)
from mmrl.errors import UserError
from mmrl.fields import bounded

if TYPE_CHECKING:
    from torch import Tensor

HEIGHT, WIDTH = 480, 832
"""Default size in pixels, as in the pipeline's call."""


@dataclass
class WanOptions(FamilyOptions):
    """Options of Wan."""

    guidance_2: float | None = bounded(None, at_least=0)
    """Guidance scale of the second network, at low noise. Default: same as the first."""


class WanFamily(ChannelwiseFamily):
    """Wan: tokens of UMT5, zero-padded without a mask; video latents (C, T, H, W), linear guidance.

    The 14B model of Wan 2.2 has two networks: one from noise to `boundary_ratio`, one below. The released scheduler,
    UniPC on flow times, equals Euler at first order on the same times, whose fractions it truncates.
    """

    pipeline_class = "WanPipeline"
    summary = "Wan 2.1 1.3B and 14B, Wan 2.2 A14B and TI2V-5B (text to video)"
    citation = "Wan, arXiv 2503.20314"
    schedulers = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
    networks = ("transformer", "transformer_2")
    settings = ("boundary_ratio", "expand_timesteps")
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    text_parts = (TextPart("text_encoder", "tokenizer"),)
    text_length = 512
    text_width = "text_dim"
    kohya = KohyaNames(
        renamed=(
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"\.to_([qkv])$", r".\1"),
            (r"\.to_out\.0$", ".o"),
            (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
            (r"\.ffn\.net\.2$", ".ffn.2"),
        ),
        by_diffusers=False,  # it expects adapters on the feed-forward layers, which `lora_targets` does not include
    )
    video = True
    default_frames = 81
    options_class = WanOptions

    def __init__(self, pipeline: Any, options: Any = None) -> None:
        super().__init__(pipeline, options)
        if self.options.guidance_2 is not None and pipeline.config.boundary_ratio is None:
            raise UserError(
                f"model.family_options.guidance_2 is {self.options.guidance_2:g}, but this pipeline has no second "
                "network; leave it out"
            )

    @property
    def factor(self) -> int:
        """Pixels on a side of a latent pixel."""
        return int(self.pipeline.vae_scale_factor_spatial)

    @property
    def frame_factor(self) -> int:
        """Frames of a latent frame."""
        return int(self.pipeline.vae_scale_factor_temporal)

    @property
    def channels(self) -> int:
        """Channels of the autoencoder's latents."""
        return int(self.pipeline.vae.config.z_dim)

    def encode(self, prompt: str, *, negative: bool = False) -> Text:
        """Tokens (L, D) without the zeros behind them."""
        tokens, _ = self.pipeline.encode_prompt(
            self.read_text(self.text_parts[0], prompt),
            device=self.text_device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        # the zeros behind are the padding; `collate` adds them again
        return {"tokens": tokens[0, : int(tokens[0].any(-1).sum())]}

    def collate(self, rows: Sequence[Text], lengths: Any = None) -> Text:
        """Tokens (B, L, D) with zeros up to the full length."""
        return {"tokens": torch.stack([padded(row["tokens"], self.max_sequence_length) for row in rows])}

    def velocity(self, network: Any, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity (B, C, T, H, W)."""
        time = self.time(sigma)
        if self.pipeline.config.expand_timesteps:  # one time a token
            time = time[:, None].expand(-1, self.tokens(latents.shape[1:]))
        velocity: Tensor = network(
            hidden_states=latents, timestep=time, encoder_hidden_states=text["tokens"], return_dict=False
        )[0]
        return velocity

    def network_of(self, sigma: Tensor) -> Tensor | None:
        """The first network above the boundary, the second below."""
        if self.pipeline.config.boundary_ratio is None:
            return None
        # below the boundary in noise, as the pipeline compares times
        return (sigma < self.pipeline.config.boundary_ratio).long()

    def combine(self, positive: Tensor, negative: Tensor, scale: float, sigma: Tensor) -> Tensor:
        """Linear guidance, with a separate scale for the second network."""
        which = self.network_of(sigma)
        if which is None or self.options.guidance_2 is None:
            return negative + scale * (positive - negative)
        scales = torch.where(which == 1, self.options.guidance_2, scale).to(positive)
        return negative + scales.reshape(-1, 1, 1, 1, 1) * (positive - negative)

    def sides(self) -> LatentSides:
        """Positions are rotary; the default is the pipeline's."""
        patch = self.pipeline.transformer.config.patch_size[1]
        return LatentSides(patch, HEIGHT // self.factor, width=WIDTH // self.factor)

    def sigma_grid(self, steps: int, shape: Sequence[int]) -> Tensor:
        """The scheduler's own times."""
        return grid_of(self.pipeline.scheduler, steps)

    def drawing_scheduler(self) -> Any:
        """UniPC at first order and without its corrector."""
        scheduler = self.pipeline.scheduler
        if type(scheduler).__name__ != "UniPCMultistepScheduler":
            return scheduler
        return type(scheduler).from_config(
            # then the pipeline draws by the same Euler steps as training did
            scheduler.config,
            solver_order=1,
            disable_corrector=[*range(scheduler.config.num_train_timesteps)],
        )

    def call(self, shape: Sequence[int], scale: float, negative: str = "") -> dict[str, Any]:
        """Frames too."""
        return super().call(shape, scale, negative) | {"num_frames": self.frames(shape)}

    def guidance_call(self, scale: float, negative: str) -> dict[str, Any]:
        """A scale for each network."""
        found = super().guidance_call(scale, negative)
        if self.pipeline.config.boundary_ratio is None or scale == 1:
            return found
        second = self.options.guidance_2
        return found | {"guidance_scale_2": scale if second is None else second}
