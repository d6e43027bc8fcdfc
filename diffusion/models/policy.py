"""A pipeline as a policy: its options, adapters, forward pass, saving and loading."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import MISSING
from torch import Tensor, nn

from diffusion.families.base import Family, Text, blocks_of
from diffusion.families.table import find_family
from diffusion.models.conditioning import PromptEmbeddings
from diffusion.models.pipelines import load_pipeline, quiet_diffusers
from diffusion.models.saved import (
    ADAPTER,
    BASE_FILE,
    copy_into,
    guarded,
    merged,
    read_adapter,
    read_base,
    read_network,
    save_adapter,
)
from mmrl.config import from_values
from mmrl.core.state import Tally
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice, rare
from mmrl.files import expanded, follow_umask, replaced, write_atomically
from mmrl.hub.building import base_entries, build_if_missing
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from mmrl.training.processes import avoid_refused_instructions

LOGGER = logging.getLogger("mmrl")


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
    """Linear layers that get an adapter, by the end of their name; empty: those of the family."""

    def validate(self) -> None:
        """Refuse an empty list of layers; raises UserError."""
        if self.targets is not None and not self.targets:
            raise UserError("model.lora.targets names no layer; leave it out for those of the family")


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
    family: str | None = rare(None)
    """`module:Class` of a `diffusion.families.base.Family` for a pipeline that the suite has none for."""
    family_options: dict[str, Any] = rare(field(default_factory=dict))
    """Further options of the family, the fields of its `options_class` in `diffusion/families`."""
    dtype: str = choice("float32", lambda: DTYPES)
    """Precision of all weights but the adapters, which are float32: float32, bfloat16 or float16."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters in place of full fine-tuning."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    height: int | None = bounded(None, at_least=1)
    """Image height in pixels; empty: the size that the pipeline was trained for."""
    width: int | None = bounded(None, at_least=1)
    """Image width in pixels; empty: the size that the pipeline was trained for."""
    frames: int | None = bounded(None, at_least=1)
    """Frames of a video; empty: the family's default. Families of images have none."""
    networks: list[str] | None = rare(None)
    """Networks that are trained where a family has several; empty: all of them."""
    guidance_embedding: float = rare(bounded(3.5, at_least=0, finite=True))
    """Guidance scale, an input of guidance-distilled FLUX transformers; others have none."""
    max_sequence_length: int | None = bounded(None, at_least=1)
    """Tokens of the long text encoder; empty: the pipeline's own default, 256 for Stable Diffusion 3 and 512 for
    FLUX."""
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


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def add_adapter(network: Any, settings: LoraSettings, family: Family, seed: int) -> None:
    """Add adapters to linear layers; the random half is Gaussian, and both are float32."""
    ensure_torchvision()
    import peft

    targets = _targets(network, settings.targets, family.lora_targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network.add_adapter(
            peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                lora_dropout=settings.dropout,
                init_lora_weights="gaussian",
                target_modules=targets,
            ),
            ADAPTER,
        )
    for weight in network.parameters():
        if weight.requires_grad:
            # optimiser steps are smaller than bfloat16 and float16 can add
            weight.data = weight.data.float()
    blocks = blocks_of(network).values()
    reached = sum(any(".lora_" in name for name, _ in block.named_parameters()) for block in blocks)
    LOGGER.info("adapters in %d of %d blocks", reached, len(blocks))


def _targets(network: nn.Module, wanted: list[str] | None, of_family: Sequence[str]) -> list[str]:
    """Targets for peft: ends of names, or whole names where an end also fits a module that is no linear layer."""
    modules = dict(network.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]

    def ends(names: Iterable[str], target: str) -> list[str]:
        return [name for name in names if f".{name}".endswith(f".{target}")]

    targets = [*of_family] if wanted is None else wanted
    unknown = [target for target in targets if not ends(linear, target)]
    if unknown:
        known = dict.fromkeys(re.sub(r"^.*blocks\.\d+\.", "", name) for name in linear if "blocks." in name)
        raise UserError(f"model.lora.targets names {unknown}; a block of the network has: {', '.join(known)}")
    if all(len(ends(modules, target)) == len(ends(linear, target)) for target in targets):
        return targets
    return list(dict.fromkeys(name for target in targets for name in ends(linear, target)))


