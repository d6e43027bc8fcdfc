"""Finds gradients whose bits depend on which CPU thread comes first."""

import traceback
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ADDING = (
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
)
"""Operators that accumulate the gradient of `x[index]`, in parallel for large tensors."""


class UnorderedSums(TorchDispatchMode):
    """Notes every sum of gradients that belong to the same entry; `take_rows` adds them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        adds = func in ADDING and (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
        if adds and (count := _repeats(*args[:3])) > 1:
            self.found.add(f"{count} gradients for one entry of {tuple(args[0].shape)}, {_line()}")
        return func(*args, **kwargs)


def _repeats(x: torch.Tensor, indices: list[torch.Tensor | None], values: torch.Tensor) -> int:
    """Largest number of nonzero gradients that are added to one entry of `x`."""
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    given = torch.broadcast_tensors(*[indices[axis] for axis in axes])
    if given[0].dtype == torch.bool or axes != list(range(axes[0], axes[0] + len(axes))):
        return 0
    place = torch.zeros_like(given[0])
    for axis, index in zip(axes, given, strict=True):
        place = place * x.shape[axis] + index % x.shape[axis]
    before, after = x.shape[: axes[0]], x.shape[axes[-1] + 1 :]
    values = values.expand(*before, *place.shape, *after).reshape(*before, place.numel(), *after)
    live = (values.movedim(len(before), 0).reshape(place.numel(), -1) != 0).any(1)
    return int(place.flatten()[live].bincount(minlength=1).max())


def _line() -> str:
    """Where the indexing was, if anomaly detection knows it."""
    node = torch._C._current_autograd_node()
    stack = [] if node is None else node.metadata.get("traceback_", [])
    return "".join(
        [line for line in stack if "site-packages" not in line][-1:] or traceback.format_stack()[-4:-3]
    ).strip()
