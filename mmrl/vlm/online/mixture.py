"""Sampling from the geometric mixture of two policies: both read the answer, and their log-probabilities add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.generic import GenericDecoder, GenericLane
from mmrl.vlm.engine.policy import VlmPolicy
from mmrl.vlm.engine.sampler import GenerationState, SamplerConfig, Samples, decode

Within = Callable[[Callable[[Any], Any]], Any]
"""Calls a function with the other policy, while that one is in force (`Reference.score`)."""


class MixtureDecoder:
    """Decodes with two policies; `share` is that of the other one in the log-probabilities."""

    def __init__(self, own: GenericDecoder, other: GenericDecoder, within: Within, share: float) -> None:
        self._own, self._other, self._within, self._share = own, other, within, share

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""
        self._own.keep(index)
        self._other.keep(index)

    def advance(self, token: Tensor) -> Any:
        """Read one token of each row and return the states of both policies."""
        return self._own.advance(token), self._within(lambda _: self._other.advance(token))

    def next_logp(self, states: Any, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token under the mixture."""
        own, other = states
        own_logp = self._own.next_logp(own, temperature)
        other_logp = self._within(lambda _: self._other.next_logp(other, temperature))
        return ((1 - self._share) * own_logp + self._share * other_logp).log_softmax(-1)


def sample_mixture(
    policy: VlmPolicy, within: Within, share: float, prompts: Sequence[Prompt], config: SamplerConfig, uniforms: Tensor
) -> Samples:
    """Draw one response to each prompt from the mixture, proportional to policy^(1 - share) other^share at each token.

    Args:
        policy: one of the two.
        within: calls a function with the other.
        share: of the other, in (0, 1).
        prompts: N prompts.
        config: lengths, temperature and truncation.
        uniforms: (N, max_new_tokens) in [0, 1).
    """
    state = GenerationState(policy, config, len(prompts), uniforms)
    training = policy.training
    policy.eval()
    try:
        with torch.no_grad():
            lane, prefix = _read(policy, prompts)
            other_lane, other_prefix = within(lambda module: _read(module, prompts))
            other = within(lambda module: module)
            for part, same in zip(prefix.parts, other_prefix.parts, strict=True):
                for chunk in torch.arange(len(part.numbers), device=policy.device).split(config.batch_rows):
                    own, theirs = part.select(chunk), same.select(chunk)
                    decoders = GenericDecoder(policy, lane, own), GenericDecoder(other, other_lane, theirs)
                    mixture: Any = MixtureDecoder(*decoders, within, share)
                    states: Any = (own.last_state, theirs.last_state)
                    decode(state, mixture, own.numbers, state.max_positions - own.lengths, states)
    finally:
        policy.train(training)
    return state.collect(prompts)


def _read(policy: Any, prompts: Sequence[Prompt]) -> tuple[GenericLane, Any]:
    lane = policy.generic or GenericLane(policy.network, policy.config)
    return lane, lane.encode_prefix(policy, prompts).detach()
