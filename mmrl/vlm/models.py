"""Loading a vision-language policy: architecture, precision, LoRA, frozen parts, pixel budget."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, choice
from mmrl.hub.compat import ensure_torchvision, quiet_transformers
from mmrl.training.loop.machine import avoid_refused_instructions
from mmrl.training.loop.settings import SMALLEST_LOW_PRECISION_STEP

__all__ = ["ARCHITECTURES", "LoraSettings", "ModelConfig", "check_update_precision", "load_policy"]

LOGGER = logging.getLogger("mmrl")
DTYPES = ("float32", "bfloat16")
ATTENTION = ("sdpa", "eager", "flash_attention_2")


@dataclass
class LoraSettings:
    """Low-rank adapters in place of full fine-tuning."""

    enabled: bool = False
    """Train adapters and keep every weight of the model, the vision tower included, as it is."""

    rank: int = bounded(16, at_least=1)
    """Width of the adapters."""

    alpha: int = 32
    """The adapters' output is scaled by alpha / rank."""

    dropout: float = bounded(0.0, at_least=0, below=1)
    """Dropout on the adapters' input while training; above 0 the ratio is not 1 before the first step."""

    targets: list[str] = field(
        default_factory=lambda: [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ]
    )
    """Linear layers of the language model's decoder layers that get an adapter."""

    seed: int = 0
    """Seed of the adapters' random half; the other half starts at zero, so the model is unchanged at first."""


