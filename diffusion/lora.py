"""Low-rank adapters beside the linear layers of a transformer."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from diffusion.model import LoraSettings
from diffusion.saved import ADAPTER
from mmrl.errors import UserError
from mmrl.hub.compat import ensure_torchvision


def add_adapter(transformer: Any, settings: LoraSettings, seed: int) -> None:
    """Put adapters beside linear layers; the random half is Gaussian, and both are float32."""
    ensure_torchvision()
    import peft

    targets = _targets(transformer, settings.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer.add_adapter(
            peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=settings.dropout,
                init_lora_weights="gaussian",
                target_modules=targets,
            ),
            ADAPTER,
        )
    for weight in transformer.parameters():
        if weight.requires_grad:
            # optimiser steps are smaller than bfloat16 can add
            weight.data = weight.data.float()


def _targets(transformer: Any, wanted: list[str] | None) -> list[str]:
    layers = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]

    def exists(target: str) -> bool:
        return any(f".{name}".endswith(f".{target}") for name in layers)

    if wanted is None:
        return [target for target in ATTENTION_PROJECTIONS if exists(target)]
    unknown = [target for target in wanted if not exists(target)]
    if unknown:
        known = dict.fromkeys(re.sub(r"^.*blocks\.\d+\.", "", name) for name in layers if "blocks." in name)
        raise UserError(f"model.lora.targets names {unknown}; a block of the transformer has: {', '.join(known)}")
    return wanted


ATTENTION_PROJECTIONS = (
    "to_q",
    "to_k",
    "to_v",
    "to_out.0",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
)
"""Of the image stream and of the text stream.

Source: yifan123/flow_grpo scripts/train_sd3.py, scxue/advantage_weighted_matching."""