class DiffusionPolicy(nn.Module):
    """A velocity model with weights to train. It is a `VelocityModel`.

    Only the networks of `Family.networks` are submodules, under their names in the pipeline. The frozen autoencoder and
    text encoders stay in `pipeline`: they move with the policy but are neither saved nor copied nor put into training
    mode. A deep copy shares them with the original, and beside an adapter every other weight too.

    Args:
        pipeline: frozen pipeline, as `load_pipeline` gives it; its networks are trained.
        config: how it is trained; the path is only recorded beside saved weights.
        seed: seed of the adapters' random half; the other half starts at zero, so the policy is the pipeline at first.
            The global generator is left alone.

    Raises:
        UserError: settings that do not fit the pipeline.
    """

    starts_from_adapter: bool = False
    """Whether the adapters were trained before, so that the policy at the start is not the pipeline."""

    def __init__(self, pipeline: Any, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        check_config(config, "model")
        self.pipeline = pipeline
        self.config = config
        self.base_path = str(config.path)
        """Source of the pipeline."""
        self.family = make_family(pipeline, config)
        """Translates between this policy and the pipeline."""
        self.latent_shape: tuple[int, ...] = self.family.latent_shape(config.height, config.width, config.frames)
        """C, H, W of one image's latents at the configured size; C, T, H, W of a video's."""
        self.cost = Tally(forward_rows=0, train_rows=0)
        """Rows that went through the network without and with a graph, copies of the policy included."""
        self.embeddings = PromptEmbeddings(
            self.family,
            max_bytes=config.embedding_memory_mb * 2**20,
            folder=(config.embedding_cache or tempfile.gettempdir()) if config.free_text_encoders else None,
            size=(self.latent_shape[-2] * self.family.factor, self.latent_shape[-1] * self.family.factor),
        )
        present = [name for name in self.family.networks if getattr(pipeline, name, None) is not None]
        self.trained_networks = tuple(present if config.networks is None else config.networks)
        """Names of the networks that are trained."""
        if unknown := [name for name in self.trained_networks if name not in present]:
            raise UserError(f"model.networks names {unknown}; {config.path} has {', '.join(present)}")
        for name in present:
            network = getattr(pipeline, name)
            self.add_module(name, network)
            if name not in self.trained_networks:
                continue
            if config.lora.enabled:
                add_adapter(network, config.lora, self.family, seed)
            else:
                network.requires_grad_(True)
            if config.gradient_checkpointing:
                network.enable_gradient_checkpointing()
        self.distilled = self.family.embedded_guidance
        """Whether the guidance scale is an input of the network."""
        if not self.distilled and config.guidance_embedding != ModelConfig.guidance_embedding:
            raise UserError(
                f"model.guidance_embedding is {config.guidance_embedding}, but the transformer of {config.path} has no "
                "such input; leave it out, and set sampler.guidance"
            )
        weights = ((weight.numel(), name) for name, weight in self.named_parameters() if ".lora_" not in name)
        self._largest = max(weights)[1]
        self._adapter_off = False

    def __deepcopy__(self, memo: dict[int, Any]) -> DiffusionPolicy:
        shared = [self.pipeline, self.family, self.embeddings, self.cost]
        for name, network in self.named_children():
            weights = (*network.named_parameters(), *network.named_buffers())
            if self.has_adapter or name not in self.trained_networks:
                shared += [weight for key, weight in weights if ".lora_" not in key]
        memo.update({id(part): part for part in shared})
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiffusionPolicy:
        # the pipeline's networks are this policy's, or those of the policy of which this is a copy
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module) and name not in self.family.networks:
                part._apply(fn)
        super()._apply(fn, recurse)
        return self

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA adapters are trained."""
        return self.config.lora.enabled

    @property
    def device(self) -> torch.device:
        """Device of the networks."""
        return self.get_parameter(self._largest).device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the networks' own weights; a few kinds of layer may stay in float32."""
        return self.get_parameter(self._largest).dtype

    @property
    def trained(self) -> dict[str, Any]:
        """The networks that are trained, by their names in the pipeline."""
        return {name: getattr(self, name) for name in self.trained_networks}

    def forward(self, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity at noisy latents.

        Args:
            latents: x_t (B, C, H, W), of videos (B, C, T, H, W).
            sigma: time (B,) float32, 1 (noise) to 0 (image).
            text: embeddings of B rows, as `TextRows.expanded` gives them.

        Returns:
            Velocity noise - image of the latents' shape, in the network's precision or that of autocast.

        Gradient: into the trained weights and the latents.
        """
        device, dtype = self.device, self.dtype
        self.cost["train_rows" if torch.is_grad_enabled() else "forward_rows"] += len(latents)
        latents, sigma = latents.to(device, dtype), sigma.to(device)
        text = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in text.items()}
        which = self.family.network_of(sigma)
        if which is None:
            return self.family.velocity(getattr(self, self.family.networks[0]), latents, sigma, text)
        parts, order = [], []
        for number, name in enumerate(self.family.networks):
            rows = (which == number).nonzero().flatten()
            if len(rows):
                own = {key: value[rows] for key, value in text.items()}
                parts.append(self.family.velocity(getattr(self, name), latents[rows], sigma[rows], own))
                order.append(rows)
        return torch.cat(parts)[torch.cat(order).argsort()]

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the networks without their LoRA adapters, as the reference of a KL term.

        Raises:
            UserError: there is no adapter.
        """
        if not self.has_adapter:
            raise UserError("the model has no adapter to switch off; set model.lora.enabled or use a frozen copy")
        if self._adapter_off:
            yield
            return
        # peft also switches requires_grad, off with the adapter and then on, even if it was off before
        trained = {weight: weight.requires_grad for weight in self.parameters()}
        for network in self.trained.values():
            network.disable_adapters()
        self._adapter_off = True
        try:
            yield
        finally:
            for network in self.trained.values():
                network.enable_adapters()
            self._adapter_off = False
            for weight, flag in trained.items():
                weight.requires_grad_(flag)

    def save_pretrained(self, path: Path | str) -> None:
        """Write the trained weights and where the rest comes from.

        Args:
            path: folder, created with its parents. With LoRA it holds the adapter, which the base pipeline's
                `load_lora_weights` reads; without it, it is an ordinary folder of the network. Further networks lie in
                folders of their names.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, network in self.trained.items():
            if self.has_adapter:
                save_adapter(network, name, self.pipeline, self._place(folder, name))
            else:
                network.save_pretrained(self._place(folder, name))
        text = json.dumps(_base(self) | base_entries(self.base_path, folder), indent=2, sort_keys=True)
        write_atomically(folder / BASE_FILE, text + "\n")
        follow_umask(folder)

    def save_pipeline(self, path: Path | str) -> None:
        """Write an ordinary pipeline folder with the trained networks, adapters added into their weights.

        Text encoders that were freed are left out, and the scheduler is the one whose steps evaluations take.

        Args:
            path: folder, created with its parents.
        """
        trained = {name: merged(part) if self.has_adapter else part for name, part in self.trained.items()}
        saved = self.pipeline.config
        given = {name: saved[name] for name in self.family.settings if name in saved}
        parts = self.pipeline.components | trained | {"scheduler": self.family.drawing_scheduler()}
        pipeline = type(self.pipeline)(**parts, **given)
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
        read = read_adapter if self.has_adapter else read_network
        for name, network in self.trained.items():
            place = self._place(folder, name)
            state = guarded(place, partial(read, network, place))
            copy_into(network, state, place, adapter_only=self.has_adapter)

    def _place(self, folder: Path, name: str) -> Path:
        """Folder of a network's weights."""
        return folder if name == self.family.networks[0] else folder / name


def make_family(pipeline: Any, config: ModelConfig) -> Family:
    """The family of a pipeline with its options, old names of `ModelConfig` among them."""
    kind = find_family(type(pipeline).__name__, config.family, str(config.path))
    names = {item.name for item in fields(kind.options_class)}
    given = {name: getattr(config, name) for name in ("max_sequence_length", "guidance_embedding") if name in names}
    if both := [name for name in given if name in config.family_options]:
        raise UserError(f"model.family_options names {both}, which is model.{both[0]}; give it there")
    options = from_values(kind.options_class, given | config.family_options, "model.family_options")
    check_config(options, "model.family_options")
    return kind(pipeline, options)


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
    if config.dtype != "float32":
        avoid_refused_instructions()
    if config.build is not None:
        build_if_missing(config, "model")
    start = _find_start(model_folder(config.path), config)
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


def _find_start(path: str, config: ModelConfig) -> _Start:
    """Follow saved weights down to their pipeline."""
    file = expanded(path) / BASE_FILE
    if not file.is_file():
        # relative paths would end with this process
        place = str(Path(path).absolute()) if Path(path).is_dir() else str(path)
        return _Start(load_pipeline(path, DTYPES[config.dtype], family=config.family), place, place, None)
    check_model(file.parent)
    saved = read_base(file)
    below = _find_start(str(saved["path"]), config)
    if below.adapter is not None:
        raise UserError(f"{file} goes on from an adapter, {below.adapter}; save_pipeline makes a pipeline of one")
    if saved.get("kind") == "lora":
        return below._replace(adapter=file.parent)
    kind = find_family(type(below.pipeline).__name__, config.family)
    for name in saved.get("networks", kind.networks[:1]):
        network, folder = getattr(below.pipeline, name), file.parent / ("" if name == kind.networks[0] else name)
        copy_into(network, guarded(folder, partial(read_network, network, folder)), folder, adapter_only=False)
    return below._replace(base=str(file.parent.absolute()))


def _base(policy: DiffusionPolicy) -> dict[str, Any]:
    """Description of the saved weights."""
    lora = policy.config.lora
    kind: dict[str, Any] = {"kind": "full"}
    if lora.enabled:
        kind = {"kind": "lora", "rank": lora.rank, "alpha": lora.alpha}
    if policy.trained_networks != policy.family.networks[:1]:
        kind["networks"] = list(policy.trained_networks)
    parts = {"pipeline": policy.pipeline, "transformer": getattr(policy, policy.family.networks[0])}
    return {"path": policy.base_path, **{name: type(part).__name__ for name, part in parts.items()}, **kind}


def _check_kind(policy: DiffusionPolicy, folder: Path) -> None:
    """Refuse a folder that was saved with other settings, naming them."""
    file = folder / BASE_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a saved policy: it has no {BASE_FILE}")
    saved = read_base(file)
    own = _base(policy)
    different = [key for key in ("transformer", "kind", "rank", "alpha", "networks") if saved.get(key) != own.get(key)]
    if different:
        said = ", ".join(f"{key} {saved.get(key)} instead of {own.get(key)}" for key in different)
        raise UserError(f"the weights in {folder} do not fit this policy: they have {said}; adapt model.lora")
