"""A diffusers pipeline as a policy: options, adapters, forward pass, saving and loading."""

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
from mmrl.hub.building import BuiltPath, base_entries, build_if_missing
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.runs.checkpoint import check_model
from mmrl.runs.export import model_folder
from mmrl.training.processes import avoid_refused_instructions
from mmrl.workers.given import frozen_weights

LOGGER = logging.getLogger("mmrl")


@dataclass
class DiffusionLora:
    """Low-rank adapters instead of full fine-tuning; rank, alpha and targets as in Flow-GRPO and AWM."""

    enabled: bool = True
    """Train adapters and freeze the transformer's own weights."""
    rank: int = bounded(32, at_least=1)
    """Rank of the adapters."""
    alpha: int = bounded(64, at_least=1)
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = rare(bounded(0.0, at_least=0, below=1))
    """Dropout on the adapters' input during training; above 0, the ratio is not 1 even before the first update."""
    targets: list[str] | None = rare(None)
    """Linear layers to adapt, by the end of their name. Default: the family's."""

    def validate(self) -> None:
        """Reject an empty list of layers; raises UserError."""
        if self.targets is not None and not self.targets:
            raise UserError("model.lora.targets is empty; leave it out to use the family's layers")


@dataclass
class PipelineConfig(BuiltPath):
    """The pipeline to train, its precision and size."""

    path: str = MISSING
    """Pipeline folder, Hub id such as stabilityai/stable-diffusion-3.5-medium, folder of weights saved from either, or
    run folder (its best checkpoint)."""
    family: str | None = rare(None)
    """`module:Class` of a `diffusion.families.base.Family`, for pipelines without a built-in family."""
    family_options: dict[str, Any] = rare(field(default_factory=dict))
    """Options of the family: the fields of its `options_class` in `diffusion/families`."""
    dtype: str = choice("float32", lambda: DTYPES)
    """Precision of all weights except the adapters, which are float32: float32, bfloat16 or float16."""
    lora: DiffusionLora = field(default_factory=DiffusionLora)
    """Adapters instead of full fine-tuning."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory but takes about a third more time."""
    height: int | None = bounded(None, at_least=1)
    """Image height in pixels. Default: the size the pipeline was trained for."""
    width: int | None = bounded(None, at_least=1)
    """Image width in pixels. Default: the size the pipeline was trained for."""
    frames: int | None = bounded(None, at_least=1)
    """Number of frames of a video. Default: the family's. Not for image families."""
    networks: list[str] | None = rare(None)
    """Networks to train if the family has several. Default: all of them."""
    guidance_embedding: float = rare(bounded(3.5, at_least=0))
    """Guidance scale passed to guidance-distilled FLUX transformers; other models do not have this input."""
    max_sequence_length: int | None = bounded(None, at_least=1)
    """Maximum number of tokens of the long text encoder. Default: the pipeline's own, 256 for Stable Diffusion 3 and
    512 for FLUX."""
    free_text_encoders: bool = False
    """Embed all prompts at the start of the run and free the text encoders; no other prompts can be used then."""
    embedding_memory_mb: int = rare(bounded(256, at_least=1))
    """Memory for prompt embeddings, in MiB; one SD3.5 embedding in bfloat16 takes 2.6. Embeddings beyond the limit are
    recomputed, or read from files if the text encoders were freed."""
    embedding_cache: str | None = rare(None)
    """Folder for embedding files of freed encoders, which are deleted at the end of the run. Default: the system's
    temporary folder."""

    def validate(self) -> None:
        """Reject a folder for embeddings that are computed again instead; raises UserError."""
        if self.embedding_cache is not None and not self.free_text_encoders:
            raise UserError(
                f"model.embedding_cache is {self.embedding_cache!r}, but embeddings are only written with "
                "model.free_text_encoders=true; set it, or leave the folder out"
            )

    def check_loaded(self, pipeline: Any) -> None:
        """Reject a loaded pipeline without a family; raises UserError."""
        find_family(type(pipeline).__name__, self.family, "model")


def full_model() -> PipelineConfig:
    """Settings that train every weight of the transformer."""
    return PipelineConfig(lora=DiffusionLora(enabled=False))


DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def add_adapter(network: Any, settings: DiffusionLora, family: Family, seed: int) -> None:
    """Add float32 adapters to linear layers; the random half is Gaussian."""
    ensure_torchvision()
    import peft

    # checked before anything is added: peft skips names that match nothing
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
            # a fixed name: saving, merging and switching off all refer to it
            ADAPTER,
        )
    for weight in network.parameters():
        if weight.requires_grad:
            # optimiser steps are too small for bfloat16 and float16 weights: they would be rounded away
            weight.data = weight.data.float()
    blocks = blocks_of(network).values()
    # families differ in their layer names; the log shows whether the targets reached every block
    reached = sum(any(".lora_" in name for name, _ in block.named_parameters()) for block in blocks)
    LOGGER.info("adapters in %d of %d blocks", reached, len(blocks))


