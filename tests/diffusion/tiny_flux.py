"""A tiny random FLUX pipeline with its own tokenizers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.toy.pipelines.tiny import (
    clip_text_model,
    clip_tokenizer,
    random_autoencoder,
    t5_text_model,
    t5_tokenizer,
    write_pipeline,
)


@dataclass(frozen=True)
class TinyFluxSizes:
    """The defaults give 0.5 million parameters in the transformer; images have 32 pixels on a side."""

    layers: int = 2
    single_layers: int = 2
    heads: int = 4
    head_width: int = 16
    latent_size: int = 8
    latent_channels: int = 4
    vae_widths: tuple[int, ...] = (8, 16, 16)
    text_width: int = 64
    t5_layers: int = 1
    pooled_width: int = 32
    clip_layers: int = 2
    clip_tokens: int = 16
    vocab_size: int = 1000
    guidance: bool = True
    """Whether the transformer takes a guidance scale as an input, as the guidance-distilled FLUX.1-dev does."""

    @property
    def rotary_widths(self) -> tuple[int, int, int]:
        """Share of a head that is turned by text position, row and column; 7/16 for each of the last two in FLUX."""
        side = self.head_width * 7 // 32 * 2
        return self.head_width - 2 * side, side, side


def build_tiny_flux(
    path: Path | str, *, corpus: Sequence[str], sizes: TinyFluxSizes | None = None, seed: int = 0
) -> Path:
    """Build the pipeline and save it where `FluxPipeline.from_pretrained` loads it."""
    chosen = sizes or TinyFluxSizes()
    return write_pipeline(Path(path), lambda: _assemble_flux(chosen, corpus), seed)


def _assemble_flux(sizes: TinyFluxSizes, corpus: Sequence[str]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    tokenizer = clip_tokenizer(corpus, sizes.vocab_size, sizes.clip_tokens)
    long_tokenizer = t5_tokenizer(corpus, sizes.vocab_size)
    return FluxPipeline(
        transformer=_flux_transformer(sizes),
        # those of FLUX.1-dev; its shift depends on the number of image tokens
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True),
        vae=random_autoencoder(sizes.latent_channels, sizes.latent_size, sizes.vae_widths),
        text_encoder=clip_text_model(tokenizer, sizes.pooled_width, sizes.clip_layers, sizes.heads, sizes.clip_tokens),
        tokenizer=tokenizer,
        text_encoder_2=t5_text_model(long_tokenizer, sizes.text_width, sizes.t5_layers, sizes.heads),
        tokenizer_2=long_tokenizer,
    )


def _flux_transformer(sizes: TinyFluxSizes) -> Any:
    from diffusers import FluxTransformer2DModel

    transformer: Any = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * sizes.latent_channels,
        num_layers=sizes.layers,
        num_single_layers=sizes.single_layers,
        attention_head_dim=sizes.head_width,
        num_attention_heads=sizes.heads,
        joint_attention_dim=sizes.text_width,
        pooled_projection_dim=sizes.pooled_width,
        guidance_embeds=sizes.guidance,
        axes_dims_rope=sizes.rotary_widths,
    )
    return transformer.eval()
