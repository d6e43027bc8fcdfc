"""Bytes of tensors that are alive, and their peak, on any device: a GPU's allocator without a GPU.

Tensors can have shapes and no numbers, so a model of any size can be run forward and backward to see what it keeps.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the storages that are made inside the context.

    with Allocations() as allocations:
        loss.backward()
    allocations.peak
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        """Bytes now."""
        self.peak = 0
        """Most bytes so far."""
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, *tensors: Tensor) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._add(tensor)

    def restart(self) -> None:
        """Look for a new peak from here on."""
        self.peak = self.alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        weakref.finalize(storage, self._free, size).atexit = False
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _free(self, size: int) -> None:
        self.alive -= size


@contextlib.contextmanager
def imagined() -> Iterator[None]:
    """Have tensors of shapes without numbers made inside, and attention that keeps what a fused kernel keeps."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Any:
        return _Fused.apply(q, k, v)

    with FakeTensorMode(allow_non_fake_inputs=True), mock.patch(ATTENTION, attention):
        yield


def imagine(module: nn.Module) -> None:
    """Give a module of the meta device weights on the CPU without numbers; only inside `imagined`."""
    known: dict[int, Any] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, old in table.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in known:
                    new = torch.empty(old.shape, dtype=old.dtype)
                    known[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                table[name] = known[id(old)]


ATTENTION = "torch.nn.functional.scaled_dot_product_attention"


class _Fused(torch.autograd.Function):
    """Output (..., T, d) of queries (..., T, d), with their log-sum-exps."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
