"""Check, before loading weights, that transformers offers what the generic lane needs."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from mmrl.errors import UserError
from mmrl.hub.building import first_line
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.families.family import family_of, known_families

LOGGER = logging.getLogger("mmrl")
CACHES = ("cache", "past_key_values")
"""Names of the cache among the arguments of a forward pass; transformers 5.24 renamed it."""
LARGEST_DIFFERENCE = 0.02
"""Relative difference between states behind a cache and of whole rows that is more than rounding, in float32."""


def check_architecture(model_class: Any, config: Any) -> None:
    """Refuse a family that the generic lane cannot compute, by its class and configuration alone; raises UserError."""
    kind = config.model_type
    if family_of(kind).fast:
        return
    if problem := _problem(model_class, config):
        raise UserError(_refusal(model_class, kind, problem))


def _refusal(model_class: Any, kind: str, problem: str) -> str:
    fast = ", ".join(name for name, family in known_families().items() if family.fast)
    return (
        f"models of type {kind} ({model_class.__name__}) cannot be trained or sampled here: {problem}. Use a model of "
        f"another family: {fast} in the fast lane, and any model in transformers' tables of image-text and causal "
        "language models with a cache of keys and values (docs/vlm.md lists those that are tested)"
    )


def _problem(model_class: Any, config: Any) -> str | None:
    """The first thing that the family lacks."""
    accepted = inspect.signature(model_class.forward).parameters
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder and a decoder, and a prompt is no part of the decoder's rows"
    if not set(CACHES) & set(accepted):
        return "its forward pass takes no cache, which a prompt is kept in for its group"
    if reads_images(model_class, config) and (problem := _image_problem(model_class, config)) is not None:
        return problem
    return _cache_problem(config)


def reads_images(model_class: Any, config: Any) -> bool:
    """Whether a model of transformers' table of image-text models has a part for images; some are text alone."""
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return model_class.__name__ in names and bool({"vision_config", "text_config"} & set(config.to_dict()))


def _image_problem(model_class: Any, config: Any) -> str | None:
    if hasattr(model_class, "get_image_features"):
        return _body_problem(model_class)
    try:
        with torch.device("meta"):
            body = model_class(config).base_model
    except Exception:  # some configurations build on a real device alone; the loaded model is looked at again
        return None
    return _body_problem(body)


def _body_problem(body: Any) -> str | None:
    """The missing part of a model, or of its class, to read precomputed image features."""
    if not hasattr(body, "get_image_features"):
        return (
            "it has no get_image_features, and images are encoded once for the group of a prompt; its layers attend to "
            "images on their own (as in Llama 3.2 Vision), or read them as tokens"
        )
    if "mm_encoder_outputs" not in inspect.signature(body.forward).parameters:
        return "its forward pass takes no mm_encoder_outputs, the features of images that were encoded before"
    return None


def _cache_problem(config: Any) -> str | None:
    from mmrl.vlm.engine.cache import unrepeatable

    try:
        layers = unrepeatable(config)
    except AttributeError as error:
        return f"transformers makes no cache for its configuration ({first_line(error)})"
    if not layers:
        return None
    return f"its cache has layers of {', '.join(layers)}, whose states are not copied for the responses of a group"


def check_behaviour(policy: Any) -> None:
    """Refuse a model whose states behind a repeated cache are not those of whole rows; raises UserError.

    A few tokens are read both ways, so that a family that keeps something else between passes is found here, and not
    by numbers that are wrong.
    """
    if policy.generic is None:
        return
    network, lane, kind = policy.network, policy.generic, policy.network.config.model_type
    seeing = reads_images(type(network), network.config)
    if seeing and (problem := _body_problem(network.base_model)) is not None:
        raise UserError(_refusal(type(network), kind, problem))
    banned = {*policy.banned_ids.tolist(), policy.pad_id, *policy.eos_ids}
    entries = min(policy.network.config.get_text_config().vocab_size, 4096)
    tokens = torch.tensor([token for token in range(entries) if token not in banned][:8])
    if len(tokens) < 8 or not lane.shares(policy):
        return
    first, rows = tokens[:4], torch.stack([tokens[[4, 5]], tokens[[6, 7]]])
    try:
        with torch.no_grad():
            (part,) = lane.encode_prefix(policy, [text_prompt(first)]).parts
            behind = lane.advance(policy, rows.to(policy.device), part.select(torch.tensor([0, 0])))
            begun = torch.tensor([4, 4], device=policy.device)
            whole = lane.read(policy, [text_prompt(torch.cat([first, row])) for row in rows], begun=begun)[:, 4:]
    except UserError:
        raise
    except Exception as error:  # each family fails in its own way
        raise UserError(
            f"models of type {kind} cannot be trained or sampled here: reading a prompt of text with a cache fails, "
            f"{type(error).__name__}: {first_line(error)}; model.shared_prefix=false reads every response behind its "
            "own prompt in the update, but sampling needs the cache too"
        ) from error
    difference = float((behind - whole).float().norm() / whole.float().norm())
    if difference > LARGEST_DIFFERENCE:
        message = (
            f"models of type {kind}: states behind a cache differ from those of whole rows by {difference:.2g} of "
            "their size, so that the family keeps something between passes that is not in its cache"
        )
        if whole.dtype in (torch.float32, torch.float64):
            raise UserError(f"{message}; it cannot be trained or sampled here")
        LOGGER.warning("%s, or %s rounds that much; look with model.dtype=float32", message, whole.dtype)
