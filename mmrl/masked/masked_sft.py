"""Training of a masked-diffusion language model on given answers, from random weights or as a fine-tuning.

A time t is drawn for each answer, each of its L tokens is masked with probability t, and the loss is the cross-entropy
of the masked ones, weighted by 1 / t and divided by L: a bound of the negative log-likelihood a token. Questions are
never masked, and answers are padded with end tokens, which the model learns as well.

Source: Nie et al., LLaDA, arXiv 2502.09992, eq. 5 and algorithm 2; ML-GSAI/LLaDA GUIDELINES.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.masked.masked_config import MaskedSftConfig
from mmrl.masked.masked_policy import MaskedPayload, MaskedPolicy
from mmrl.masked.masked_sampler import sample
from mmrl.training.processes import Streams
from mmrl.training.recipe import Step
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.sft import SftRecipe

TIME = "time"
SHORTEST_TIME = 1e-3
"""Minimum masking probability of a token, as in LLaDA's forward process."""
"""Key of `Rollouts.extras` (B,): the probability with which the tokens of the row were masked."""


class MaskedSftRecipe(SftRecipe):
    """Bounds the likelihood of a column of completions."""

    config: MaskedSftConfig
    policy_class = MaskedPolicy
    draw_answers = staticmethod(sample)
    own_loss = "masked_sft"

    def batch(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Tokenise the given completions and draw their masks."""
        assert isinstance(policy, MaskedPolicy)
        usable, prompts = self.encode(policy, tasks)
        texts = [str(task.columns[self.config.target_key]) for task in usable]
        width = self.config.scoring.sampler.max_new_tokens
        pairs = zip(prompts, texts, strict=True)
        tokens = torch.tensor([policy.encode_padded(prompt, text, width) for prompt, text in pairs])
        streams = streams.among(tasks, usable)
        uniform = streams.uniform(len(usable), 1, width + 1)
        time = SHORTEST_TIME + (1.0 - SHORTEST_TIME) * uniform[:, 0]
        payload = MaskedPayload(
            prompts=prompts,
            tasks=usable,
            response_ids=tokens,
            texts=texts,
            finish=["eos"] * len(texts),
            hidden=(uniform[:, 1:] < time[:, None])[:, None],
            length=policy.lengths(tokens),
        )
        mask = torch.ones(tokens.shape)
        group, reward = torch.arange(len(texts)), torch.zeros(len(texts))
        rollouts = Rollouts(group, mask, torch.zeros_like(mask), reward, payload, extras={TIME: time})
        return streams.noted(rollouts.to(policy.device))

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probability of each token given the unmasked tokens."""
        return policy(rollouts, level="tokens", outputs=outputs)  # type: ignore[no-any-return]

    def loss(self, policy: nn.Module, minibatch: Rollouts, denominators: Denominators, step: Step) -> LossOutput:
        """Bound of the negative log-likelihood, averaged over tokens."""
        logp = self.scores(policy, minibatch, self.loss_outputs).logp
        hidden = MaskedPayload.of(minibatch).hidden[:, 0]
        total = -masked_likelihood(logp, hidden, minibatch.extras[TIME]).sum() / denominators.tokens
        right = Metric(-(logp.detach() * hidden).sum(), hidden.sum())
        return LossOutput(total, {"loss/total": Metric.summed(total.detach()), "loss/nll": right})

    def describe(self) -> str:
        """Formula of the loss."""
        return "- mean (1 / t) 1[token masked with probability t] log p(token | question, tokens that are not masked)"


def masked_likelihood(logp: Tensor, hidden: Tensor, time: Tensor) -> Tensor:
    """Bound of the log-likelihood of each row (B,): its masked tokens weighted by 1 / t.

    Args:
        logp: (B, L) log-probability of each token, given those that are not masked.
        hidden: (B, L) bool, the masked ones.
        time: (B,) probability with which each token was masked.
    """
    return (logp * hidden).sum(1) / time
