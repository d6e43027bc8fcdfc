"""Sampling of masked-diffusion language models: block after block, a few tokens per step, the most confident first.

In each step all masked tokens of the block are predicted, a token is drawn for each, and the ones kept are those with
the highest probability, or random ones. The others stay masked and are drawn again in later steps.

Source: Nie et al., LLaDA, arXiv 2502.09992, algorithm 5; ML-GSAI/LLaDA generate.py, facebookresearch/igpo
utils/generate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.payload import to_device
from mmrl.errors import ConfigError, UserError
from mmrl.fields import bounded, choice
from mmrl.masked.masked_policy import MaskedPolicy
from mmrl.runs.run_log import stopwatch
from mmrl.training.processes import Streams
from mmrl.vlm.data.prompt import Prompt
from mmrl.vlm.engine.vlm_sampler import Samples, choose_tokens

REMASKING = ("low_confidence", "random")


@dataclass
class MaskedSampling:
    """Length of responses, and how they are filled in."""

    max_new_tokens: int = bounded(64, at_least=1)
    """Length of every response in tokens; everything after its first end token is padding."""
    block: int = bounded(32, at_least=1)
    """Tokens per block, a divisor of max_new_tokens; blocks are filled from left to right."""
    steps: int = bounded(32, at_least=1)
    """Steps per response, a multiple of the number of blocks; each step fills in an equal part of its block."""
    remasking: str = choice("low_confidence", REMASKING)
    """Which tokens a step keeps. low_confidence: those with the highest probability, the others are masked again;
    random: any tokens (greedy responses are still filled in by confidence)."""
    temperature: float = bounded(1.0, above=0)
    """Softmax temperature for sampling; scoring does not use it."""
    batch_rows: int = bounded(256, at_least=1)
    """Maximum number of responses sampled at once. Affects memory only."""

    def validate(self) -> None:
        """Check that blocks and steps divide evenly; raises ConfigError."""
        if self.max_new_tokens % self.block:
            raise ConfigError(f"block is {self.block}; it must divide max_new_tokens={self.max_new_tokens}")
        if self.steps % self.blocks:
            raise ConfigError(f"steps is {self.steps}; it must be a multiple of the {self.blocks} blocks")

    @property
    def config(self) -> MaskedSampling:
        """Itself."""
        return self

    @property
    def truncates(self) -> bool:
        """False: tokens are drawn from the whole distribution."""
        return False

    def whole(self, temperature: float) -> MaskedSampling:
        """The same options at another temperature."""
        return replace(self, temperature=temperature)

    @property
    def blocks(self) -> int:
        """Blocks per response."""
        return self.max_new_tokens // self.block

    @property
    def draws(self) -> int:
        """Number of random numbers per response: for the order of its tokens, and for their values in each step."""
        return self.max_new_tokens * (1 + self.steps // self.blocks)


class MaskedSampler:
    """The `mmrl.training.recipe.Sampler` of a masked-diffusion policy."""

    def __init__(self, config: MaskedSampling) -> None:
        self.config = config
        self._policy: MaskedPolicy | None = None

    def load(self, weights: MaskedPolicy, version: int) -> None:
        """Sample from this policy; it is not copied, so its weights are always current."""
        self._policy = weights

    def sample(self, tasks: Sequence[Prompt], n: int, streams: Streams) -> Samples:
        """Draw n responses to each prompt."""
        assert self._policy is not None
        return sample(self._policy, tasks, n, self.config, streams.uniform(len(tasks), n, self.config.draws))

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


def sample(
    policy: MaskedPolicy,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    config: MaskedSampling,
    draws: Tensor | None,
    hints: Tensor | None = None,
) -> Samples:
    """Fill in responses.

    Args:
        policy: the model.
        prompts: N prompts.
        samples_per_prompt: G.
        config: lengths, blocks, steps; assumed valid.
        draws: (N * G, config.draws) in [0, 1); None for the likeliest tokens.
        hints: (N * G, L) int64, given tokens, and the mask token at open positions; None without hints.

    Returns:
        The answers of prompt 0, then those of prompt 1, and so on, each L tokens wide; the mask ends with the first end
        token, and there are no log-probabilities.

    Raises:
        UserError: there are no prompts, or no samples of them.
    """
    if not prompts or samples_per_prompt < 1:
        raise UserError(f"there is nothing to sample: {len(prompts)} prompts, {samples_per_prompt} samples each")
    total, length = len(prompts) * samples_per_prompt, config.max_new_tokens
    start = torch.full((total, length), policy.mask_id) if hints is None else hints
    training = policy.training
    policy.eval()
    with torch.no_grad(), stopwatch("decode"):
        parts = [
            fill(
                policy,
                [prompts[row // samples_per_prompt] for row in rows.tolist()],
                to_device(start[rows], policy.device),
                config,
                None if draws is None else to_device(draws[rows], policy.device),
            )
            for rows in torch.arange(total).split(config.batch_rows)
        ]
    policy.train(training)
    return _collect(policy, prompts, samples_per_prompt, torch.cat(parts))


def fill(
    policy: MaskedPolicy, prompts: Sequence[Prompt], answers: Tensor, config: MaskedSampling, draws: Tensor | None
) -> Tensor:
    """Responses (R, L) with all masked tokens filled in."""
    rows, length = answers.shape
    count = config.steps // config.blocks
    draws = None if draws is None else draws.view(rows, count + 1, length)
    for first in range(0, length, config.block):
        # block by block, from left to right; later blocks stay masked meanwhile
        stop = first + config.block
        # hints are in place already, so a block may have fewer tokens to fill
        shares = step_shares((answers[:, first:stop] == policy.mask_id).sum(1), count)
        for step, fills in enumerate((shares > 0).any(0).tolist()):
            if not fills:
                continue
            # all places are predicted, since every token sees every other one
            logits = policy.logits(prompts, answers)[:, first:stop]
            own = None if draws is None else draws[:, :, first:stop]
            token, sure = propose(logits, None if own is None else own[:, 1 + step], config.temperature)
            # the first L numbers order the tokens, the others draw their values
            if config.remasking == "random" and own is not None:
                sure = own[:, 0]
            answers[:, first:stop] = unmask(answers[:, first:stop], token, sure, shares[:, step], policy.mask_id)
    return answers


def step_shares(masked: Tensor, steps: int) -> Tensor:
    """Tokens (R, steps) that each step fills in, out of a total (R,): equal parts, larger ones first."""
    return masked[:, None] // steps + (torch.arange(steps, device=masked.device) < masked[:, None] % steps)


def propose(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each position of logits (R, L, V), and its probability at temperature 1.

    Args:
        logits: predictions.
        uniform: (R, L) in [0, 1) to draw with; None for the likeliest tokens.
        temperature: logits are divided by it for drawing.
    """
    flat = logits.flatten(0, 1)
    token, _ = choose_tokens((flat / temperature).log_softmax(-1), None if uniform is None else uniform.flatten())
    # at temperature 1: confidence is the model's own, not that of the draw
    sure = flat.log_softmax(-1).gather(1, token[:, None])[:, 0]
    return token.view(logits.shape[:2]), sure.view(logits.shape[:2]).exp()


