"""Memory plan of a run with a masked-diffusion language model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.logprobs import linear_logprobs
from mmrl.hub.compat import ensure_torchvision
from mmrl.masked.masked_config import MaskedSftConfig
from mmrl.training.plan import Facts, Plan, autocast, batch_sizes, planned
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.model.network import build_model_if_missing
from mmrl.vlm.vlm_plan import PROMPT, attention_outlined, outlined, reference_copies


def footprint(config: Any, prompt_tokens: int | None = None, *, passes: bool = True, recipe: Any = None) -> Plan:
    """Plan memory for prompts of the maximum length that the configuration allows; the data are not read.

    Without passes, the plan covers only what is held between them: weights, gradients, moments and copies.
    """
    ensure_torchvision()
    build_model_if_missing(config.model)  # as the run does
    with torch.device("meta"):
        network = outlined(config.model)
        trained = prepare(network, config.model, None)
    facts = _facts(config, network, trained, prompt_tokens)
    if recipe is not None:
        facts = dataclasses.replace(facts, unknown=("lengths of the prompts",))
    return planned(facts, config.trainer, passes=passes)


def _facts(config: Any, network: Any, trained: Any, prompt_tokens: int | None) -> Facts:
    trainer, supervised = config.trainer, isinstance(config, MaskedSftConfig)
    sampler, size = (config.evaluation.sampler, 1) if supervised else (config.sampler, trainer.samples_per_task)
    prompt, answer = prompt_tokens or config.model.max_prompt_tokens or PROMPT, sampler.max_new_tokens
    sizes = batch_sizes(trainer, size)
    draws = 0 if supervised else config.draws
    inputs = -(-sizes.chunk // size) if not draws else sizes.chunk * (config.likelihood.chunk or draws)
    again = -(-draws // config.likelihood.chunk) if draws and config.likelihood.chunk else 1
    network.set_attn_implementation(attention_outlined(config.model))

    def states(count: int) -> Tensor:
        tokens = torch.zeros(count, prompt + answer, dtype=torch.int64)
        seen = torch.zeros(count, 1, 1, prompt + answer, dtype=network.get_input_embeddings().weight.dtype)
        seen = seen.expand(-1, 1, prompt + answer, -1)
        found = network.base_model(input_ids=tokens, attention_mask=seen, use_cache=False, return_dict=True)
        return found.last_hidden_state[:, prompt:]

    def learn() -> Tensor:
        with autocast(trainer):
            scored = states(inputs)[torch.arange(max(sizes.chunk, inputs)) % inputs].flatten(0, 1)
            head = network.get_output_embeddings().weight
            return linear_logprobs(scored, head, torch.zeros(len(scored), dtype=torch.int64)).logp.sum()

    def fill() -> Tensor:
        with autocast(trainer):
            found = states(min(sampler.batch_rows, sizes.step))
            logits = functional.linear(found, network.get_output_embeddings().weight).float()
        return logits[:, : sampler.block].flatten(0, 1).log_softmax(-1)

    return Facts(
        network=trained,
        learn=learn,
        assumed=(f"prompts of {prompt} tokens", f"responses of {answer}", f"{inputs} inputs per pass"),
        passes=sizes.passes * again,
        act=None if supervised else fill,
        acting="predictions of masked tokens",
        copies=reference_copies(config),
    )
