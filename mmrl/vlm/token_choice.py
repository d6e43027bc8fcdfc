"""Drawing tokens from log-probabilities with given random numbers, so that a draw can be repeated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
"""Tokens whose probabilities are added up before the search."""


def choose_tokens(logp: Tensor, uniform: Tensor | None, top_p: float = 1.0, top_k: int = 0) -> tuple[Tensor, Tensor]:
    """Draw a token of each row by inversion of its distribution function."""
    if uniform is None:
        return logp.max(-1).indices, torch.ones_like(logp[:, 0])
    probability = logp.exp()
    if top_k or top_p < 1.0:
        probability = _truncate(probability, top_p, top_k)
    token, mass = _invert(probability, uniform.double())
    return token, mass.to(logp.dtype)


def _invert(probability: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest token whose running sum exceeds the fraction `uniform` (b,) of the total, and the total.

    Sums over blocks find the block, a running sum inside it finds the token: both in float64, because in float32 the
    running sum over a large vocabulary loses the tail, but only over a few numbers.
    """
    blocks = functional.pad(probability, (0, -probability.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    target = uniform[:, None] * ends[:, -1:]
    block = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = functional.pad(ends, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    # the two ways to add up a block differ in the last bit; past its end lie tokens without probability
    last = inside[:, -1:]
    target = (target - before).clamp_(min=0.0).minimum(last.nextafter(torch.zeros_like(last)))
    token = block * BLOCK + torch.searchsorted(inside, target, right=True)
    return token[:, 0], ends[:, -1]


def _truncate(probability: Tensor, top_p: float, top_k: int) -> Tensor:
    """Zero all but the top_k most likely tokens, and of those all but the smallest set with mass top_p."""
    count = min(top_k or probability.shape[1], probability.shape[1])
    ordered, index = probability.topk(count) if top_k else probability.sort(-1, descending=True)
    if top_p < 1.0:
        ends = ordered.cumsum(-1, dtype=torch.float64)
        before = ends - ordered
        ordered = ordered.where(before < top_p * ends[:, -1:], 0.0)
    return torch.zeros_like(probability).scatter(1, index, ordered)