def _targets(network: nn.Module, wanted: list[str] | None, of_family: Sequence[str]) -> list[str]:
    """Targets for peft: name endings, or full names if an ending also matches a module that is not a linear layer."""
    modules = dict(network.named_modules())
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]

    def ends(names: Iterable[str], target: str) -> list[str]:
        # with a leading dot, so that `to_q` does not match `add_to_q`
        return [name for name in names if f".{name}".endswith(f".{target}")]

    targets = [*of_family] if wanted is None else wanted
    unknown = [target for target in targets if not ends(linear, target)]
    if unknown:
        # names within a block, each once: a full list would repeat them for every block
        known = dict.fromkeys(re.sub(r"^.*blocks\.\d+\.", "", name) for name in linear if "blocks." in name)
        raise UserError(
            f"model.lora.targets contains unknown layers {unknown}; a block of the network has: {', '.join(known)}"
        )
    # peft takes name endings, but it refuses a match that is not a linear layer
    if all(len(ends(modules, target)) == len(ends(linear, target)) for target in targets):
        return targets
    return list(dict.fromkeys(name for target in targets for name in ends(linear, target)))


class DiffusionPolicy(nn.Module):
    """A trainable velocity model; implements `VelocityModel`.

    Only the networks of `Family.networks` are submodules, under their names in the pipeline. The frozen autoencoder and
    text encoders stay in `pipeline`: they move with the policy, but are not saved, copied or put into training mode. A
    deep copy shares them with the original; with adapters, it shares all weights except the adapters.

    Args:
        pipeline: frozen pipeline from `load_pipeline`; its networks are trained.
        config: training settings; the path is only recorded with saved weights.
        seed: seed of the adapters' random half. The other half starts at zero, so the policy equals the pipeline at
            first. The global generator is not used.

    Raises:
        UserError: settings that do not fit the pipeline.
    """

    starts_from_adapter: bool = False
    """Whether the adapters were already trained, so that the policy differs from the pipeline at the start."""

    def __init__(self, pipeline: Any, config: PipelineConfig, seed: int = 0) -> None:
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
        """Rows that went through the network without and with a graph, including copies of the policy."""
        self.embeddings = PromptEmbeddings(
            self.family,
            max_bytes=config.embedding_memory_mb * 2**20,
            folder=(config.embedding_cache or tempfile.gettempdir()) if config.free_text_encoders else None,
            # images to be edited are brought to the pixel size of the run
            size=(self.latent_shape[-2] * self.family.factor, self.latent_shape[-1] * self.family.factor),
        )
        # a second network is optional in some families, and the pipeline holds None then
        present = [name for name in self.family.networks if getattr(pipeline, name, None) is not None]
        self.trained_networks = tuple(present if config.networks is None else config.networks)
        """Names of the trained networks."""
        if unknown := [name for name in self.trained_networks if name not in present]:
            raise UserError(
                f"model.networks contains unknown networks {unknown}; {config.path} has {', '.join(present)}"
            )
        for name in present:
            network = getattr(pipeline, name)
            # untrained networks are registered too: they have to move with the policy, and the forward pass calls them
            self.add_module(name, network)
            if name not in self.trained_networks:
                continue
            if config.lora.enabled:
                # the pipeline comes frozen, so the adapters are its only trainable weights
                add_adapter(network, config.lora, self.family, seed)
            else:
                network.requires_grad_(True)
            if config.gradient_checkpointing:
                network.enable_gradient_checkpointing()
        self.distilled = self.family.embedded_guidance
        """Whether the guidance scale is an input of the network."""
        if not self.distilled and config.guidance_embedding != PipelineConfig.guidance_embedding:
            raise UserError(
                f"model.guidance_embedding is {config.guidance_embedding}, but the transformer of {config.path} has "
                "no guidance input; leave it out and set sampler.guidance"
            )
        # Device and precision are read from the largest weight: adapters are float32, and some networks keep norms in
        # float32. Its name is kept rather than the tensor, which `to` may replace.
        weights = ((weight.numel(), name) for name, weight in self.named_parameters() if ".lora_" not in name)
        self._largest = max(weights)[1]
        self._adapter_off = False

    def __deepcopy__(self, memo: dict[int, Any]) -> DiffusionPolicy:
        # `cost` is shared so that copies (references, averages) count towards the same run
        shared = [self.pipeline, self.family, self.embeddings, self.cost]
        for name, network in self.named_children():
            weights = (*network.named_parameters(), *network.named_buffers())
            if self.has_adapter or name not in self.trained_networks:
                # frozen weights never differ between copies; only trained ones are worth the memory of a copy
                shared += [weight for key, weight in weights if ".lora_" not in key]
        # what `memo` already holds is returned as it is, so these are not copied
        memo.update({id(part): part for part in shared})
        # `__init__` would load and register everything again
        copied = type(self).__new__(type(self))
        # before the attributes are copied, since some refer back to the policy
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DiffusionPolicy:
        # the pipeline's networks are skipped: they belong to this policy, or to the policy it was copied from
        for name, part in self.pipeline.components.items():
            if isinstance(part, nn.Module) and name not in self.family.networks:
                # `to(device)` has to take the frozen encoders along, although they are no submodules
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
        """Precision of the networks' weights; some layers may stay in float32."""
        return self.get_parameter(self._largest).dtype

    @property
    def trained(self) -> dict[str, Any]:
        """The trained networks by their names in the pipeline."""
        return {name: getattr(self, name) for name in self.trained_networks}

    def forward(self, latents: Tensor, sigma: Tensor, text: Text) -> Tensor:
        """Velocity at noisy latents.

        Args:
            latents: x_t (B, C, H, W), of videos (B, C, T, H, W).
            sigma: time (B,) float32, 1 (noise) to 0 (image).
            text: embeddings of B rows from `TextRows.expanded`.

        Returns:
            Velocity noise - image, in the shape of the latents and the precision of the network or of autocast.

        Gradient: into the trained weights and the latents.
        """
        device, dtype = self.device, self.dtype
        # rows and not calls: guidance in one call counts two rows per image
        self.cost["train_rows" if torch.is_grad_enabled() else "forward_rows"] += len(latents)
        # times stay float32: half precision rounds 999.x of the network's time input
        latents, sigma = latents.to(device, dtype), sigma.to(device)
        # masks and token ids keep their integer type
        text = {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in text.items()}
        # some families switch networks at a time, so it may differ between the rows
        which = self.family.network_of(sigma)
        if which is None:
            return self.family.velocity(getattr(self, self.family.networks[0]), latents, sigma, text)
        # rows of one batch may belong to different networks; each network only sees its own
        parts, order = [], []
        for number, name in enumerate(self.family.networks):
            rows = (which == number).nonzero().flatten()
            if len(rows):
                own = {key: value[rows] for key, value in text.items()}
                parts.append(self.family.velocity(getattr(self, name), latents[rows], sigma[rows], own))
                order.append(rows)
        return torch.cat(parts)[torch.cat(order).argsort()]  # back in the order of the rows

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Run the networks without their LoRA adapters, as the reference of a KL term.

        Raises:
            UserError: the model has no adapter.
        """
        if not self.has_adapter:
            raise UserError("the model has no adapter to disable; set model.lora.enabled or use a frozen copy")
        # may be nested: the outermost use switches the adapter on again
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
        """Write the trained weights and the source of the remaining parts.

        Args:
            path: folder, created with its parents. With LoRA it contains the adapter, which the base pipeline's
                `load_lora_weights` can read; without LoRA, it is an ordinary folder of the network. Further networks
                are in subfolders with their names.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        for name, network in self.trained.items():
            if self.has_adapter:
                save_adapter(network, name, self.pipeline, self._place(folder, name))
            else:
                network.save_pretrained(self._place(folder, name))
        # sorted keys: equal models give equal files
        text = json.dumps(_base(self) | base_entries(self.base_path, folder), indent=2, sort_keys=True)
        write_atomically(folder / BASE_FILE, text + "\n")
        follow_umask(folder)

    def save_pipeline(self, path: Path | str) -> None:
        """Write an ordinary pipeline folder with the trained networks and merged adapters.

        Freed text encoders are missing, and the scheduler is the one that takes the steps of evaluations.

        Args:
            path: folder, created with its parents.
        """
        # merged copies; the policy itself keeps its separate adapters
        trained = {name: merged(part) if self.has_adapter else part for name, part in self.trained.items()}
        saved = self.pipeline.config
        given = {name: saved[name] for name in self.family.settings if name in saved}
        # later entries win: trained networks and the scheduler of evaluations replace the pipeline's
        parts = {**self.pipeline.components, **trained, "scheduler": self.family.drawing_scheduler()}
        pipeline = type(self.pipeline)(**parts, **given)
        # an interrupted save must not leave half a pipeline under the final name
        with replaced(Path(path)) as draft, quiet_transformers(), quiet_diffusers():
            pipeline.save_pretrained(draft)

    def absent_parts(self) -> list[str]:
        """Missing parts of the pipeline that have to be passed as None when it is loaded again."""
        optional = type(self.pipeline)._optional_components
        return [name for name, part in self.pipeline.components.items() if part is None and name not in optional]

    def load_weights(self, path: Path | str) -> None:
        """Load the weights of `save_pretrained` bit for bit into the existing parameters.

        Args:
            path: folder written by `save_pretrained` of a policy with the same shapes.

        Raises:
            UserError: the folder is not a saved policy, is damaged or belongs to another model.
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
        # the first network is at the top, where diffusers' own loaders look for it
        return folder if name == self.family.networks[0] else folder / name


def make_family(pipeline: Any, config: PipelineConfig) -> Family:
    """The family of a pipeline with its options, some of which are fields of `PipelineConfig`."""
    kind = find_family(type(pipeline).__name__, config.family, str(config.path))
    names = {item.name for item in fields(kind.options_class)}
    # options that every model has are fields of `model`, unless the family does not read them
    given = {name: getattr(config, name) for name in ("max_sequence_length", "guidance_embedding") if name in names}
    if both := [name for name in given if name in config.family_options]:
        raise UserError(f"model.family_options contains {both}; set model.{both[0]} instead")
    options = from_values(kind.options_class, given | config.family_options, "model.family_options")
    check_config(options, "model.family_options")
    return kind(pipeline, options)


def load_policy(config: PipelineConfig, seed: int = 0) -> DiffusionPolicy:
    """Load a pipeline and wrap it as a policy.

    Args:
        config: the pipeline and its settings. If the path is a folder written by `DiffusionPolicy.save_pretrained`, the
            pipeline recorded there is loaded and training continues from the saved weights.
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
    path = model_folder(config.path)
    frozen = frozen_weights(path)  # asked before loading, which freezes all of a pipeline
    start = _find_start(path, config)
    # adapters are created first and then overwritten by the saved ones
    policy = DiffusionPolicy(start.pipeline, config, seed)
    for weight in frozen:
        weight.requires_grad_(False)
    # an adapter refers to the weights it was trained on, full weights only to the pipeline for the remaining parts
    policy.base_path = start.base if config.lora.enabled else start.root
    if start.adapter is not None:
        policy.load_weights(start.adapter)
        policy.starts_from_adapter = True
    # dropout of the frozen parts must be off; the trainer switches the adapters' on
    return policy.eval()


