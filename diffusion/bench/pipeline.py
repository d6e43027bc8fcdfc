"""The pipeline that the arms of `python -m benchmarks diffusion` run on, and the count of rows that go through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmrl.hub.compat import ensure_torchvision, quiet_transformers

PROMPT = "a red circle and a blue square"
OTHER_PROMPT = "three green triangles"


class RowCount:
    """Rows that go through a pipeline's transformer, with and without a graph, and through its text encoders."""

    def __init__(self, pipeline: Any) -> None:
        self.rows = {"forward": 0, "train": 0, "text": 0}
        self.calls = 0
        pipeline.transformer.register_forward_pre_hook(self._transformer, with_kwargs=True)
        pipeline.text_encoder.register_forward_pre_hook(self._encoder, with_kwargs=True)

    def reset(self) -> None:
        """Count from here."""
        self.rows = dict.fromkeys(self.rows, 0)
        self.calls = 0

    def per_image(self, images: int) -> dict[str, float]:
        """Rows of each kind per image that was made or trained on, and the transformer's calls in all."""
        return {f"{name}_rows": count / images for name, count in self.rows.items()} | {"transformer_calls": self.calls}

    def _transformer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows["train" if torch.is_grad_enabled() else "forward"] += len(kwargs["hidden_states"])
        self.calls += 1

    def _encoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.rows["text"] += len(args[0])


def open_pipeline(options: dict[str, Any]) -> Any:
    """Load the benchmark's pipeline with frozen text encoders."""
    ensure_torchvision()
    from diffusers import StableDiffusion3Pipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    with quiet_transformers():
        pipeline: Any = StableDiffusion3Pipeline.from_pretrained(options["model"])
    for module in (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3, pipeline.vae):
        module.requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(options["device"])


def noise(pipeline: Any, rows: int) -> Tensor:
    """Initial noise (rows, C, H, W), the same at every call."""
    config = pipeline.transformer.config
    shape = (rows, config.in_channels, config.sample_size, config.sample_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(pipeline.device)


def sigma_grid(pipeline: Any, steps: int) -> Tensor:
    """Times (steps + 1,) of the pipeline's own scheduler."""
    pipeline.scheduler.set_timesteps(steps)
    sigmas: Tensor = pipeline.scheduler.sigmas
    return sigmas
