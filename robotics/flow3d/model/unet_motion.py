"""The paper's network: the U-Net of Stable Diffusion inflated over time, with motion modules, on flow without a VAE.

Shapes: B rows, C channels, T frames, N x N points, L tokens of the context.

Source: Hoyyyaard/3DFlowAction AnimateFlow.py (AnimateFlow3D) and AnimateDiff, arXiv 2307.04725; the network is
    diffusers' UNetMotionModel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.files import expanded
from mmrl.hub.compat import ensure_torchvision
from robotics.flow3d.clip import FlowEncoding
from robotics.flow3d.model.context import FlowContext
from robotics.flow3d.model.world_model_settings import BodyConfig, UnetConfig

ADAPTED = r"^(?!.*motion_modules).*\.(to_q|to_k|to_v|to_out\.0)$"
"""Layers with adapters: attention of everything but the motion modules."""


class MotionUnet(nn.Module):
    """The U-Net on the grid of N x N query points instead of an image."""

    def __init__(
        self, config: BodyConfig, encoding: FlowEncoding, context: int, *, load_pretrained: bool = True
    ) -> None:
        super().__init__()
        ensure_torchvision()
        self.concat = config.point_condition == "tokens+concat"
        settings = config.unet
        if settings.pretrained and load_pretrained:
            plain = _read_unet(settings, context)
        else:
            plain = _new_unet(settings, encoding.channels, context)
        self.unet = _inflated(plain, settings)
        if self.concat:
            _widen_entry(self.unet, 3)
        if settings.trainable == "lora":
            _add_adapters(self.unet, settings.lora_rank)
            # the new input channels start at zero and must be trained to have an effect
            self.unet.conv_in.requires_grad_(self.concat)

    def forward(self, noisy: Tensor, time: Tensor, context: FlowContext) -> Tensor:
        """(B, C, T, N, N), (B,) of 0..1000 -> (B, C, T, N, N)."""
        if self.concat:
            points = context.points.permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, noisy.shape[2], -1, -1)
            noisy = torch.cat([noisy, points.to(noisy.dtype)], 1)
        # the model needs the tokens repeated for every frame
        tokens = context.tokens.repeat_interleave(noisy.shape[2], 0)
        found: Tensor = self.unet(noisy, time, tokens, return_dict=False)[0]
        return found


def _new_unet(settings: UnetConfig, channels: int, context: int) -> Any:
    from diffusers import UNet2DConditionModel

    levels = len(settings.channels)
    return UNet2DConditionModel(
        in_channels=channels,
        out_channels=channels,
        block_out_channels=tuple(settings.channels),
        layers_per_block=settings.layers,
        down_block_types=(*["CrossAttnDownBlock2D"] * (levels - 1), "DownBlock2D"),
        up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * (levels - 1)),
        norm_num_groups=settings.norm_groups,
        cross_attention_dim=context,
        attention_head_dim=8,
    )


def _read_unet(settings: UnetConfig, context: int) -> Any:
    from diffusers import UNet2DConditionModel

    folder = expanded(settings.pretrained)
    try:
        found = UNet2DConditionModel.from_pretrained(str(folder), subfolder="unet")
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"model.body.unet.pretrained: no U-Net in {folder / 'unet'}: {reason}") from error
    # compared before the network is inflated, whose motion modules need the same sizes
    own = {"channels": list(found.config.block_out_channels), "layers": found.config.layers_per_block}
    wrong = {name: value for name, value in own.items() if getattr(settings, name) != value}
    if wrong or found.config.cross_attention_dim != context:
        raise UserError(
            f"the U-Net in {folder} has channels={own['channels']}, layers={own['layers']} and reads tokens of "
            f"width {found.config.cross_attention_dim}; set model.body.unet and model.condition.width to that"
        )
    return found


def _inflated(plain: Any, settings: UnetConfig) -> Any:
    """The U-Net with motion modules after every layer except the mid block; they start without effect."""
    from diffusers import MotionAdapter, UNetMotionModel

    adapter = MotionAdapter(
        block_out_channels=tuple(settings.channels),
        motion_layers_per_block=settings.layers,
        motion_num_attention_heads=8,
        motion_norm_num_groups=settings.norm_groups,
        motion_max_seq_length=settings.max_frames,
        use_motion_mid_block=False,
    )
    unet = UNetMotionModel.from_unet2d(plain, adapter)
    for name, layer in unet.named_modules():
        if "motion_modules" in name and name.endswith(".proj_out"):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    return unet


def _widen_entry(unet: Any, more: int) -> None:
    """Add input channels that start without effect."""
    old = unet.conv_in
    new = nn.Conv2d(old.in_channels + more, old.out_channels, old.kernel_size, padding=old.padding)
    with torch.no_grad():
        new.weight.zero_()
        new.weight[:, : old.in_channels] = old.weight
    new.bias = old.bias
    unet.conv_in = new
    unet.register_to_config(in_channels=new.in_channels)


def _add_adapters(unet: Any, rank: int) -> None:
    """Adapters on the attention; motion modules stay fully trainable, all else is frozen."""
    from peft import LoraConfig

    unet.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=ADAPTED))
    for name, parameter in unet.named_parameters():
        if "motion_modules" in name:
            parameter.requires_grad_(True)
