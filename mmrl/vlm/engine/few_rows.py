"""Products of a few rows with a large float32 matrix on a CPU, as in decoding, in the time it takes to read it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = (4, 15)
"""Minimum and maximum number of rows for which blocks pay off: 0.7 of the time at 4 and 8 rows of SmolLM2, more than 1
from 16 on."""
LARGE = 2**18
"""Minimum matrix size in elements for which blocks pay off."""
BLOCK = 64
"""Rows of a matrix in one product of a batch."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear`; for a few rows it is a batch of products, which MKL computes in two thirds of the time.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,).
    """
    rows = x.numel() // max(x.shape[-1], 1)
    if not FEW[0] <= rows <= FEW[1] or not _pays(weight) or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, weight, bias)
    blocks = weight.unflatten(0, (-1, BLOCK)).transpose(1, 2)
    found = torch.bmm(x.reshape(1, rows, -1).expand(len(blocks), -1, -1), blocks)
    found = found.transpose(0, 1).reshape(*x.shape[:-1], -1)
    return found if bias is None else found.add_(bias)


@contextmanager
def in_blocks(network: nn.Module) -> Iterator[None]:
    """Make the linear layers of a network multiply with `linear`, without gradients."""
    layers = [layer for layer in network.modules() if type(layer) is nn.Linear and "forward" not in vars(layer)]
    chosen = [layer for layer in layers if _pays(layer.weight)]
    for layer in chosen:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in chosen:
            del layer.forward


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


def _pays(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and weight.numel() >= LARGE and len(weight) % BLOCK == 0