@dataclass
class ModelConfig:
    """Which model is trained and how it is held in memory."""

    path: str = MISSING
    """Model folder, or a hub id such as Qwen/Qwen2.5-VL-3B-Instruct."""

    dtype: str = choice("float32", DTYPES)
    """Precision of weights and activations: float32 or bfloat16; log-probabilities are float32 either way."""

    attention: str = choice("sdpa", ATTENTION)
    """Attention kernels: sdpa, eager or flash_attention_2 (needs a GPU, bfloat16 and the flash-attn package)."""

    lora: LoraSettings = field(default_factory=LoraSettings)
    """Adapters in place of full fine-tuning."""

    shared_prefix: bool = True
    """Compute each prompt once for all responses of its group, with the same gradients; needs attention sdpa."""

    patch_product: bool = True
    """Compute the vision tower's patch embedding as the matrix product that it is, not as a convolution."""

    freeze_vision: bool = False
    """Keep the vision tower as it is; its features are then computed once for each prompt and step."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    min_pixels: int | None = bounded(None, at_least=1)
    """Smallest image area in pixels, smaller images are enlarged; empty: what the processor says."""

    max_pixels: int | None = bounded(None, at_least=1)
    """Largest image area in pixels, larger images are reduced; empty: what the processor says."""

    max_prompt_tokens: int | None = bounded(None, at_least=1)
    """Prompts with more tokens are skipped and counted; empty: what the model's positions allow."""

    build: str | None = None
    """Function `module:function` that makes the folder at `path` where there is none yet."""

    build_options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of `build`, after the path."""

    def validate(self) -> None:
        """Check that the fields fit together; raises UserError."""
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise UserError(f"model.min_pixels={self.min_pixels} is above model.max_pixels={self.max_pixels}")
        if self.lora.enabled and not self.lora.targets:
            raise UserError("model.lora.targets is empty; name layers such as q_proj, v_proj")


def check_update_precision(config: ModelConfig, learning_rate: float) -> None:
    """Refuse full fine-tuning whose steps are too small for the weights' own precision.

    Neighbouring bfloat16 numbers near a typical weight of 0.02 are 1e-4 apart and AdamW moves a weight by about the
    learning rate, so smaller steps are rounded away and nothing is learned. LoRA weights are float32 in any case.

    Args:
        config: the model's precision and adapter.
        learning_rate: peak learning rate of AdamW.

    Raises:
        ValueError: bfloat16 weights are trained with a rate below 1e-4.
    """
    if config.dtype == "bfloat16" and not config.lora.enabled and learning_rate < SMALLEST_LOW_PRECISION_STEP:
        raise ValueError(
            f"model.dtype is bfloat16 and trainer.learning_rate {learning_rate:g}: bfloat16 weights round such steps "
            "away; use model.dtype=float32 with trainer.mixed_precision=bf16, or model.lora.enabled=true"
        )


def load_policy(config: ModelConfig, *, value_head: bool = False) -> Any:
    """Load or build a model and wrap it as a policy.

    Args:
        config: which model and how.
        value_head: add a critic; it starts at zero unless the folder holds one.

    Returns:
        A `VlmPolicy` on the CPU, in evaluation mode.

    Raises:
        UserError: a setting is out of range, or the model is missing, damaged or of another architecture.
    """
    from mmrl.vlm.policy import VlmPolicy
    from mmrl.vlm.processing import load_processor
    from mmrl.vlm.storage import VALUE_HEAD_FILE, load_value_head

    check_config(config, "model")
    if config.dtype == "bfloat16":
        avoid_refused_instructions()
    ensure_torchvision()
    _build_if_missing(config)
    base, adapter = _resolve(config.path)
    network = _load_network(config, base)
    processor = load_processor(str(adapter or base))
    _set_pixels(processor, config)
    model = _prepare(network, config, adapter)
    head = _make_value_head(network) if value_head else None
    policy = VlmPolicy(model, processor, config, head)
    if head is not None and (Path(config.path) / VALUE_HEAD_FILE).is_file():
        load_value_head(policy, Path(config.path))
    return policy.eval()


def _build_if_missing(config: ModelConfig) -> None:
    """Make the model folder with the user's function, under another name until it is complete."""
    if config.build is None:
        return
    folder = Path(config.path).expanduser()
    recipe = json.dumps({"build": config.build, "options": config.build_options}, sort_keys=True, default=str)
    if (folder / "config.json").is_file():
        _check_build(folder, recipe)
        return
    from mmrl.rewards.loading import load_function

    build = load_function(config.build, what="model.build")
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.unfinished")
    try:
        inspect.signature(build).bind(unfinished, **config.build_options)
    except TypeError as error:
        raise UserError(f"model.build_options do not fit {config.build}: {error}") from error
    LOGGER.info("building %s with %s", folder, config.build)
    try:
        build(unfinished, **config.build_options)
        (unfinished / BUILD_FILE).write_text(recipe, encoding="utf-8")
        if not (folder / "config.json").is_file():  # another process may have been quicker
            folder.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unfinished, folder)
    except (TypeError, ValueError, KeyError, ImportError) as error:  # options that do not fit, a package that lacks
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"model.build {config.build!r} with model.build_options failed: {reason}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_build(folder: Path, recipe: str) -> None:
    file = folder / BUILD_FILE
    if file.is_file() and file.read_text(encoding="utf-8") != recipe:
        raise UserError(
            f"{folder} was built with {file.read_text(encoding='utf-8')}, the settings now say {recipe}; "
            "remove the folder or set another model.path"
        )


def _resolve(path: str) -> tuple[str, Path | None]:
    """Base model and adapter folder; a LoRA checkpoint names its base model."""
    folder = Path(path).expanduser().absolute()  # adapters record it as the place of their base model
    if (folder / "config.json").is_file():
        return str(folder), None
    adapter_file = folder / "adapter_config.json"
    if adapter_file.is_file():
        base = json.loads(adapter_file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not base:
            raise UserError(f"{adapter_file} names no base model")
        return str(base), folder
    if folder.is_dir():
        raise UserError(f"{folder} is not a model folder: it has no config.json; it holds {_listing(folder)}")
    # runs/model is also a well-formed hub id; next to an existing runs/ it is a folder that is missing
    if folder.is_file() or folder.parent.is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise UserError(f"there is no model folder {path}; give a folder with config.json or a hub id (owner/name)")
    return path, None


def _listing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "") if names else "nothing"


