"""Memory and time of a run on a vision-language or language model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.logprobs import linear_logprobs
from mmrl.errors import NoPlan, UserError
from mmrl.files import read_json_object
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.plan import (
    Counted,
    Part,
    Plan,
    Work,
    activations,
    autocast,
    batch_sizes,
    forward,
    history,
    imagined,
    state_parts,
)
from mmrl.training.recipe import single_update
from mmrl.vlm.engine.capabilities import check_architecture
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.model.model_config import FrozenModelConfig, ModelConfig
from mmrl.vlm.model.network import auto_class, build_model_if_missing, resolve_model, vision_parameters

PROMPT = 1024
"""Assumed prompt length in tokens if `model.max_prompt_tokens` is empty."""
PROMPT_CACHE, ANSWER_CACHE = "keys and values of prompts", "keys and values of answers"


def footprint(config: Any, prompt_tokens: int | None = None, *, passes: bool = True) -> Plan:
    """Plan a run in which all prompts and answers have the maximum configured length.

    Without passes the plan has what is held between them only: weights, gradients, moments and copies.
    """
    if not isinstance(getattr(config, "model", None), ModelConfig):
        raise NoPlan(f"there is no plan for the recipe '{config.recipe}'; its model is no language model")
    ensure_torchvision()
    model, trainer = config.model, config.trainer
    sampler = getattr(config, "sampler", None)
    longest = prompt_tokens or model.max_prompt_tokens or PROMPT
    given = getattr(config, "max_side_tokens", None) or longest
    answer = sampler.max_new_tokens if sampler is not None else given
    size = getattr(trainer, "samples_per_task", 2 if hasattr(config, "objective") else 1)  # both sides of a pair
    low = model.dtype != "float32" or trainer.mixed_precision != "none"
    for one in (model, getattr(config, "teacher", None)):
        if isinstance(one, FrozenModelConfig):
            build_model_if_missing(one)  # as the run does
    total, rows, chunk = batch_sizes(trainer, size)
    with torch.device("meta"):
        network = outlined(model)
        wrapped = prepare(network, model, None)
    parts = state_parts(wrapped, trainer, copies=reference_copies(config))
    if teacher := getattr(getattr(config, "teacher", None), "path", ""):
        parts.append(Part(f"weights of the teacher {teacher}", _weights(config.teacher)))
    if not passes:
        return Plan(tuple(parts), ())
    with imagined(wrapped):
        text = network.config.get_text_config()
        network.set_attn_implementation("sdpa")
        shares = model.shared_prefix and model.attention == "sdpa"
        prompts = -(-chunk // size) if shares else chunk

        def once(prompts: int = prompts, answers: int = chunk, answer: int = answer) -> Tensor:
            with autocast(trainer):
                tokens = prompts * longest + answers * (answer - 1)  # the last token is not read
                states = network.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.int64))
                if not states.requires_grad and not any(w.requires_grad for w in network.get_decoder().parameters()):
                    raise UserError("no weight of the language model is trained")
                positions = torch.zeros(3 if hasattr(network.model, "visual") else 1, 1, tokens, dtype=torch.int64)
                found = network.get_decoder()(
                    inputs_embeds=states,
                    position_ids=positions if len(positions) == 3 else positions[0],
                    use_cache=False,
                )
                if not answers:
                    return found.last_hidden_state  # type: ignore[no-any-return]
                last = found.last_hidden_state[0, -answers * answer :]
                head = network.get_output_embeddings().weight
                return linear_logprobs(last, head, torch.zeros(len(last), dtype=torch.int64)).logp.sum()

        def pairs(prompts: int, answers: int) -> float:
            """Share of the pairs of positions of `once` that attend to each other: before it, in the own row."""
            tokens = prompts * longest + answers * (answer - 1)
            return (prompts * longest**2 / 2 + answers * answer * (longest + answer / 2)) / tokens**2

        update = activations(wrapped, once, -(-rows // chunk)).attending(pairs(prompts, chunk))
        parts.append(Part("activations", update.bytes, "update"))
        work = [Work.of("update", update, total / chunk * trainer.epochs)]
        if unscored := unscored_passes(config):
            scored = forward(wrapped, once).attending(pairs(prompts, chunk))
            work.insert(0, Work.of("scores without gradient", scored, total / chunk * unscored))
        if shares and _keeps_history(config):
            kept = history(wrapped, lambda: once(trainer.tasks_per_step, 0))
            parts.append(Part("history of the prompts, for the update", kept, "sampling"))
        if sampler is not None:
            parts += _sampling(network, text, trainer, sampler, size, longest, answer)
            drawn = min(sampler.batch_rows, total)
            asked = -(-drawn // size)
            read = forward(wrapped, lambda: once(asked, 0)).attending(pairs(asked, 0))
            token = _decoding(network, wrapped, once, parts, drawn, (longest, answer), low)
            work = [Work.of("prompts", read, total / drawn), Work.of("decoding", token, answer * total / drawn), *work]
    assumed = [f"prompts of {longest} tokens", f"answers of {answer}", f"{chunk} rows in {prompts} prompts at once"]
    if vision_parameters(network) and any(weight.requires_grad for weight in vision_parameters(network)):
        assumed.append("without the activations of the vision tower, which is trained")
    return Plan(tuple(parts), tuple(assumed), tuple(work), low)


def _decoding(
    network: Any, wrapped: Any, once: Any, parts: Sequence[Part], rows: int, lengths: tuple[int, int], low: bool
) -> Counted:
    """A token of each of some rows: the pass reads all weights, keys and values."""
    prompt, answer = lengths
    token = forward(wrapped, lambda: once(0, rows, 2)).attending((prompt + answer / 2) / rows)
    held = {part.name: part.bytes for part in parts}
    decoder = network.get_decoder()  # its table of embeddings is as large as the head
    weights = sum(w.numel() * (2 if low else w.element_size()) for w in decoder.parameters())
    return dataclasses.replace(token, reads=weights + held[PROMPT_CACHE] + held[ANSWER_CACHE] / 2)


def unscored_passes(config: Any) -> int:
    """Passes without gradient over the rows of a step: by the policy before the update, and by its reference."""
    if not hasattr(config, "objective") or not hasattr(config.trainer, "old_logp"):
        return int(getattr(getattr(config, "reference", None), "kind", "none") != "none")
    from mmrl.training.objectives import objective_of

    old = config.trainer.old_logp == "recompute" and not single_update(config.trainer)
    return old + bool(getattr(objective_of(config.objective), "needs_reference", False))


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


def _sampling(network: Any, text: Any, trainer: Any, sampler: Any, size: int, longest: int, answer: int) -> list[Part]:
    """Keys and values of the decoder, in the precision of its layers."""
    rows = min(sampler.batch_rows, trainer.tasks_per_step * size)
    prompts = math.ceil(rows / size)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * width
    number = _cast(network, trainer) or next(network.get_decoder().parameters()).element_size()
    return [
        Part(PROMPT_CACHE, prompts * longest * token * number, "sampling"),
        Part(ANSWER_CACHE, number * rows * answer * token, "sampling"),
    ]


PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""Architectures by hub id, the values of their config.json."""
