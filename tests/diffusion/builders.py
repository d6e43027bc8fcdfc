from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from diffusion.toy.pipelines.tiny import TinySd3Sizes, clip_text_model, clip_tokenizer, t5_text_model, t5_tokenizer
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from tests.diffusion.tiny_flux import TinyFluxSizes

COLOURS = ("red", "green", "blue")
SHAPES = ("circle", "square", "triangle")
CAPTIONS = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
SIZES = TinySd3Sizes(layers=2)
FLUX_SIZES = TinyFluxSizes(layers=1, single_layers=1)
T5_TOKENS = 12


def load_sd3(folder: Path, **components: Any) -> Any:
    """A frozen pipeline without progress bars."""
    ensure_torchvision()
    from diffusers import StableDiffusion3Pipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    with quiet_transformers():
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder, **components)
    return freeze(pipeline)


def build_flux() -> Any:
    """The text half of a FLUX pipeline, which suffices to embed a prompt."""
    ensure_torchvision()
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    torch.manual_seed(1)
    short, long = clip_tokenizer(CAPTIONS, 560, 16), t5_tokenizer(CAPTIONS, 200)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=clip_text_model(short, 16, 2, 4, 16),
        tokenizer=short,
        text_encoder_2=t5_text_model(long, 32, 1, 4),
        tokenizer_2=long,
        transformer=None,
    )
    return freeze(pipeline)


def freeze(pipeline: Any) -> Any:
    for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
        module = getattr(pipeline, name, None)
        if module is not None:
            module.requires_grad_(False)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


class RowCounter:
    """Counts the rows that go through modules, by hooks."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.rows = 0
        self.calls = 0
        self._handles = [module.register_forward_pre_hook(self._count, with_kwargs=True) for module in modules]

    def _count(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_ids"))
        self.rows += len(first)
        self.calls += 1

    def __enter__(self) -> RowCounter:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
