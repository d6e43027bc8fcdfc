"""Memory and time of a run on a masked-diffusion language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mmrl.core.logprobs import linear_logprobs
from mmrl.hub.compat import ensure_torchvision
from mmrl.masked.masked_config import MaskedSftConfig
from mmrl.training.plan import Part, Plan, Work, activations, autocast, batch_sizes, forward, imagined, state_parts
from mmrl.vlm.engine.model_loading import prepare
from mmrl.vlm.model.network import build_model_if_missing
from mmrl.vlm.vlm_plan import PROMPT, outlined, reference_copies, unscored_passes


def footprint(config: Any, prompt_tokens: int | None = None, *, passes: bool = True) -> Plan:
    """Plan memory for prompts of the maximum length that the configuration allows.

    Without passes, the plan covers only what is held between them: weights, gradients, moments and copies.
    """
    ensure_torchvision()
    model, trainer = config.model, config.trainer
    supervised = isinstance(config, MaskedSftConfig)
    sampler, size = (config.evaluation.sampler, 1) if supervised else (config.sampler, trainer.samples_per_task)
    prompt, answer = prompt_tokens or model.max_prompt_tokens or PROMPT, sampler.max_new_tokens
    total, rows, chunk = batch_sizes(trainer, size)
    build_model_if_missing(model)  # as the run does
    with torch.device("meta"):
        network = outlined(model)
        wrapped = prepare(network, model, None)
    parts = state_parts(wrapped, trainer, copies=reference_copies(config))
    if not passes:
        return Plan(tuple(parts), ())
    draws = 0 if supervised else config.draws
    inputs = -(-chunk // size) if not draws else chunk * (config.likelihood.chunk or draws)
    again = -(-draws // config.likelihood.chunk) if draws and config.likelihood.chunk else 1
    with imagined(wrapped):
        network.set_attn_implementation("sdpa")

        def states(count: int) -> Tensor:
            tokens = torch.zeros(count, prompt + answer, dtype=torch.int64)
            seen = torch.zeros(count, 1, 1, prompt + answer, dtype=network.get_input_embeddings().weight.dtype)
            seen = seen.expand(-1, 1, prompt + answer, -1)
            found = network.base_model(input_ids=tokens, attention_mask=seen, use_cache=False, return_dict=True)
            return found.last_hidden_state[:, prompt:]  # type: ignore[no-any-return]

        def once() -> Tensor:
            with autocast(trainer):
                scored = states(inputs)[torch.arange(max(chunk, inputs)) % inputs].flatten(0, 1)
                head = network.get_output_embeddings().weight
                return linear_logprobs(scored, head, torch.zeros(len(scored), dtype=torch.int64)).logp.sum()

        def fill(count: int) -> Tensor:
            with autocast(trainer):
                logits = functional.linear(states(count), network.get_output_embeddings().weight).float()
            return logits[:, : sampler.block].flatten(0, 1).log_softmax(-1)

        update = activations(wrapped, once, -(-rows // chunk) * again)
        parts.append(Part("activations", update.bytes, "update"))
        work = [Work.of("update", update, total / chunk * again * trainer.epochs)]
        if unscored := unscored_passes(config):
            work.insert(0, Work.of("scores without gradient", forward(wrapped, once), total / chunk * again * unscored))
        if not supervised:
            drawn = min(sampler.batch_rows, total)
            step = forward(wrapped, lambda: fill(drawn))
            parts.append(Part("predictions of masked tokens", step.bytes, "sampling"))
            work.insert(0, Work.of("sampling", step, total / drawn * sampler.steps))
    assumed = (f"prompts of {prompt} tokens", f"answers of {answer}", f"{inputs} inputs at once")
    low = model.dtype != "float32" or trainer.mixed_precision != "none"
    return Plan(tuple(parts), assumed, tuple(work), low)
