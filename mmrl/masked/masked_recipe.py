"""Group-based RL of masked-diffusion language models (LLaDA, arXiv 2502.09992) with any objective of the catalogue.

BGPO and IGPO are among them.

Two kinds of decisions (`likelihood.kind`): one_step, each token given the question alone, with everything else masked,
as in d1 and IGPO; and elbo, Monte Carlo draws of a lower bound of the answer's log-likelihood, with the same masks for
the old, the new and the reference policy. BGPO's objective is linear in these draws, so that with `likelihood.chunk`
memory does not grow with their number; `ratio: {kind: sequence_full}` with `clip: {kind: unclipped}` is the objective
that it bounds.

With `inpainting.replacements`, questions that every sample gets wrong are answered again around chunks of the worked
answer, and correct answers replace samples (IGPO). They are scored like the others, although their hints were given;
the objective `inpainting_guided` learns only the hinted tokens with the highest entropy.

Differences from IGPO's code: each group is checked separately (there a device's whole batch, which is one group, must
be wrong); all inner iterations use the fully masked timestep (`d1_masking`, as in its script).

Sources: LLaDA, arXiv 2502.09992; BGPO, arXiv 2510.11683; IGPO (inpainting), arXiv 2509.10396, facebookresearch/igpo
trainer_igpo.py and run_igpo.sh.

Training of a masked-diffusion language model on given answers, from random weights or as a fine-tuning.

A time t is drawn for each answer, each of its L tokens is masked with probability t, and the loss is the cross-entropy
of the masked ones, weighted by 1 / t and divided by L: a bound of the negative log-likelihood a token. Questions are
never masked, and answers are padded with end tokens, which the model learns as well.

Source: Nie et al., LLaDA, arXiv 2502.09992, eq. 5 and algorithm 2; ML-GSAI/LLaDA GUIDELINES.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmrl.core.loss import Denominators, Metric, row_metric
from mmrl.core.objectives.objective import LossOutput, PolicyOutputs
from mmrl.core.rollouts import Rollouts
from mmrl.masked.inpainting import Inpainting
from mmrl.masked.masked_config import MaskedConfig, MaskedSftConfig
from mmrl.masked.masked_policy import MaskedPayload, MaskedPolicy, with_masks
from mmrl.masked.masked_sampler import MaskedSampler, sample
from mmrl.training.processes import Streams
from mmrl.training.recipe import RolloutStage, Step
from mmrl.vlm.data.prompt import Prompt, VlmPayload
from mmrl.vlm.data.task import VlmTask
from mmrl.vlm.engine.vlm_policy import VlmPolicy
from mmrl.vlm.methods.sft import SftRecipe
from mmrl.vlm.vlm_recipe import VlmRecipe


class MaskedRecipe(VlmRecipe):
    """Samples by filling in masked responses; scores them in one step or by an evidence lower bound."""

    config: MaskedConfig
    policy_class = MaskedPolicy
    draw_answers = staticmethod(sample)

    def make_stages(self) -> list[RolloutStage]:
        """Inpainting."""
        return [Inpainting(self, self.config)]

    def own_sampler(self) -> Any:
        """The sampler that fills in responses."""
        return MaskedSampler(self.config.sampler)

    def rollout(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Sample G responses to each question, and draw the masks that they are scored with."""
        rollouts = super().rollout(policy, tasks, streams, step)
        streams = streams.of_groups(rollouts)
        return with_masks(rollouts, self.config.draws, rollouts.num_groups, streams, "likelihood")

    def scores(self, policy: nn.Module, rollouts: Rollouts, outputs: frozenset[str]) -> PolicyOutputs:
        """Log-probabilities of tokens or of draws, at temperature 1."""
        level = "draws" if self.config.draws else "one_step"
        found: PolicyOutputs = policy(rollouts, level=level, outputs=outputs)
        if not (self.config.likelihood.per_token and self.config.draws):
            return found
        tokens = VlmPayload.of(rollouts).response_ids.shape[1]
        return dataclasses.replace(
            found, logp=found.logp / tokens, entropy=None if found.entropy is None else found.entropy / tokens
        )

    def micro_batches(self, minibatch: Rollouts, rows: int, *, whole_groups: bool) -> Iterator[Rollouts]:
        """Also split each part by draws if the loss is a sum over draws."""
        # one part for each chunk of draws; the mask says which draws count
        most = self.config.likelihood.chunk or minibatch.num_decisions
        for part in super().micro_batches(minibatch, rows, whole_groups=whole_groups):
            for first in range(0, part.num_decisions, most):
                # rows stay whole: only the mask is cut
                own = torch.zeros_like(part.mask)
                own[:, first : first + most] = part.mask[:, first : first + most]
                yield part if most >= part.num_decisions else part.replace(mask=own)

    def step_metrics(self, rollouts: Rollouts) -> dict[str, float | Metric]:
        """Adds the lengths of responses up to their end token, which differ from their numbers of decisions."""
        length = MaskedPayload.of(rollouts).length.float()
        own = {"response/length_mean": row_metric(length), "response/length_max": Metric(length.max(), 1.0, "max")}
        return super().step_metrics(rollouts) | own

    def describe(self) -> str:
        """The objective's formula and the likelihood."""
        draws = self.config.draws
        decision = (
            "logp_it = (L / m) sum of log p(token | question, tokens that are not masked) over m masked tokens; "
            f"{draws} draws t of m uniform in 1..L"
            if draws
            else "logp_it = log p(token t | question, all L tokens masked)"
        )
        return f"{super().describe()}\n{decision}"


TIME = "time"
SHORTEST_TIME = 1e-3
"""Minimum masking probability of a token, as in LLaDA's forward process."""
"""Key of `Rollouts.extras` (B,): the probability with which the tokens of the row were masked."""


class MaskedSftRecipe(SftRecipe):
    """Maximises a likelihood bound of a column of completions."""

    config: MaskedSftConfig
    policy_class = MaskedPolicy
    draw_answers = staticmethod(sample)
    own_loss = "masked_sft"

    def misfit(self, policy: VlmPolicy, prompt: Prompt, text: str, ids: Sequence[int]) -> str:
        """As if sampled, an answer that fills the whole response has no end token."""
        size, width = len(policy.encode_answer(prompt, text, ends=False)), self.config.scoring.sampler.max_new_tokens
        return "" if size <= width else f"{size} tokens, more than evaluation.sampler.max_new_tokens={width}"

    def batch(self, policy: VlmPolicy, tasks: Sequence[VlmTask], streams: Streams, step: Step) -> Rollouts:
        """Tokenise the given completions and draw their masks."""
        assert isinstance(policy, MaskedPolicy)
        usable, prompts, texts, rows = self.fitting(policy, tasks)
        width = self.config.scoring.sampler.max_new_tokens
        tokens = torch.tensor([policy.padded(row, width) for row in rows])
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
        return policy(rollouts, level="tokens", outputs=outputs)

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
