"""Loading a vision-language policy from its settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.hub.compat import ensure_torchvision
from mmrl.training.loop.machine import avoid_refused_instructions
from mmrl.training.record.manifest import check_model
from mmrl.vlm.building import build_model_if_missing
from mmrl.vlm.lora import add_adapter
from mmrl.vlm.model_config import FrozenModelConfig, ModelConfig
from mmrl.vlm.network import load_network, resolve_model
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.processing import load_processor
from mmrl.vlm.shared_attention import register_attention
from mmrl.vlm.storage import VALUE_HEAD_FILE, load_value_head
from mmrl.vlm.value_head import make_value_head
from mmrl.vlm.vision import multiply_patches

LOGGER = logging.getLogger("mmrl")


def load_policy(config: FrozenModelConfig, *, value_head: bool = False) -> VlmPolicy:
    """Load or build a model and wrap it as a policy.

    Args:
        config: which model and how; a `ModelConfig` for one that is trained.
        value_head: add a critic of `config.critic`; it starts at value 0 unless the folder holds one.

    Returns:
        The policy on the CPU, in evaluation mode.

    Raises:
        UserError: a setting is out of range, or the model is missing, damaged or of another architecture.
    """
    if not isinstance(config, ModelConfig):
        config = ModelConfig(**vars(config))
    check_config(config, "model")
    if config.dtype == "bfloat16":
        avoid_refused_instructions()
    ensure_torchvision()
    build_model_if_missing(config)
    check_model(Path(config.path).expanduser())
    base, adapter = resolve_model(config.path)
    network = load_network(config, base)
    processor = load_processor(str(adapter or base))
    _set_pixels(processor, config)
    model = _prepare(network, config, adapter)
    head = make_value_head(network.config.text_config.hidden_size, config.critic) if value_head else None
    if head is not None and (Path(config.path) / VALUE_HEAD_FILE).is_file():
        load_value_head(head, Path(config.path))
    return VlmPolicy(model, processor, config, head).eval()


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
    model = network
    if config.lora.enabled or adapter is not None:
        model = add_adapter(network, config.lora, adapter)
    if config.freeze_vision:
        network.model.visual.requires_grad_(False)
    if config.patch_product:
        multiply_patches(network.model.visual)
    if reason := _unshareable_reason(network, config):
        LOGGER.info("prompts are computed once for each response (flat rows): %s", reason)
    else:
        network.config.text_config._attn_implementation = register_attention()
        LOGGER.info("each prompt is computed once for its group (shared prefix)")
    if config.gradient_checkpointing:
        # the reentrant form needs an input that requires grad, which frozen embeddings do not give
        options = {"use_reentrant": False}
        if hasattr(network, "activation_checkpointing_enable"):
            network.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def _unshareable_reason(network: Any, config: ModelConfig) -> str | None:
    """Why the prompts of a model cannot be shared by their groups; None where they can."""
    text = network.config.text_config
    if not config.shared_prefix:
        return "model.shared_prefix is false"
    if config.attention != "sdpa":
        return f"model.attention is {config.attention}, sharing needs sdpa"
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return "some layers attend through a sliding window"
    if getattr(text, "attention_dropout", 0.0):
        return f"the model's attention_dropout is {text.attention_dropout}"
    return None
