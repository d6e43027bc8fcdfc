"""Memory of a run on a vision-language or language model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.logprobs import linear_logprobs
from mmrl.errors import NoPlan, UserError
from mmrl.files import read_json_object
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.plan import Facts, Part, Plan, autocast, batch_sizes, planned
from mmrl.training.recipe import single_update
from mmrl.vlm.engine.capabilities import check_architecture
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.model.model_config import FrozenModelConfig, ModelConfig
from mmrl.vlm.model.network import auto_class, build_model_if_missing, resolve_model, vision_parameters

PROMPT = 1024
"""Assumed prompt length in tokens if `model.max_prompt_tokens` is empty."""


def footprint(config: Any, prompt_tokens: int | None = None, *, passes: bool = True) -> Plan:
    """Plan a run in which all prompts and answers have the maximum configured length.

    Without passes, the plan covers only what is held between them: weights, gradients, moments and copies.
    """
    if not isinstance(getattr(config, "model", None), ModelConfig):
        raise NoPlan(f"there is no plan for the recipe '{config.recipe}'; its model is no language model")
    ensure_torchvision()
    for one in (config.model, getattr(config, "teacher", None)):
        if isinstance(one, FrozenModelConfig):
            build_model_if_missing(one)  # as the run does
    with torch.device("meta"):
        network = outlined(config.model)
        trained = prepare(network, config.model, None)
    return planned(_facts(config, network, trained, prompt_tokens), config.trainer, passes=passes)


def _facts(config: Any, network: Any, trained: Any, prompt_tokens: int | None) -> Facts:
    model, trainer, sampler = config.model, config.trainer, getattr(config, "sampler", None)
    prompt = prompt_tokens or model.max_prompt_tokens or PROMPT
    given = getattr(config, "max_side_tokens", None) or prompt
    answer = given if sampler is None else sampler.max_new_tokens
    size = getattr(trainer, "samples_per_task", 2 if hasattr(config, "objective") else 1)  # both sides of a pair
    sizes = batch_sizes(trainer, size)
    shares = model.shared_prefix and model.attention == "sdpa"
    prompts = -(-sizes.chunk // size) if shares else sizes.chunk
    network.set_attn_implementation("sdpa")

    def states(tokens: int) -> Tensor:
        embedded = network.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.int64))
        if not embedded.requires_grad and not any(w.requires_grad for w in network.get_decoder().parameters()):
            raise UserError("no weight of the language model is trained")
        positions = torch.zeros(3 if hasattr(network.model, "visual") else 1, 1, tokens, dtype=torch.int64)
        found = network.get_decoder()(
            inputs_embeds=embedded,
            position_ids=positions if len(positions) == 3 else positions[0],
            use_cache=False,
        )
        return found.last_hidden_state[0]  # type: ignore[no-any-return]

    def learn() -> Tensor:
        with autocast(trainer):
            # the last token of an answer is not read
            last = states(prompts * prompt + sizes.chunk * (answer - 1))[-sizes.chunk * answer :]
            head = network.get_output_embeddings().weight
            return linear_logprobs(last, head, torch.zeros(len(last), dtype=torch.int64)).logp.sum()

    def read() -> Tensor:
        with autocast(trainer):
            return states(trainer.tasks_per_step * prompt)

    assumed = [
        f"prompts of {prompt} tokens",
        f"answers of {answer}",
        f"{sizes.chunk} rows in {prompts} prompts at once",
    ]
    if vision_parameters(network) and any(weight.requires_grad for weight in vision_parameters(network)):
        assumed.append("without the activations of the vision tower, which is trained")
    return Facts(
        network=trained,
        learn=learn,
        assumed=tuple(assumed),
        passes=sizes.passes,
        keep=read if shares and _keeps_history(config) else None,
        copies=reference_copies(config),
        held=_held(config, network),
        inputs=[] if sampler is None else _caches(config, network, size, prompt, answer),
    )


def _held(config: Any, network: Any) -> list[Part]:
    """The teacher's weights."""
    parts = []
    if teacher := getattr(getattr(config, "teacher", None), "path", ""):
        parts.append(Part(f"weights of the teacher {teacher}", _weights(config.teacher)))
    return parts


def outlined(model: Any) -> Any:
    """The architecture, with weights that have no numbers."""
    from transformers import AutoConfig

    name = model_folder(str(model.path))
    if name in PUBLISHED:
        settings = AutoConfig.for_model(**PUBLISHED[name])
    else:
        base, _ = resolve_model(name)
        file = Path(base) / "config.json"
        if file.is_file():
            settings = AutoConfig.for_model(**read_json_object(file))
        else:
            try:
                settings = AutoConfig.from_pretrained(base, trust_remote_code=False)
            except Exception as error:
                known = ", ".join(PUBLISHED)
                raise UserError(
                    f"the architecture of {base} is not known here and cannot be fetched; known: {known}"
                ) from error
    dtype = getattr(torch, model.dtype)
    found = auto_class(settings.model_type, name)
    check_architecture(found._model_mapping[type(settings)], settings)
    return found.from_config(settings, attn_implementation="sdpa", dtype=dtype)


def reference_copies(config: Any) -> int:
    """Frozen copies of the policy."""
    if not hasattr(config, "reference") or config.reference.kind == "none":
        return 0
    if config.reference.kind in ("frozen", "ema"):
        return 1
    from mmrl.training.objectives import objective_of

    needed = (
        getattr(objective_of(config.objective), "needs_reference", False) if hasattr(config, "objective") else False
    )
    return int(needed and not config.model.lora.enabled)


def _keeps_history(config: Any) -> bool:
    """Whether the update backpropagates through the prefill kept from sampling."""
    trainer = config.trainer
    kept = hasattr(config, "sampler") and config.sampler.keep_prefill and not config.model.gradient_checkpointing
    return bool(kept and single_update(trainer) and trainer.micro_batch == 0)


def _weights(model: Any) -> int:
    """Bytes of a model's weights."""
    with torch.device("meta"):
        return sum(weight.numel() * weight.element_size() for weight in outlined(model).parameters())


def _cast(network: Any, trainer: Any) -> int:
    """Bytes of a number where layers compute in another precision than the weights have, else 0."""
    own = next(network.get_decoder().parameters()).element_size()
    return 2 if trainer.mixed_precision != "none" and own == 4 else 0


def _caches(config: Any, network: Any, size: int, prompt: int, answer: int) -> list[Part]:
    """Keys and values of prompts and answers while sampling, in the precision of the decoder's layers."""
    rows = min(config.sampler.batch_rows, config.trainer.tasks_per_step * size)
    text = network.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * width
    token *= _cast(network, config.trainer) or next(network.get_decoder().parameters()).element_size()
    return [
        Part("keys and values of prompts", math.ceil(rows / size) * prompt * token, "sampling"),
        Part("keys and values of answers", rows * answer * token, "sampling"),
    ]


PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""Architectures by hub id, the values of their config.json."""
