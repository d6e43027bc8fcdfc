"""A CUDA graph that is only a recording: the operations of a step with their arguments, repeated on the same memory.

As in a capture, nothing is computed that stays: what the step wrote is put back. What the host knows is not repeated,
so that a length that is counted in Python stays what it was, and a value that is read is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from tests.devices.label import PLAIN_RESULTS, READS


class CaptureError(RuntimeError):
    """A CUDA graph could not capture this."""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory from outside that was written, and what was in it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        if name in READS | PLAIN_RESULTS:
            raise CaptureError(f"{name}: operation not permitted when stream is capturing")
        if func._schema.is_mutable:
            for tensor in given:
                if _memory(tensor) not in self.made and _memory(tensor) not in self.before:
                    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                    self.before[_memory(tensor)] = whole, whole.clone()
        out = func(*args, **kwargs)
        known = {_memory(tensor) for tensor in given}
        results = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        new = [leaf for leaf in results if _memory(leaf) not in known]
        self.made |= {_memory(leaf): leaf for leaf in new}
        if new or func._schema.is_mutable:  # a view shows what is in its memory
            self.steps.append((func, args, kwargs, new))
        return out


def record(function: Callable[[], Tensor], owner: Any) -> tuple[Callable[[], None], Tensor]:
    """In place of `step_graph.record`."""
    recorder = _Recorder()
    try:
        with recorder:
            result = function()
    finally:
        for memory, before in recorder.before.values():
            memory.copy_(before)
    for tensor in recorder.made.values():  # nothing has been computed yet
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))

    def replay() -> None:
        for func, args, kwargs, new in recorder.steps:
            out = func(*args, **kwargs)
            found = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
            for held, value in zip(new, found[-len(new) :] if new else (), strict=True):
                held.copy_(value)

    return replay, result


@contextlib.contextmanager
def recordings(wrapped: Callable[..., Any] = record) -> Iterator[mock.Mock]:
    """Decode with recordings on the CPU; gives the calls of `record`."""
    from mmrl.vlm.engine import reader, step_graph

    calls = mock.Mock(side_effect=wrapped)
    with (
        mock.patch.object(step_graph, "record", calls),
        mock.patch.object(step_graph, "run_aside", lambda function: function()),
        mock.patch.object(reader.ModelReader, "replays", lambda self, policy: self._replays is not False),
    ):
        yield calls