def unmask(answers: Tensor, token: Tensor, sure: Tensor, count: Tensor, mask_id: int) -> Tensor:
    """Fill in the most confident masked tokens.

    Args:
        answers: (R, L) tokens, and the mask token at open positions.
        token: (R, L) candidates.
        sure: (R, L) by which they are ordered.
        count: (R,) tokens to fill in.
        mask_id: the mask token.
    """
    masked = answers == mask_id
    # the rank of each place; only masked ones compete
    order = sure.masked_fill(~masked, float("-inf")).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where(masked & (order < count[:, None]), token, answers)


def _collect(policy: MaskedPolicy, prompts: Sequence[Prompt], group: int, tokens: Tensor) -> Samples:
    length = policy.lengths(tokens)
    mask = (torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]).float()
    rows: list[Any] = [row[:stop] for row, stop in zip(tokens.tolist(), length.tolist(), strict=True)]
    texts = policy.turns.decode(rows)
    # an answer without an end token was cut off at L
    ended = torch.isin(tokens, torch.tensor(policy.eos_ids, device=tokens.device)).any(1).tolist()
    starts = [prompt.answer_start for prompt in prompts for _ in range(group)]
    return Samples(
        response_ids=tokens,
        mask=mask,
        logp=torch.zeros_like(mask),
        finish=["eos" if end else "length" for end in ended],
        texts=[start + text for start, text in zip(starts, texts, strict=True)],
        nucleus_mass=torch.ones_like(mask),
    )
