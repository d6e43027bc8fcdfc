"""Sampling responses: each prompt is read once, its keys are shared by its samples, finished rows leave the batch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.errors import UserError
from mmrl.fields import check_config
from mmrl.training.record.stopwatch import stopwatch
from mmrl.vlm.decoder import PrefixDecoder
from mmrl.vlm.generation import GenerationState, decode
from mmrl.vlm.kept_prefill import KeepPrefill
from mmrl.vlm.lean_weights import LeanWeights, lean_weights, unsupported_reason
from mmrl.vlm.module_decoder import ModuleDecoder, fill_cache
from mmrl.vlm.packing import tabulate
from mmrl.vlm.payload import Prompt
from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.prefix import Prefix
from mmrl.vlm.sampling import SamplerConfig, Samples

LOGGER = logging.getLogger("mmrl")


class PolicySampler:
    """The suite's own engine: samples from the policy itself, in the process that trains it.

    It is a `mmrl.training.loop.sampler.Sampler` of encoded prompts.
    """

    def __init__(self, config: SamplerConfig, keep: KeepPrefill = KeepPrefill.NOTHING) -> None:
        self.config = config
        self.keep = keep
        self._policy: VlmPolicy | None = None

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Sample from this policy; it is read in place, so it always has the newest weights."""
        self._policy = weights

    def sample(self, tasks: Sequence[Prompt], n: int, generator: torch.Generator) -> Samples:
        """Draw n responses to each prompt; see `sample`."""
        if self._policy is None:
            raise RuntimeError("this sampler has no weights yet; call load(policy, version) first")
        return sample(self._policy, tasks, n, self.config, generator, keep=self.keep)


def sample(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    generator: torch.Generator,
    greedy: bool = False,
    *,
    keep: KeepPrefill = KeepPrefill.NOTHING,
) -> Samples:
    """Draw responses.

    Args:
        policy: the model; it samples in evaluation mode; its own mode is restored.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation.
        generator: CPU generator; B * max_new_tokens uniform numbers are drawn from it, none when greedy.
        greedy: take the most likely token; the recorded log-probabilities keep the temperature.
        keep: what is left of the prompts' prefill in `policy.prefixes`; nothing without the lean decoder.

    Returns:
        The responses of prompt 0, then those of prompt 1, and so on, on the policy's device.

    Raises:
        UserError: a setting is out of range, or there are no prompts.
    """
    _check_request(prompts, samples_per_prompt, config)
    total = len(prompts) * samples_per_prompt
    uniforms = None if greedy else torch.rand(total, config.max_new_tokens, generator=generator)
    return sample_with(policy, prompts, samples_per_prompt, config, uniforms, keep=keep)


def sample_with(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    uniforms: Tensor | None,
    *,
    keep: KeepPrefill = KeepPrefill.NOTHING,
) -> Samples:
    """`sample` with given random numbers.

    Args:
        policy: as for `sample`, like the arguments that are not listed.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation.
        uniforms: (N * G, max_new_tokens) in [0, 1); None takes the likeliest tokens.
        keep: what is left of the prompts' prefill.
    """
    draw = GenerationState(policy, config, len(prompts) * samples_per_prompt, uniforms)
    training = policy.training
    policy.eval()  # checkpointed layers drop the cache in training mode
    try:
        with torch.no_grad():
            if _is_lean(policy, config):
                _sample_lean(draw, prompts, samples_per_prompt, keep)
            else:
                _sample_through_modules(draw, prompts, samples_per_prompt)
    finally:
        policy.train(training)
    return draw.collect()


def _check_request(prompts: Sequence[Prompt], samples_per_prompt: int, config: SamplerConfig) -> None:
    check_config(config, "sampler")
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")


def _is_lean(policy: VlmPolicy, config: SamplerConfig) -> bool:
    reason = unsupported_reason(policy) if config.lean else "sampler.lean is false"
    if reason is not None:
        _log_once("responses are decoded through transformers' modules: %s", reason)
    return reason is None


@functools.cache
def _log_once(message: str, reason: str) -> None:
    LOGGER.info(message, reason)


def _sample_lean(draw: GenerationState, prompts: Sequence[Prompt], group: int, keep: KeepPrefill) -> None:
    """Read the prompts once, then decode their samples, at most `batch_rows` at a time."""
    most = draw.config.batch_rows
    # a history is kept whole, for the one pass that can go back through it
    together = len(prompts) if keep is KeepPrefill.GRAPH else max(most // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        with stopwatch("prefill"):
            prefix = _read_prompts(draw.policy, part, keep)
        with stopwatch("decode"):
            weights = lean_weights(draw.policy)
            rows = torch.arange(len(part) * group, device=draw.policy.device)
            for chunk in rows.split(max(most - most % group, min(most, group))):
                _decode_lean(draw, weights, prefix, chunk // group, chunk + first * group)


def _read_prompts(policy: VlmPolicy, prompts: Sequence[Prompt], keep: KeepPrefill) -> Prefix:
    with torch.set_grad_enabled(keep is KeepPrefill.GRAPH):
        prefix = policy.encode_prefix(prompts)
    if keep is not KeepPrefill.NOTHING:
        policy.prefixes.keep(prompts, prefix if keep is KeepPrefill.GRAPH else prefix.detach())
    return prefix.detach()


def _decode_lean(draw: GenerationState, weights: LeanWeights, prefix: Prefix, prompt: Tensor, rows: Tensor) -> None:
    live, own = torch.unique_consecutive(prompt, return_inverse=True)
    prefix = prefix if len(live) == len(prefix) else prefix.select(live)
    decoder = PrefixDecoder(weights, prefix, own, draw.config.max_new_tokens - 1, draw.policy.banned_ids)
    decode(draw, decoder, rows, draw.max_positions - prefix.lengths[own], prefix.last_state[own])


def _sample_through_modules(draw: GenerationState, prompts: Sequence[Prompt], group: int) -> None:
    """Read some prompts at a time, each once, then decode their samples, at most `batch_rows` at a time."""
    together = max(draw.config.batch_rows // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        table = tabulate(part, draw.policy.pad_id, draw.policy.device)
        with stopwatch("prefill"):
            cache, last = fill_cache(draw.policy, part, table)
        rows = torch.arange(len(part) * group, device=draw.policy.device)
        chunks = rows.split(draw.config.batch_rows)
        with stopwatch("decode"):
            for number, chunk in enumerate(chunks):
                prompt = chunk // group
                shared = cache if number == len(chunks) - 1 else copy.deepcopy(cache)
                shared.batch_select_indices(prompt)
                decoder = ModuleDecoder(draw, table, prompt, shared)
                budget = draw.max_positions - table.lengths[prompt]
                decode(draw, decoder, chunk + first * group, budget, last[prompt])
