"""Preparing a loaded model: pixel budget, adapters, frozen parts and kernels."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import nn

from mmrl.errors import UserError
from mmrl.vlm.engine.attention import register_attention
from mmrl.vlm.engine.reader import COPIED, multiply_patches
from mmrl.vlm.families.family import QwenVl, family_of
from mmrl.vlm.model.model_config import ModelConfig
from mmrl.vlm.model.network import add_adapter, freeze_parts
from mmrl.workers import given

LOGGER = logging.getLogger("mmrl")


EDGES = {"shortest_edge", "longest_edge"}
LONGEST_EDGE = 16_384
"""A `longest_edge` up to this is a side in pixels, a larger one an area."""


def limits_area(image_processor: Any) -> bool:
    """Whether an image processor bounds the area of images, in pixels, instead of their sides."""
    size = dict(getattr(image_processor, "size", None) or {})
    usual = dict(getattr(type(image_processor), "size", None) or size)
    # some use the same names for sides, such as Idefics2 with 980
    return set(size) == EDGES and bool(usual.get("longest_edge", 0) > LONGEST_EDGE)


def set_pixels(processor: Any, config: ModelConfig) -> None:
    """Set the bounds on the image area."""
    if config.min_pixels is None and config.max_pixels is None:
        return
    if processor.image_processor is None:
        raise UserError("model.min_pixels and model.max_pixels only apply to models that read images")
    size = dict(getattr(processor.image_processor, "size", None) or {})
    if not limits_area(processor.image_processor):
        limited = "limits the image sides" if set(size) == EDGES else "does not limit the area"
        raise UserError(
            f"model.min_pixels and model.max_pixels are areas, but this processor {limited}: its size is "
            f"{size or 'not set'}; change it in preprocessor_config.json, or remove the options"
        )
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


def template_variables(processor: Any, config: ModelConfig, switch: str) -> dict[str, Any]:
    """Chat template variables for the settings; raises UserError if the template lacks one."""
    # for videos, SmolVLM's processor takes another template than its own unless one is named with each call; the
    # released one shows no videos
    own = type(processor).__name__ == "SmolVLMProcessor" and "video" in str(processor.chat_template)
    given = {"chat_template": processor.chat_template} if own or config.chat_template is not None else {}
    if config.thinking is None:
        return given
    template = processor.chat_template or processor.tokenizer.chat_template
    if switch not in str(template):
        raise UserError(
            f"model.thinking is {str(config.thinking).lower()}, but the chat template of {config.path} has no switch "
            f"{switch}; remove model.thinking"
        )
    return given | {switch: config.thinking}


def prepare(network: Any, config: ModelConfig, adapter: Path | None) -> Any:
    """Freeze the untrained weights, add adapters and switch on checkpointing and faster kernels.

    The model's own dropout is switched off, as in TRL: with it, responses would be off-policy before the first update.
    """
    if network.base_model is network and hasattr(network, "model"):  # Llama 4's text model names another body
        network.base_model_prefix = "model"
    _switch_off_dropout(network)
    model = network
    if config.lora.enabled or adapter is not None:
        model = add_adapter(network, config.lora, adapter, freeze_vision=config.freeze_vision)
        given.wrap(network, model)
    freeze_parts(network, config)
    if isinstance(family_of(network.config.model_type), QwenVl):
        multiply_patches(network.model.visual)
    if not config.shared_prefix:
        LOGGER.info("each prompt is computed samples_per_task times instead of once: model.shared_prefix is false")
    elif reason := _copying_reason(network, config):
        LOGGER.info(COPIED, reason)
    else:
        network.config.get_text_config()._attn_implementation = register_attention()
    if config.gradient_checkpointing:
        # the reentrant form needs an input that requires grad, which frozen embeddings do not give
        options = {"use_reentrant": False}
        if hasattr(network, "activation_checkpointing_enable"):
            network.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
        else:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def _switch_off_dropout(network: Any) -> None:
    found = []
    for name, part in network.named_modules():
        if "lora_dropout" in name:  # of adapters that the user has given
            continue
        # modules, and numbers that layers pass to functions, such as attention_dropout, attn_dropout_p and layerdrop
        rates = ["p"] if isinstance(part, nn.Dropout) else [key for key in vars(part) if "drop" in key]
        for rate in rates:
            if isinstance(value := getattr(part, rate), float) and value:
                found.append(f"{name}.{rate} = {value:g}")
                setattr(part, rate, 0.0)
    if found:
        LOGGER.info("the model's own dropout is switched off: %s and %d more", found[0], len(found) - 1)


def _copying_reason(network: Any, config: ModelConfig) -> str | None:
    """Why the responses of a model cannot attend to a prompt that their group shares; None if they may."""
    from mmrl.vlm.engine.cache import is_plain, new_cache

    if config.attention != "sdpa":
        return f"model.attention is {config.attention}, but attention to shared prompts needs sdpa"
    if not is_plain(new_cache(network.config)):
        return "some layers store something other than the keys and values of all tokens, such as a sliding window"
    return None
