"""Memory plan of a run with a vision-language or language model."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmrl.core.logprobs import linear_logprobs
from mmrl.errors import NoPlan, UserError
from mmrl.files import expanded, read_json_object
from mmrl.hub.compat import ensure_torchvision
from mmrl.runs.export import model_folder
from mmrl.training.plan import Facts, Part, Plan, autocast, batch_sizes, planned
from mmrl.training.recipe import single_update
from mmrl.vlm.data.prompt import PromptLayout, encode_prompt
from mmrl.vlm.data.task import TaskError, VlmTask
from mmrl.vlm.engine.capabilities import check_architecture
from mmrl.vlm.engine.model_loading import prepare, template_variables
from mmrl.vlm.families.family import family_of
from mmrl.vlm.model.model_config import FrozenModelConfig, ModelConfig
from mmrl.vlm.model.network import (
    auto_class,
    build_model_if_missing,
    processor_folder,
    resolve_model,
    unloadable,
    vision_parameters,
)
from mmrl.vlm.model.processor import load_processor

PROMPT = 1024
"""Assumed prompt length in tokens if `model.max_prompt_tokens` is not set and no data have been read."""
COVERED = ("vlm", "sft")
"""Recipes whose passes are planned; others add passes and rows of their own."""
MOST_READ = 512
"""Number of prompts to tokenise, evenly spread over the data."""
STEPS = 200
"""Number of steps drawn from their lengths; the longest step is planned."""


@dataclass(frozen=True)
class Lengths:
    """Token counts of a run's texts with its own tokenizer."""

    prompts: Tensor
    """Of the prompts that were read, int64 (N,)."""
    answers: int | None = None
    """The longest answer, if answers are given."""

    def of_step(self, count: int) -> int:
        """Tokens of `count` prompts in the longest of the drawn steps."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(self.prompts), (STEPS, count), generator=generator)
        return int(self.prompts[drawn].sum(1).max())


def footprint(config: Any, prompt_tokens: int | None = None, *, passes: bool = True, recipe: Any = None) -> Plan:
    """Plan a run from the texts that its recipe has read; samples are assumed to have the maximum length.

    Without a recipe, all prompts have `prompt_tokens`, else the maximum configured length. Without passes, the plan
    covers only what is held between them: weights, gradients, moments and copies.
    """
    if not isinstance(getattr(config, "model", None), ModelConfig):
        raise NoPlan(f"there is no plan for the recipe '{config.recipe}'; its model is not a language model")
    ensure_torchvision()
    for one in (config.model, getattr(config, "teacher", None)):
        if isinstance(one, FrozenModelConfig):
            build_model_if_missing(one)  # as the run does
    with torch.device("meta"):
        network = outlined(config.model)
        trained = prepare(network, config.model, None)
    lengths, unknown = Lengths(torch.tensor([prompt_tokens or config.model.max_prompt_tokens or PROMPT])), ""
    if recipe is not None:
        try:
            lengths = read_lengths(config, recipe, network)
        except NoPlan as error:
            unknown = str(error)
    return planned(_facts(config, network, trained, lengths, unknown), config.trainer, passes=passes)


def read_lengths(config: Any, recipe: Any, network: Any) -> Lengths:
    """Tokens of the training data that a recipe has read; raises NoPlan with what is unknown without running it."""
    if config.recipe not in COVERED:
        raise NoPlan(f"passes and rows that the recipe '{config.recipe}' adds")
    tasks = recipe.train_tasks[:: max(1, len(recipe.train_tasks) // MOST_READ)]
    if any(task.images or task.videos for task in tasks):
        raise NoPlan("images or videos in the passes of the vision tower")
    base, adapter = resolve_model(model_folder(str(config.model.path)))
    if not expanded(base).is_dir():
        raise NoPlan(f"prompt lengths: the tokenizer of {base} is not on this machine")
    processor = load_processor(processor_folder(base, adapter), config.model.chat_template)
    prompts = list(_prompt_lengths(config.model, network, processor, tasks))
    if not prompts:
        raise NoPlan("prompts, none of which can be encoded")
    key = getattr(config, "target_key", None)
    texts = [] if key is None else [str(task.columns[key]) for task in tasks]
    # with the token that ends an answer
    given = [1 + len(ids) for ids in processor.tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    return Lengths(torch.tensor(prompts), max(given, default=None))


def _prompt_lengths(model: ModelConfig, network: Any, processor: Any, tasks: Sequence[VlmTask]) -> Iterator[int]:
    """Tokens of each prompt that can be encoded."""
    family, config = family_of(network.config.model_type), network.config
    patch_size, merge_size, _ = family.sizes(config)
    layout = PromptLayout(
        patch_size=patch_size,
        max_tokens=model.max_prompt_tokens or sys.maxsize,
        limit_source="model.max_prompt_tokens",
        merge_size=merge_size,
        tables=family.token_tables(network),
        template=template_variables(processor, model, family.thinking_switch),
    )
    for task in tasks:
        with contextlib.suppress(TaskError):  # the run skips it, too
            yield len(encode_prompt(task, processor, layout))


def _facts(config: Any, network: Any, trained: Any, lengths: Lengths, unknown: str = "") -> Facts:
    model, trainer, sampler = config.model, config.trainer, getattr(config, "sampler", None)
    given = lengths.answers or getattr(config, "max_side_tokens", None) or int(lengths.prompts.max())
    answer = given if sampler is None else sampler.max_new_tokens
    size = getattr(trainer, "samples_per_task", 2 if hasattr(config, "objective") else 1)  # both sides of a pair
    sizes = batch_sizes(trainer, size)
    shares = model.shared_prefix and model.attention == "sdpa"
    prompts = -(-sizes.chunk // size) if shares else sizes.chunk
    keeps = shares and _keeps_history(config) and answer > 1
    # outside the calls, whose tensors have no numbers
    chunk_tokens, step_tokens = (lengths.of_step(count) for count in (prompts, trainer.tasks_per_step))
    network.set_attn_implementation(attention_outlined(model))

    def states(tokens: int) -> Tensor:
        embedded = network.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.int64))
        if not embedded.requires_grad and not any(w.requires_grad for w in network.get_decoder().parameters()):
            raise UserError("no weights of the language model are trained")
        positions = torch.zeros(3 if hasattr(network.model, "visual") else 1, 1, tokens, dtype=torch.int64)
        found = network.get_decoder()(
            inputs_embeds=embedded,
            position_ids=positions if len(positions) == 3 else positions[0],
            use_cache=False,
        )
        return found.last_hidden_state[0]

    def learn() -> Tensor:
        with autocast(trainer):
            # the last token of an answer is not read; kept prompts are not read again
            found = states((0 if keeps else chunk_tokens) + sizes.chunk * (answer - 1))
            last = torch.cat([found, found[: sizes.chunk]]) if keeps else found[-sizes.chunk * answer :]
            head = network.get_output_embeddings().weight
            return linear_logprobs(last, head, torch.zeros(len(last), dtype=torch.int64)).logp.sum()

    def read() -> Tensor:
        with autocast(trainer):
            return states(step_tokens)

    assumed = [
        f"prompts of {' to '.join(dict.fromkeys(str(int(end)) for end in lengths.prompts.aminmax()))} tokens",
        f"responses of {answer}",
        f"{sizes.chunk} rows in {prompts} prompts per pass",
    ]
    if vision_parameters(network) and any(weight.requires_grad for weight in vision_parameters(network)):
        assumed.append("without the activations of the vision tower, which is trained")
    return Facts(
        network=trained,
        learn=learn,
        assumed=tuple(assumed),
        unknown=(unknown,) if unknown else (),
        tried_on_cpu=model.dtype == "float32" and trainer.mixed_precision != "fp16",
        passes=sizes.passes,
        keep=read if keeps else None,
        copies=reference_copies(config),
        held=_held(config, network),
        inputs=[] if sampler is None else _caches(config, network, size, lengths, answer),
    )


def _held(config: Any, network: Any) -> list[Part]:
    """The teacher's weights."""
    parts = []
    if teacher := getattr(getattr(config, "teacher", None), "path", ""):
        parts.append(Part(f"weights of the teacher {teacher}", _weights(config.teacher)))
    return parts


