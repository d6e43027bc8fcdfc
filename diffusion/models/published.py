"""Architectures of released pipelines: what the config.json of their networks and autoencoders say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A pipeline without its weights."""

    pipeline_class: str
    network: tuple[str, dict[str, Any]]
    """Class of the first network, and what differs from the defaults of the class."""
    autoencoder: tuple[str, dict[str, Any]]
    encoder_billions: float
    """Parameters of the text encoders together."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline that are no parts."""


def _autoencoder(channels: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """The autoencoder of factor 8 of Stable Diffusion and FLUX."""
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    sizes = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": channels}
    return "AutoencoderKL", {"down_block_types": down, "up_block_types": up, "sample_size": 1024, **sizes, **more}


_WITHOUT_QUANT = {"use_quant_conv": False, "use_post_quant_conv": False}
_CLIP_L, _CLIP_G, _T5, _UMT5, _QWEN = 0.124, 0.695, 4.762, 5.681, 8.292
"""Parameters in billions of CLIP ViT-L and bigG, T5-XXL, UMT5-XXL (their text encoders), Qwen2.5-VL-7B."""


def _sd3(heads: int, positions: int, dual: tuple[int, ...]) -> Published:
    network = {
        "sample_size": 128,
        "num_layers": heads,
        "num_attention_heads": heads,
        "attention_head_dim": 64,
        "caption_projection_dim": 64 * heads,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "out_channels": 16,
        "pos_embed_max_size": positions,
        "dual_attention_layers": dual,
        "qk_norm": "rms_norm",
    }
    return Published(
        "StableDiffusion3Pipeline",
        ("SD3Transformer2DModel", network),
        _autoencoder(16, scaling_factor=1.5305, shift_factor=0.0609, **_WITHOUT_QUANT),
        _CLIP_L + _CLIP_G + _T5,
    )


def _flux(pipeline: str) -> Published:
    return Published(
        pipeline,
        ("FluxTransformer2DModel", {"guidance_embeds": True}),
        _autoencoder(16, scaling_factor=0.3611, shift_factor=0.1159, **_WITHOUT_QUANT),
        _CLIP_L + _T5,
    )


def _klein(layers: int, single: int, heads: int, text: int, encoder: float) -> Published:
    network = {
        "num_layers": layers,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "joint_attention_dim": text,
        "guidance_embeds": False,
    }
    return Published(
        "Flux2KleinPipeline",
        ("Flux2Transformer2DModel", network),
        ("AutoencoderKLFlux2", {}),
        encoder,
        {"is_distilled": False},
    )


def _wan(heads: int, layers: int, inner: int) -> Published:
    network = {"num_attention_heads": heads, "num_layers": layers, "ffn_dim": inner}
    return Published(
        "WanPipeline",
        ("WanTransformer3DModel", network),
        ("AutoencoderKLWan", {}),
        _UMT5,
        {"expand_timesteps": False, "boundary_ratio": None},
    )


PUBLISHED: dict[str, Published] = {
    "stabilityai/stable-diffusion-3.5-medium": _sd3(24, 384, tuple(range(13))),
    "stabilityai/stable-diffusion-3.5-large": _sd3(38, 192, ()),
    "stabilityai/stable-diffusion-xl-base-1.0": Published(
        "StableDiffusionXLPipeline",
        (
            "UNet2DConditionModel",
            {
                "sample_size": 128,
                "block_out_channels": (320, 640, 1280),
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "transformer_layers_per_block": (1, 2, 10),
                "attention_head_dim": (5, 10, 20),
                "cross_attention_dim": 2048,
                "use_linear_projection": True,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 256,
                "projection_class_embeddings_input_dim": 2816,
            },
        ),
        _autoencoder(4, scaling_factor=0.13025),
        _CLIP_L + _CLIP_G,
        {"force_zeros_for_empty_prompt": True},
    ),
    "black-forest-labs/FLUX.1-dev": _flux("FluxPipeline"),
    "black-forest-labs/FLUX.1-Kontext-dev": _flux("FluxKontextPipeline"),
    "black-forest-labs/FLUX.2-klein-base-4B": _klein(5, 20, 24, 7680, 4.022),
    "black-forest-labs/FLUX.2-klein-base-9B": _klein(8, 24, 32, 12288, 8.191),
    "Qwen/Qwen-Image": Published(
        "QwenImagePipeline", ("QwenImageTransformer2DModel", {}), ("AutoencoderKLQwenImage", {}), _QWEN
    ),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(12, 30, 8960),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan(40, 40, 13824),
}
"""Pipelines by hub id."""
