"""Sampling from the geometric mixture of two policies: both read the answer, and their log-probabilities add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.generic import GenericDecoder, GenericLane
from mmrl.vlm.engine.policy import VlmPolicy
from mmrl.vlm.engine.sampler import SamplerConfig, Samples, sample_by

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
    training = policy.training
    policy.eval()  # the other may be the policy itself without its adapter
    try:
        with torch.no_grad():
            other, lane, prefix = within(lambda module: (module, *_read(module, prompts)))
    finally:
        policy.train(training)

    def decoder_of(own_lane: GenericLane, own: Any, theirs: Any) -> tuple[Any, Any]:
        decoders = GenericDecoder(policy, own_lane, own), GenericDecoder(other, lane, theirs)
        return MixtureDecoder(*decoders, within, share), (own.last_state, theirs.last_state)

    return sample_by(policy, prompts, config, uniforms, decoder_of, prefix.parts)


def _read(policy: Any, prompts: Sequence[Prompt]) -> tuple[GenericLane, Any]:
    lane = policy.generic or GenericLane(policy.network, policy.config)
    return lane, lane.encode_prefix(policy, prompts).detach()
