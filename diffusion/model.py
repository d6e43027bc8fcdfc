"""Options of the model: pipeline, adapters, precision, image size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, choice, rare


@dataclass
class LoraSettings:
    """Low-rank adapters in place of full fine-tuning; rank, alpha and targets are those of Flow-GRPO and AWM."""

    enabled: bool = True
    """Train adapters and freeze the transformer's own weights."""
    rank: int = bounded(32, at_least=1)
    """Width of the adapters."""
    alpha: int = bounded(64, at_least=1)
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = rare(bounded(0.0, at_least=0, below=1))
    """Dropout on the adapters' input while training; above 0 the ratio is not 1 before the first step."""
    targets: list[str] | None = rare(None)
    """Linear layers that get an adapter, by the end of their name; empty: all attention projections of both streams."""

    def validate(self) -> None:
        """Refuse an empty list of layers; raises UserError."""
        if self.targets is not None and not self.targets:
            raise UserError("model.lora.targets names no layer; leave it out for all attention projections")


@dataclass
class ModelConfig:
    """The pipeline that is trained, its precision and size."""

    path: str = MISSING
    """Pipeline folder, hub id such as stabilityai/stable-diffusion-3.5-medium, or folder of saved weights of either."""
    build: str | None = None
    """`module:function` that writes `path` when it does not exist: function(path, **build_options)."""
    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the build function."""
    dtype: str = choice("float32", lambda: DTYPES)
    """Precision of all weights but the adapters, which are float32: float32 or bfloat16."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters in place of full fine-tuning."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    height: int | None = bounded(None, at_least=1)
    """Image height in pixels; empty: the size that the pipeline was trained for."""
    width: int | None = bounded(None, at_least=1)
    """Image width in pixels; empty: the size that the pipeline was trained for."""
    guidance_embedding: float = rare(bounded(3.5, at_least=0, finite=True))
    """Guidance scale, an input of guidance-distilled FLUX transformers; others have none."""
    max_sequence_length: int | None = bounded(None, at_least=1)
    """Tokens of the T5 encoder; empty: the pipeline's own default, 256 for Stable Diffusion 3 and 512 for FLUX."""
    free_text_encoders: bool = False
    """Embed all prompts at the start of the run and drop the text encoders; no other prompt can be drawn then."""


def full_model() -> ModelConfig:
    """Every weight of the transformer is trained."""
    return ModelConfig(lora=LoraSettings(enabled=False))


DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
