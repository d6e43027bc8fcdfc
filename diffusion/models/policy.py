"""A pipeline as a policy: its options, adapters, forward pass, saving and loading."""

from __future__ import annotations

import contextlib
import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from diffusion.models.conditioning import PromptEmbeddings
from diffusion.models.pipelines import family_of, image_tokens, latent_shape, load_pipeline, quiet_diffusers
from diffusion.models.saved import (
    ADAPTER,
    BASE_FILE,
    copy_into,
    guarded,
    merged,
    read_adapter,
    read_base,
    read_transformer,
    save_adapter,
)
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from mmrl.files import expanded, follow_umask, replaced, write_atomically
from mmrl.hub.building import base_entries, build_if_missing
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from mmrl.training.processes import avoid_refused_instructions
from mmrl.training.recipe import Tally


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
    """Pipeline folder, hub id such as stabilityai/stable-diffusion-3.5-medium, folder of saved weights of either, or
    folder of a run (its best checkpoint)."""
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
    embedding_memory_mb: int = rare(bounded(256, at_least=1))
    """Prompt embeddings kept in memory, in 2^20 bytes; one of SD3.5 in bfloat16 takes 2.6. Others are made again, or
    read from files where the text encoders are dropped."""
    embedding_cache: str | None = rare(None)
    """Folder of these files, which last as long as the run; empty: the system's folder for temporary files."""


def full_model() -> ModelConfig:
    """Every weight of the transformer is trained."""
    return ModelConfig(lora=LoraSettings(enabled=False))


DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_adapter(transformer: Any, settings: LoraSettings, seed: int) -> None:
    """Add adapters to linear layers; the random half is Gaussian, and both are float32."""
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
"""Targets of adapters in the image stream and in the text stream.

Source: yifan123/flow_grpo scripts/train_sd3.py, scxue/advantage_weighted_matching."""


