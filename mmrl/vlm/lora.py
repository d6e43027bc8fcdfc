"""Low-rank adapters of the language model's linear layers."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from mmrl.errors import UserError
from mmrl.vlm.model_config import LoraSettings


def add_adapter(network: Any, settings: LoraSettings, adapter: Path | None) -> Any:
    """Put LoRA adapters into a model."""
    import peft

    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a property that transformers renamed
        if adapter is not None:
            loaded = peft.PeftModel.from_pretrained(network, adapter, is_trainable=settings.enabled)
            return loaded if settings.enabled else loaded.merge_and_unload()
        torch.manual_seed(settings.seed)
        lora = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=_lora_pattern(network, settings),
        )
        return peft.get_peft_model(network, lora)


def _lora_pattern(network: Any, settings: LoraSettings) -> str:
    layer = network.model.language_model.layers[0]
    found = {name.rpartition(".")[2] for name, _ in layer.named_modules()}
    unknown = [name for name in settings.targets if name not in found]
    if unknown:
        known = ", ".join(name for name in LoraSettings().targets if name in found)
        raise UserError(f"model.lora.targets names {unknown}; a decoder layer has: {known}")
    names = "|".join(re.escape(name) for name in settings.targets)
    return rf".*language_model\.layers\..*\.({names})"
