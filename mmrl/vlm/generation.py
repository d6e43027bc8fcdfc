"""The decoding loop: draw a token of every running row, record it, let a decoder read it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmrl.vlm.policy import VlmPolicy
from mmrl.vlm.sampling import EOS, FINISH_REASONS, STOP, SamplerConfig, Samples
from mmrl.vlm.token_choice import choose_tokens

COMPACT_BELOW = 0.75
"""Finished rows are dropped once less than this share of a batch is still running."""


class GenerationState:
    """One call of `sample` of B rows: its settings and, step by step, the tokens drawn.

    `uniforms` (B, max_new_tokens) are random numbers in [0, 1); None decodes greedily.
    """

    def __init__(self, policy: VlmPolicy, config: SamplerConfig, total: int, uniforms: Tensor | None) -> None:
        device, shape = policy.device, (config.max_new_tokens, total)
        self.policy = policy
        self.config = config
        self.uniforms = None if uniforms is None else uniforms.t().to(device, torch.float64).contiguous()
        text = policy.network.config.text_config
        self.is_eos = torch.zeros(text.vocab_size, dtype=torch.bool, device=device)
        self.is_eos[list(policy.eos_ids)] = True
        self.max_positions = int(text.max_position_embeddings)
        self.ids = torch.full(shape, policy.pad_id, device=device)
        self.mask = torch.zeros(shape, device=device)
        self.logp = torch.zeros(shape, device=device)
        self.kept = torch.ones(shape, device=device)
        self.reason = torch.zeros(total, dtype=torch.int64, device=device)

    def choose(self, rows: Tensor, step: int, logp: Tensor, running: Tensor) -> Tensor:
        """Draw and record the next token of the rows; those that ended before get the pad token."""
        uniform = None if self.uniforms is None else self.uniforms[step][rows]
        token, kept = choose_tokens(logp, uniform, self.config.top_p, self.config.top_k)
        token = token.where(running, self.policy.pad_id)
        chosen = logp.gather(1, token[:, None])[:, 0]
        self.ids[step].index_copy_(0, rows, token)
        self.mask[step].index_copy_(0, rows, running.float())
        self.logp[step].index_copy_(0, rows, chosen.where(running, 0.0))
        self.kept[step].index_copy_(0, rows, kept.where(running, 1.0))
        return token

    def ended(self, rows: Tensor, step: int, token: Tensor, running: Tensor) -> Tensor:
        """Rows whose response is complete with the token of this step."""
        at_eos = self.is_eos[token] & running
        self.reason[rows] = torch.where(at_eos, EOS, self.reason[rows])
        if not self.config.stop:
            return at_eos
        at_stop = self._at_stop(rows, step) & running & ~at_eos
        self.reason[rows] = torch.where(at_stop, STOP, self.reason[rows])
        return at_eos | at_stop

    def collect(self) -> Samples:
        """The responses, no wider than the longest."""
        lengths = self.mask.sum(0).long().tolist()
        width = max(*lengths, 1)
        ids, mask, logp, kept = (x[:width].t().contiguous() for x in (self.ids, self.mask, self.logp, self.kept))
        responses = [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
        tokenizer = self.policy.processor.tokenizer
        return Samples(
            response_ids=ids,
            mask=mask,
            logp=logp,
            finish=[FINISH_REASONS[code] for code in self.reason.tolist()],
            texts=tokenizer.batch_decode(responses, skip_special_tokens=True),
            nucleus_mass=kept,
        )

    def _at_stop(self, rows: Tensor, step: int) -> Tensor:
        # a token has at least one byte, so a string that ends here began within its number of bytes
        reach = max(len(text.encode()) for text in self.config.stop)
        tails = self.ids[max(step + 1 - reach, 0) : step + 1, rows].t().tolist()
        texts = self.policy.processor.tokenizer.batch_decode(tails, skip_special_tokens=True)
        found = [any(stop in text for stop in self.config.stop) for text in texts]
        return torch.tensor(found, device=rows.device)


class Decoder(Protocol):
    """Rows that are decoded together."""

    def keep(self, index: Tensor) -> None:
        """Drop all rows but some."""

    def advance(self, token: Tensor) -> Tensor:
        """Read one token of each row and return the states (b, H) that predict the next."""

    def next_logp(self, states: Tensor, temperature: float) -> Tensor:
        """Log-probabilities (b, V) of the next token."""


def decode(state: GenerationState, decoder: Decoder, rows: Tensor, budget: Tensor, states: Tensor) -> None:
    """Draw the responses of some rows, token by token, dropping finished rows from the batch."""
    running = torch.ones_like(rows, dtype=torch.bool)
    for step in range(state.config.max_new_tokens):
        token = state.choose(rows, step, decoder.next_logp(states, state.config.temperature), running)
        running = running & ~state.ended(rows, step, token, running) & (step + 1 < budget)
        left = int(running.sum())
        if left == 0 or step + 1 == state.config.max_new_tokens:
            return
        if left < COMPACT_BELOW * len(running):
            index = torch.nonzero(running).flatten()
            decoder.keep(index)
            rows, token, budget, running = rows[index], token[index], budget[index], running[index]
        states = decoder.advance(token)