class DiffusionPolicy(nn.Module):
    """A velocity model with weights to train. It is a `VelocityModel`.

    Only the transformer is a submodule. The frozen autoencoder and text encoders stay in `pipeline`: they move with the
    policy but are neither saved nor copied nor put into training mode. A deep copy shares them with the original, and
    beside an adapter every weight of the transformer too.

    Args:
        pipeline: Stable Diffusion 3 or FLUX pipeline, frozen, as `load_pipeline` gives it; its transformer is trained.
        config: how it is trained; the path is only recorded beside saved weights.
        seed: seed of the adapters' random half; the other half starts at zero, so the policy is the pipeline at first.
            The global generator is left alone.

    Raises:
        UserError: settings that do not fit the transformer.
    """

    transformer: Any
    starts_from_adapter: bool = False
    """Whether the adapters were trained before, so that the policy at the start is not the pipeline."""

    def __init__(self, pipeline: Any, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        check_config(config, "model")
        self.pipeline = pipeline
        self.config = config
        self.base_path = str(config.path)
        """Source of the pipeline."""
        self.transformer = pipeline.transformer
        self.latent_shape = latent_shape(pipeline, config.height, config.width)
        """C, H, W of one image's latents at the configured size."""
        self.image_tokens = image_tokens(pipeline, self.latent_shape)
        """Tokens that the transformer sees of one image."""
        self.even_steps = family_of(pipeline).even_steps
        """Whether the scheduler is given equal steps, see `sigma_grid`."""
        self.cost = Tally(forward_rows=0, train_rows=0)
        """Rows that went through the transformer without and with a graph, copies of the policy included."""
        self.embeddings = PromptEmbeddings(
            pipeline,
            max_bytes=config.embedding_memory_mb * 2**20,
            max_sequence_length=config.max_sequence_length,
            folder=(config.embedding_cache or tempfile.gettempdir()) if config.free_text_encoders else None,
        )
        if config.lora.enabled:
            add_adapter(self.transformer, config.lora, seed)
        else:
            self.transformer.requires_grad_(True)
        if config.gradient_checkpointing:
            self.transformer.enable_gradient_checkpointing()
        self.distilled = bool(self.transformer.config.get("guidance_embeds"))
        """Whether the guidance scale is an input of the transformer."""
        if not self.distilled and config.guidance_embedding != ModelConfig.guidance_embedding:
            raise UserError(
                f"model.guidance_embedding is {config.guidance_embedding}, but the transformer of {config.path} has no "
                "such input; leave it out, and set sampler.guidance"
            )
        self._velocity = family_of(pipeline).velocity(self.transformer, config.guidance_embedding)
        self._adapter_off = False

    def __deepcopy__(self, memo: dict[int, Any]) -> DiffusionPolicy:
        shared = [self.pipeline, self.embeddings, self.cost]
        if self.has_adapter:
            weights = (*self.transformer.named_parameters(), *self.transformer.named_buffers())
            shared += [weight for name, weight in weights if ".lora_" not in name]
        memo.update({id(part): part for part in shared})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiffusionPolicy:
        for part in self.pipeline.components.values():
            # the pipeline's transformer is this policy's, or that of the policy of which this is a copy
            if isinstance(part, nn.Module) and part is not self.pipeline.transformer:
                part._apply(fn)
        super()._apply(fn, recurse)
        return self

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA adapters are trained."""
        return self.config.lora.enabled

    @property
    def device(self) -> torch.device:
        """Device of the transformer."""
        return self.transformer.proj_out.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the transformer's own weights."""
        return self.transformer.proj_out.weight.dtype

    def forward(self, latents: Tensor, sigma: Tensor, tokens: Tensor, pooled: Tensor) -> Tensor:
        """Velocity at noisy latents.

        Args:
            latents: x_t (B, C, H, W).
            sigma: time (B,) float32, 1 (noise) to 0 (image).
            tokens: text tokens (B, L, D).
            pooled: pooled text embeddings (B, P).

        Returns:
            Velocity noise - image (B, C, H, W), in the transformer's precision or that of autocast.

        Gradient: into the trained weights and the latents.
        """
        device, dtype = self.device, self.dtype
        self.cost["train_rows" if torch.is_grad_enabled() else "forward_rows"] += len(latents)
        return self._velocity(
            latents.to(device, dtype), sigma.to(device), tokens.to(device, dtype), pooled.to(device, dtype)
        )

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the transformer without its LoRA adapters, as the reference of a KL term.

        Raises:
            UserError: there is no adapter.
        """
        if not self.has_adapter:
            raise UserError("the model has no adapter to switch off; set model.lora.enabled or use a frozen copy")
        if self._adapter_off:
            yield
            return
        # peft also switches requires_grad, off with the adapter and then on, even if it was off before
        trained = {weight: weight.requires_grad for weight in self.transformer.parameters()}
        self.transformer.disable_adapters()
        self._adapter_off = True
        try:
            yield
        finally:
            self.transformer.enable_adapters()
            self._adapter_off = False
            for weight, flag in trained.items():
                weight.requires_grad_(flag)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the trained weights and where the rest comes from.

        Args:
            path: folder, created with its parents. With LoRA it holds the adapter, which the base pipeline's
                `load_lora_weights` reads; without it, it is an ordinary transformer folder.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if self.has_adapter:
            save_adapter(self.transformer, self.pipeline, folder)
        else:
            self.transformer.save_pretrained(folder)
        text = json.dumps(_base(self) | base_entries(self.base_path, folder), indent=2, sort_keys=True)
        write_atomically(folder / BASE_FILE, text + "\n")
        follow_umask(folder)

    def save_pipeline(self, path: Path | str) -> None:
        """Write an ordinary pipeline folder with the trained transformer, adapters added into its weights.

        Text encoders that were freed are left out.

        Args:
            path: folder, created with its parents.
        """
        transformer = merged(self.transformer) if self.has_adapter else self.transformer
        parts = {**self.pipeline.components, "transformer": transformer}
        pipeline = type(self.pipeline)(**parts)
        with replaced(Path(path)) as draft, quiet_transformers(), quiet_diffusers():
            pipeline.save_pretrained(draft)

    def absent_parts(self) -> list[str]:
        """Parts of the pipeline that it has not, and that a saved one has to be told of as None."""
        optional = type(self.pipeline)._optional_components
        return [name for name, part in self.pipeline.components.items() if part is None and name not in optional]

    def load_weights(self, path: Path | str) -> None:
        """Read the exact weights of `save_pretrained` into the present parameters.

        Args:
            path: folder written by `save_pretrained` of a policy of the same shape.

        Raises:
            UserError: the folder is not one, is damaged or belongs to another model.
        """
        folder = Path(path)
        _check_kind(self, folder)
        own = read_adapter if self.has_adapter else partial(read_transformer, self.transformer)
        state = guarded(folder, lambda: own(folder))
        copy_into(self.transformer, state, folder, adapter_only=self.has_adapter)


def load_policy(config: ModelConfig, seed: int = 0) -> DiffusionPolicy:
    """Load a pipeline and wrap it as a policy.

    Args:
        config: which pipeline and how. Where its path is a folder written by `DiffusionPolicy.save_pretrained`, the
            pipeline that the folder names is loaded and training continues from the saved weights.
        seed: seed of the adapters' random half.

    Returns:
        The policy on the CPU, in evaluation mode.

    Raises:
        UserError: a setting is out of range, or the pipeline is missing, damaged or of another kind.
    """
    check_config(config, "model")
    if config.dtype == "bfloat16":
        avoid_refused_instructions()
    if config.build is not None:
        build_if_missing(config, "model")
    start = _find_start(model_folder(config.path), DTYPES[config.dtype])
    policy = DiffusionPolicy(start.pipeline, config, seed)
    policy.base_path = start.base if config.lora.enabled else start.root
    if start.adapter is not None:
        policy.load_weights(start.adapter)
        policy.starts_from_adapter = True
    return policy.eval()


class _Start(NamedTuple):
    """Pipeline and weights that a policy starts from."""

    pipeline: Any
    root: str
    """Source of the pipeline."""
    base: str
    """Source of its transformer: the pipeline, or a folder of a transformer that was trained in full."""
    adapter: Path | None
    """Folder of a saved adapter on top of it."""


def _find_start(path: str, dtype: torch.dtype) -> _Start:
    """Follow saved weights down to their pipeline."""
    file = expanded(path) / BASE_FILE
    if not file.is_file():
        # relative paths would end with this process
        place = str(Path(path).absolute()) if Path(path).is_dir() else str(path)
        return _Start(load_pipeline(path, dtype), place, place, None)
    check_model(file.parent)
    saved = read_base(file)
    below = _find_start(str(saved["path"]), dtype)
    if below.adapter is not None:
        raise UserError(f"{file} goes on from an adapter, {below.adapter}; save_pipeline makes a pipeline of one")
    if saved.get("kind") == "lora":
        return below._replace(adapter=file.parent)
    transformer = below.pipeline.transformer
    state = guarded(file.parent, lambda: read_transformer(transformer, file.parent))
    copy_into(transformer, state, file.parent, adapter_only=False)
    return below._replace(base=str(file.parent.absolute()))


def _base(policy: DiffusionPolicy) -> dict[str, Any]:
    """Description of the saved weights."""
    lora = policy.config.lora
    kind = {"kind": "lora", "rank": lora.rank, "alpha": lora.alpha} if lora.enabled else {"kind": "full"}
    parts = {"pipeline": policy.pipeline, "transformer": policy.transformer}
    return {"path": policy.base_path, **{name: type(part).__name__ for name, part in parts.items()}, **kind}


def _check_kind(policy: DiffusionPolicy, folder: Path) -> None:
    """Refuse a folder that was saved with other settings, naming them."""
    file = folder / BASE_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a saved policy: it has no {BASE_FILE}")
    saved = read_base(file)
    own = _base(policy)
    different = [key for key in ("transformer", "kind", "rank", "alpha") if saved.get(key) != own.get(key)]
    if different:
        said = ", ".join(f"{key} {saved.get(key)} instead of {own.get(key)}" for key in different)
        raise UserError(f"the weights in {folder} do not fit this policy: they have {said}; adapt model.lora")
