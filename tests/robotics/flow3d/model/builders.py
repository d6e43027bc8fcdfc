"""Tiny world models, and tiny CLIP and Stable Diffusion folders, with random weights."""

from pathlib import Path

import torch

from mmrl.hub.compat import ensure_torchvision
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.model.world_model import FlowWorldModel
from robotics.flow3d.model.world_model_settings import (
    BodyConfig,
    ConditionConfig,
    FlowModelConfig,
    ProcessConfig,
    UnetConfig,
)
from robotics.policies.base.encoder import Vocabulary

TEXTS = ["Move the block to the red pad", "Move the block to the green pad"]
SMALL = {"width": 16, "image_px": 32, "heads": 2}


def tiny_config(body: str = "traj_dit", *, visibility: str = "none", **process) -> FlowModelConfig:
    """Flows of 4 frames of 3 x 3 points (unet_motion: 4 x 4)."""
    side = 4 if body == "unet_motion" else 3
    unet = UnetConfig(channels=[8, 16], layers=1, norm_groups=4, max_frames=8)
    return FlowModelConfig(
        FlowEncoding(num_frames=4, grid=side, z_min_m=0.5, z_max_m=1.3, target="displacement", visibility=visibility),
        BodyConfig(kind=body, width=16, blocks=2, heads=2, unet=unet),
        ConditionConfig(**SMALL),
        ProcessConfig(**({"steps": 3} | process)),
    )


def tiny_model(body: str = "traj_dit", seed: int = 0, **options) -> FlowWorldModel:
    return FlowWorldModel(tiny_config(body, **options), Vocabulary.from_texts(TEXTS), seed)


def disturb(model: torch.nn.Module, size: float = 0.1) -> torch.nn.Module:
    """Move all trained weights, so that layers that start at zero have an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(size * torch.randn(weight.shape, generator=generator))
    return model


def build_sd(folder: Path, channels=(8, 16), width: int = 16) -> Path:
    """A Stable Diffusion folder with `unet`, `text_encoder` and `tokenizer`."""
    ensure_torchvision()
    from diffusers import UNet2DConditionModel

    from diffusion.toy.pipelines.tiny import clip_text_model, clip_tokenizer

    torch.manual_seed(0)
    UNet2DConditionModel(
        block_out_channels=channels,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=4,
        cross_attention_dim=width,
    ).save_pretrained(folder / "unet")
    tokenizer = clip_tokenizer(TEXTS, 560, 16)
    tokenizer.save_pretrained(folder / "tokenizer")
    clip_text_model(tokenizer, width, layers=1, heads=2, tokens=16).save_pretrained(folder / "text_encoder")
    return folder


def build_vision(folder: Path, side: int = 32) -> Path:
    """A CLIP vision tower of 4 x 4 patches."""
    ensure_torchvision()
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=side, patch_size=8
    )
    CLIPVisionModel(config).save_pretrained(folder)
    return folder