class _Start(NamedTuple):
    """Pipeline and weights from which a policy starts."""

    pipeline: Any
    root: str
    """Source of the pipeline."""
    base: str
    """Source of its transformer: the pipeline, or the folder of a fully fine-tuned transformer."""
    adapter: Path | None
    """Folder of a saved adapter for it."""


def _find_start(path: str, config: PipelineConfig) -> _Start:
    """Follow saved weights to the pipeline that they are based on."""
    file = expanded(path) / BASE_FILE
    if not file.is_file():
        # made absolute: the path is saved, and a relative one only means something in this working directory
        place = str(Path(path).absolute()) if Path(path).is_dir() else str(path)
        return _Start(load_pipeline(path, DTYPES[config.dtype], family=config.family), place, place, None)
    check_model(file.parent)
    saved = read_base(file)
    # saved weights may be based on saved weights: a full fine-tune of a fine-tune, an adapter on a fine-tune
    below = _find_start(str(saved["path"]), config)
    if below.adapter is not None:
        raise UserError(
            f"{file} was trained on top of an adapter, {below.adapter}; use save_pipeline to merge it into a "
            "pipeline first"
        )
    if saved.get("kind") == "lora":
        # the adapter is only noted here: the policy has to add its layers before they can be loaded
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
    # left out by default, so that files of families with one network do not change
    if policy.trained_networks != policy.family.networks[:1]:
        kind["networks"] = list(policy.trained_networks)
    parts = {"pipeline": policy.pipeline, "transformer": getattr(policy, policy.family.networks[0])}
    return {"path": policy.base_path, **{name: type(part).__name__ for name, part in parts.items()}, **kind}


def _check_kind(policy: DiffusionPolicy, folder: Path) -> None:
    """Reject a folder that was saved with different settings, and list them."""
    file = folder / BASE_FILE
    if not file.is_file():
        raise UserError(f"{folder} is not a saved policy: {BASE_FILE} not found")
    saved = read_base(file)
    own = _base(policy)
    # not the pipeline class: the same transformer may come from a pipeline of another kind
    different = [key for key in ("transformer", "kind", "rank", "alpha", "networks") if saved.get(key) != own.get(key)]
    if different:
        said = ", ".join(f"{key} {saved.get(key)} instead of {own.get(key)}" for key in different)
        raise UserError(f"the weights in {folder} do not fit this policy: they have {said}; change model.lora to match")