def _load_network(config: ModelConfig, base: str) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    model_type = _model_type(base)
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"{base} is of architecture {model_type!r}; supported are: {known}")
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForImageTextToText.from_pretrained(
                base,
                dtype=getattr(torch, config.dtype),
                attn_implementation=config.attention,
                output_loading_info=True,
            )
    except Exception as error:  # damaged files, missing kernels and memory each raise their own kinds
        raise UserError(f"the model in {base} cannot be loaded: {_first_line(error)}") from error
    network, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise UserError(f"the weight files in {base} lack {len(missing)} tensors, for example {missing[0]}")
    return network


def _model_type(base: str) -> str:
    from transformers import AutoConfig

    file = Path(base) / "config.json"
    if file.is_file():
        try:
            return str(json.loads(file.read_text(encoding="utf-8")).get("model_type"))
        except ValueError as error:
            raise UserError(f"{file} is not valid JSON: {error}") from error
    try:
        return str(AutoConfig.from_pretrained(base).model_type)
    except Exception as error:  # hub and network errors
        raise UserError(
            f"there is no local folder {base!r}, and it cannot be fetched from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def _set_pixels(processor: Any, config: ModelConfig) -> None:
    size = dict(processor.image_processor.size)
    if config.min_pixels is not None:
        size["shortest_edge"] = config.min_pixels
    if config.max_pixels is not None:
        size["longest_edge"] = config.max_pixels
    if size["shortest_edge"] > size["longest_edge"]:
        raise UserError(
            f"the processor's pixel budget is {size['shortest_edge']} to {size['longest_edge']}; "
            "set both model.min_pixels and model.max_pixels"
        )
    processor.image_processor.size = size


def _prepare(network: Any, config: ModelConfig, adapter: Path | None) -> Any:
    """Freeze what is not trained, add adapters and switch on checkpointing and what saves time."""
    from mmrl.vlm.vision import multiply_patches

    model = network
    if config.lora.enabled or adapter is not None:
        model = _with_adapter(network, config, adapter)
    if config.freeze_vision:
        network.model.visual.requires_grad_(False)
    if config.patch_product:
        multiply_patches(network.model.visual)
    _share_prefix(network, config)
    if config.gradient_checkpointing:
        _checkpoint_activations(network)
    return model


def _share_prefix(network: Any, config: ModelConfig) -> None:
    """Let the language model share prompts where it can, and say so where it cannot."""
    from mmrl.vlm.shared_attention import register_attention

    text = network.config.text_config
    obstacle = None
    if not config.shared_prefix:
        obstacle = "model.shared_prefix is false"
    elif config.attention != "sdpa":
        obstacle = f"model.attention is {config.attention}, sharing needs sdpa"
    elif "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        obstacle = "some layers attend through a sliding window"
    elif getattr(text, "attention_dropout", 0.0):
        obstacle = f"the model's attention_dropout is {text.attention_dropout}"
    if obstacle is None:
        text._attn_implementation = register_attention()
        LOGGER.info("each prompt is computed once for its group (shared prefix)")
    else:
        LOGGER.info("prompts are computed once for each response (flat rows): %s", obstacle)


def _checkpoint_activations(network: Any) -> None:
    # the reentrant form needs an input that requires grad, which frozen embeddings do not give
    options = {"use_reentrant": False}
    if hasattr(network, "activation_checkpointing_enable"):
        network.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _with_adapter(network: Any, config: ModelConfig, adapter: Path | None) -> Any:
    import peft
    import torch

    settings = config.lora
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


def _make_value_head(network: Any) -> Any:
    """A linear critic in float32 that starts at value 0, so the first advantages are plain returns."""
    import torch

    head = torch.nn.Linear(network.config.text_config.hidden_size, 1, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


BUILD_FILE = "build.json"
"""Beside a model that `model.build` made: the function and its options."""

ARCHITECTURES = {
    "qwen2_5_vl": "Qwen2.5-VL (arXiv 2502.13923)",
    "qwen3_vl": "Qwen3-VL (arXiv 2511.21631)",
}
