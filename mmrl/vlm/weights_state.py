"""Tells whether weights have moved, also where torch does not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def weights_state(parameters: Iterable[nn.Parameter]) -> tuple[int, ...]:
    """A number for each trainable weight, and one for all, that change when a weight does.

    A parameter's `_version` counts writes, but not those of a fused optimiser. So weights that an optimiser may move
    are read: the sum of their bits, eight bytes at a time, which is exact, needs no order of summation and takes as
    long as reading them once (about 0.3 ms for a million float32 on one core of a desktop's CPU).
    """
    weights = list(parameters)
    trained = [weight for weight in weights if weight.requires_grad or weight.grad is not None]
    versions = sum(weight._version for weight in weights)
    if not trained:
        return (versions,)
    sums = torch.stack([_sum_of_bits(weight.detach()).to(trained[0].device) for weight in trained])
    return (versions, *sums.tolist())


def _sum_of_bits(weight: Tensor) -> Tensor:
    """Sum of a tensor's eight-byte words, modulo 2^64, and of the bytes that are left."""
    data = weight.contiguous().view(-1).view(torch.uint8)
    words, rest = data.split([len(data) // 8 * 8, len(data) % 8])
    if words.storage_offset() * words.element_size() % 8:  # a part of a larger tensor: not aligned
        words = words.clone()
    return words.view(torch.int64).sum() + rest.sum()
