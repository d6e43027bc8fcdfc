"""Check that transformers supports what reading a model needs, before loading weights and on the loaded model."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.hub.building import first_line
from mmrl.vlm.engine.prefix import make_decoder
from mmrl.vlm.engine.rows import text_prompt
from mmrl.vlm.families.family import known_families

LOGGER = logging.getLogger("mmrl")
CACHES = ("cache", "past_key_values")
"""Names of the cache among the arguments of a forward pass; transformers 5.24 renamed it."""
LARGEST_DIFFERENCE = 0.02
"""Relative difference between cached and full-row states that is larger than rounding, in float32."""
TRIED = 8
"""Number of tokens that are read both ways."""


def check_architecture(model_class: Any, config: Any) -> None:
    """Reject an unsupported model family, from its class and configuration alone; raises UserError."""
    if problem := _problem(model_class, config):
        raise UserError(_refusal(model_class, config.model_type, problem))


def _refusal(model_class: Any, kind: str, problem: str) -> str:
    return (
        f"models of type {kind} ({model_class.__name__}) cannot be trained or sampled here: {problem}. Use a model of "
        f"another family: {', '.join(known_families())}, or any image-text or causal language model in transformers "
        "with a key-value cache (docs/vlm.md lists the tested ones)"
    )


def _problem(model_class: Any, config: Any) -> str | None:
    """The first thing that the family lacks."""
    accepted = inspect.signature(model_class.forward).parameters
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, so the prompt is not part of the decoder's rows"
    if not set(CACHES) & set(accepted):
        return "its forward pass does not accept a cache, which is needed to share a prompt within its group"
    if "local" in getattr(config, "attention_layers", ()):
        return (
            "its local attention counts places in the cache, which are not those of the text where prompts are padded"
        )
    if reads_images(model_class, config) and (problem := _image_problem(model_class, config)) is not None:
        return problem
    return _cache_problem(config)


def reads_images(model_class: Any, config: Any) -> bool:
    """Whether a model in transformers' image-text table has an image component; some are text-only."""
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
            "it has no get_image_features, which is needed to encode images once per group; its layers attend to "
            "images separately (as in Llama 3.2 Vision), or read them as tokens"
        )
    if "mm_encoder_outputs" not in inspect.signature(body.forward).parameters:
        return "its forward pass does not accept mm_encoder_outputs, the precomputed image features"
    return None


def _cache_problem(config: Any) -> str | None:
    from mmrl.vlm.engine.cache import unrepeatable

    try:
        layers = unrepeatable(config)
    except AttributeError as error:
        return f"transformers cannot create a cache for its configuration ({first_line(error)})"
    if not layers:
        return None
    return (
        f"its cache has layers of type {', '.join(layers)}, whose states cannot be copied for the responses of a group"
    )


def check_behaviour(policy: Any) -> None:
    """Reject a model whose states after a cached prompt differ from those of full rows; raises UserError.

    A few tokens are read both ways, so that a family that keeps something else between passes is found here, and not
    by numbers that are wrong.
    """
    network, reader, kind = policy.network, policy.reader, policy.network.config.model_type
    seeing = reads_images(type(network), network.config)
    if seeing and (problem := _body_problem(network.base_model)) is not None:
        raise UserError(_refusal(type(network), kind, problem))
    tokens = _some_tokens(policy)
    if len(tokens) < TRIED or not reader.shares(policy) or reader.joins(policy):
        return
    try:
        difference = _difference(policy, reader, tokens)
    except UserError:
        raise
    except Exception as error:  # each family fails in its own way
        raise UserError(
            f"models of type {kind} cannot be trained or sampled here: reading a text prompt with a cache fails: "
            f"{first_line(error)}. model.shared_prefix=false would re-read the prompt for every response in the "
            "update, but sampling needs the cache too"
        ) from error
    if difference > LARGEST_DIFFERENCE:
        message = (
            f"models of type {kind}: cached states differ from full-row states by a relative {difference:.2g}, so the "
            "family keeps state between passes that is not in its cache"
        )
        if policy.network.dtype in (torch.float32, torch.float64):
            raise UserError(f"{message}; it cannot be trained or sampled here")
        LOGGER.warning("%s, or %s rounds by that much; check with model.dtype=float32", message, policy.network.dtype)


def joining_problem(policy: Any, reader: Any) -> str | None:
    """Why states after a shared prompt differ from those of full rows, tested on a few tokens."""
    tokens = _some_tokens(policy)
    if len(tokens) < TRIED:
        return "the vocabulary is too small to test it"
    training = policy.training
    policy.eval()
    try:
        difference = _difference(policy, reader, tokens)
    except Exception as error:  # each family fails in its own way
        return first_line(error)
    finally:
        policy.train(training)
    return f"states differ by a relative {difference:.2g}" if difference > LARGEST_DIFFERENCE else None


def replaying_problem(policy: Any, reader: Any) -> str | None:
    """Why a decoding step cannot be replayed as a CUDA graph, tested on a few tokens."""
    tokens = _some_tokens(policy)
    if len(tokens) < TRIED:
        return "the vocabulary is too small to test it"
    training = policy.training
    policy.eval()
    # more steps than are taken before a graph is captured: what it does not repeat shows from its second replay on
    rows = torch.stack([tokens[[4, 5, 6, 7, 4, 5]], tokens[[6, 7, 4, 5, 6, 7]]])
    try:
        with torch.no_grad():
            (part,) = reader.encode_prefix(policy, [text_prompt(tokens[:4])]).parts
            replayed = _decoded(policy, reader, part, rows, replays=True)
            stepwise = _decoded(policy, reader, part, rows, replays=False)
        difference = _relative(replayed, stepwise)
    except Exception as error:  # each family fails in its own way
        return first_line(error)
    finally:
        policy.train(training)
    return f"states differ by a relative {difference:.2g}" if difference > LARGEST_DIFFERENCE else None


def _some_tokens(policy: Any) -> Tensor:
    """Tokens of text (n,), at most `TRIED`."""
    banned = {*policy.banned_ids.tolist(), policy.pad_id, *policy.eos_ids}
    entries = min(policy.network.config.get_text_config().vocab_size, 4096)
    return torch.tensor([token for token in range(entries) if token not in banned][:TRIED])


@torch.no_grad()
def _difference(policy: Any, reader: Any, tokens: Tensor) -> float:
    """Relative difference between states of two rows behind one prompt and of whole rows, decoded token by token."""
    first, rows = tokens[:4], torch.stack([tokens[[4, 5]], tokens[[6, 7]]])
    (part,) = reader.encode_prefix(policy, [text_prompt(first)]).parts
    behind = _decoded(policy, reader, part, rows)
    begun = torch.tensor([4, 4], device=policy.device)
    whole = reader.read(policy, [text_prompt(torch.cat([first, row])) for row in rows], begun=begun)[:, 4:]
    return _relative(behind, whole)


def _decoded(policy: Any, reader: Any, part: Any, rows: Tensor, *, replays: bool = False) -> Tensor:
    """States (2, t, H) of two rows (2, t) behind the one prompt of a part, decoded token by token."""
    decoder = make_decoder(policy, reader, part, torch.tensor([0, 0]), replays=replays)
    return torch.stack([decoder.advance(token) for token in rows.T.to(policy.device)], 1)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Difference of states, relative to their size."""
    return float((found - expected).float().norm() / expected.float().norm())
