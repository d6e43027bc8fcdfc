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
    """The `mmrl.training.loop.sampler.Sampler` that samples from the policy itself, in the process that trains it.

    Args:
        config: lengths, temperature and truncation.
        keep: what is left of the prompts' prefill for the update.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(self, config: SamplerConfig, keep: KeepPrefill = KeepPrefill.NOTHING) -> None:
        check_config(config, "sampler")
        self.config = config
        self.keep = keep
        self._policy: VlmPolicy | None = None

    def load(self, weights: VlmPolicy, version: int) -> None:
        """Sample from this policy; it is read in place, so it always has the newest weights."""
        self._policy = weights

    def sample(self, tasks: Sequence[Prompt], n: int, generator: torch.Generator) -> Samples:
        """Draw n responses to each prompt."""
        if self._policy is None:
            raise RuntimeError("this sampler has no weights yet; call load(policy, version) first")
        return sample(self._policy, tasks, n, self.config, generator, keep=self.keep)


def sample(
    policy: VlmPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: SamplerConfig,
    draws: torch.Generator | Tensor | None,
    *,
    keep: KeepPrefill = KeepPrefill.NOTHING,
) -> Samples:
    """Draw responses.

    Args:
        policy: the model; it samples in evaluation mode and gets its own mode back.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, temperature and truncation; assumed valid (`mmrl.fields.check_config`).
        draws: CPU generator, from which N * G * max_new_tokens uniform numbers are drawn; or these numbers,
            (N * G, max_new_tokens) in [0, 1); or None for the likeliest tokens, whose recorded log-probabilities still
            have the temperature.
        keep: what is left of the prompts' prefill in `policy.prefixes`; nothing without the lean decoder.

    Returns:
        The responses of prompt 0, then those of prompt 1, and so on, on the policy's device.

    Raises:
        UserError: there are no prompts, or no samples of them.
    """
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")
    total = len(prompts) * samples_per_prompt
    if isinstance(draws, torch.Generator):
        draws = torch.rand(total, config.max_new_tokens, generator=draws)
    state = GenerationState(policy, config, total, draws)
    training = policy.training
    policy.eval()  # checkpointed layers drop the cache in training mode
    try:
        with torch.no_grad():
            if _is_lean(policy, config):
                _sample_lean(state, prompts, samples_per_prompt, keep)
            else:
                _sample_through_modules(state, prompts, samples_per_prompt)
    finally:
        policy.train(training)
    return state.collect()


def _is_lean(policy: VlmPolicy, config: SamplerConfig) -> bool:
    reason = unsupported_reason(policy) if config.lean else "sampler.lean is false"
    if reason is not None:
        _log_once("responses are decoded through transformers' modules: %s", reason)
    return reason is None


@functools.cache
def _log_once(message: str, reason: str) -> None:
    LOGGER.info(message, reason)


def _sample_lean(state: GenerationState, prompts: Sequence[Prompt], group: int, keep: KeepPrefill) -> None:
    """Read the prompts once, then decode their samples, at most `batch_rows` at a time."""
    most = state.config.batch_rows
    # a prefix with history has to be one pass: one backward pass goes through it
    together = len(prompts) if keep is KeepPrefill.GRAPH else max(most // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        with stopwatch("prefill"):
            prefix = _read_prompts(state.policy, part, keep)
        with stopwatch("decode"):
            weights = lean_weights(state.policy)
            rows = torch.arange(len(part) * group, device=state.policy.device)
            # whole groups where they fit, so that few prompts are read by two chunks
            for chunk in rows.split(max(most - most % group, min(most, group))):
                _decode_lean(state, weights, prefix, chunk // group, chunk + first * group)


def _read_prompts(policy: VlmPolicy, prompts: Sequence[Prompt], keep: KeepPrefill) -> Prefix:
    with torch.set_grad_enabled(keep is KeepPrefill.GRAPH):
        prefix = policy.encode_prefix(prompts)
    if keep is not KeepPrefill.NOTHING:
        policy.prefixes.keep(prompts, prefix if keep is KeepPrefill.GRAPH else prefix.detach())
    return prefix.detach()


def _decode_lean(state: GenerationState, weights: LeanWeights, prefix: Prefix, prompt: Tensor, rows: Tensor) -> None:
    live, own = torch.unique_consecutive(prompt, return_inverse=True)
    prefix = prefix if len(live) == len(prefix) else prefix.select(live)
    decoder = PrefixDecoder(weights, prefix, own, state.config.max_new_tokens - 1, state.policy.banned_ids)
    decode(state, decoder, rows, state.max_positions - prefix.lengths[own], prefix.last_state[own])


def _sample_through_modules(state: GenerationState, prompts: Sequence[Prompt], group: int) -> None:
    """Read some prompts at a time, each once, then decode their samples, at most `batch_rows` at a time."""
    policy, most = state.policy, state.config.batch_rows
    together = max(most // group, 1)
    for first in range(0, len(prompts), together):
        part = prompts[first : first + together]
        table = tabulate(part, policy.pad_id, policy.device)
        with stopwatch("prefill"):
            cache, last = fill_cache(policy, part, table)
        chunks = torch.arange(len(part) * group, device=policy.device).split(most)
        with stopwatch("decode"):
            for number, chunk in enumerate(chunks):
                prompt = chunk // group
                # decoding changes the cache, so all chunks but the last work on a copy
                shared = cache if number == len(chunks) - 1 else copy.deepcopy(cache)
                shared.batch_select_indices(prompt)
                decoder = ModuleDecoder(state, table, prompt, shared)
                decode(state, decoder, chunk + first * group, state.max_positions - table.lengths[prompt], last[prompt])
