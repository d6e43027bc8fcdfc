"""Runs in float64: rounding is 2^29 times smaller than in float32, and a mistake is as large."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

ROUNDING = torch.finfo(torch.float32).eps
"""Share of a number by which equal runs in float64 may differ. It is 2^29 roundings of float64, far more than the terms
of a sum can add up to, and what is smaller no run in float32 would show."""


class _Doubles(TorchFunctionMode):
    """Takes float64 wherever code asks for float32 or reads it from a file or an array."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # attributes, such as a weight's gradient, stay the object that they are
        if name in ("__get__", "__set__"):
            return func(*args, **kwargs)
        func = Tensor.double if func is Tensor.float else func
        # the bytes of a file keep their meaning
        if name not in ("view", "frombuffer"):
            args, kwargs = tree_map(_doubled, (args, kwargs))
        return tree_map(_doubled, func(*args, **kwargs))


def _doubled(leaf: Any) -> Any:
    if leaf is torch.float32:
        return torch.float64
    # not a subclass: parts of weights (DTensor) are made of float64 weights
    plain = type(leaf) in (Tensor, nn.Parameter)
    return leaf.double() if plain and leaf.dtype is torch.float32 else leaf


@contextmanager
def in_double() -> Iterator[None]:
    """Compute in float64; weights to be trained have to be converted."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def computes_in_double() -> bool:
    """Whether this is within `in_double`."""
    return torch.get_default_dtype() is torch.float64