def outlined(model: Any) -> Any:
    """The architecture, with weights that have no values."""
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
    try:
        return found.from_config(settings, attn_implementation=attention_outlined(model), dtype=dtype)
    except ValueError as error:  # how transformers refuses kernels that the architecture does not have
        raise unloadable(f"the model {name}", error, model.attention) from error


def attention_outlined(model: Any) -> str:
    """The attention of a plan: flash attention has no form without values, and needs as much as sdpa's kernels."""
    return "eager" if model.attention == "eager" else "sdpa"


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


def _caches(config: Any, network: Any, size: int, lengths: Lengths, answer: int) -> list[Part]:
    """Keys and values of prompts and answers while sampling, in the precision of the decoder's layers."""
    rows = min(config.sampler.batch_rows, config.trainer.tasks_per_step * size)
    text = network.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * width
    token *= _cast(network, config.trainer) or next(network.get_decoder().parameters()).element_size()
    return [
        Part("keys and values of prompts", lengths.of_step(math.ceil(rows / size)) * token, "sampling"),
        Part("keys and values of responses", rows * answer * token, "sampling"),
    ]


PUBLISHED: dict[str, dict[str, Any]] = read_json_object(Path(__file__).with_name("published.json"))["models"]
"""Architectures by hub id, the values of their config.json."""
