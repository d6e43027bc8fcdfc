"""The step of a token as a CUDA graph, which a GPU replays with one launch instead of a thousand.

Launching the kernels of a step takes several times as long as reading the weights, which bounds the step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmrl.hub.building import first_line

_LAST: dict[torch.device, tuple[weakref.ref[StepGraph], Any]] = {}
"""The latest graph of each device and its owner. The memory is kept for the next graph, so all graphs together take as
much as the largest one."""


class StepGraph:
    """Calls a step whose shapes and memory stay the same; from the second time on, it replays a CUDA graph of it.

    A graph is captured for a batch of rows and ends with it, after a fraction of a second that a few tokens repay. So
    it never outlives the weights, the adapters, or the copies of weights that autocast makes.

    Args:
        wanted: whether to capture a graph; False calls the step every time.
        refused: is told why a capture failed; the step is called every time then.
    """

    def __init__(self, wanted: bool, refused: Callable[[str], None]) -> None:
        self.wanted = wanted
        self._refused = refused
        self._replay: Callable[[], None] | None = None
        self._token = self._states = torch.empty(0)
        self._ready = False

    def forget(self) -> None:
        """Capture again: shapes or memory have changed."""
        self._replay, self._ready = None, False

    def __call__(self, step: Callable[[Tensor], Tensor], token: Tensor) -> Tensor:
        """States (b, H) that a step makes of tokens (b,), or embeddings (b, H)."""
        if not self.wanted:
            return step(token)
        if not self._ready:
            # the first call loads kernels, chooses those of attention, and makes what later steps share
            self._ready = True
            return run_aside(lambda: step(token))
        if self._replay is None:
            self._token = token.clone()
            try:
                self._replay, self._states = record(lambda: step(self._token), self)
            except Exception as error:  # an operation that waits, or memory: each fails in its own way
                self.wanted = False
                self._refused(first_line(error))
                return step(token)
        self._token.copy_(token)
        self._replay()
        return self._states.clone()  # the next replay writes over them


@functools.cache
def _aside(device: torch.device) -> Any:
    """The stream on which graphs are captured: one, since each stream has working memory of its own for products."""
    return torch.cuda.Stream(device)


def run_aside(function: Callable[[], Tensor]) -> Tensor:
    """Result of a function on the stream of captures, in the order of the current stream."""
    current = torch.cuda.current_stream()
    stream = _aside(current.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = function()
    current.wait_stream(stream)
    return result


def record(function: Callable[[], Tensor], owner: StepGraph) -> tuple[Callable[[], None], Tensor]:
    """Capture what a function does; returns a replay function, and the result, which each replay overwrites."""
    device = torch.cuda.current_stream().device
    graph = torch.cuda.CUDAGraph()
    last = _LAST.get(device)
    # two graphs share memory only if the first is never replayed again
    idle = last is not None and ((other := last[0]()) is None or other._replay is None)
    pool = last[1].pool() if last is not None and idle else None

    def capture() -> Tensor:
        # not `torch.cuda.graph`, which waits for the GPU and gives its unused memory back to the driver; other
        # threads may use the GPU meanwhile
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            return function()
        finally:
            graph.capture_end()

    result = run_aside(capture)
    _LAST[device] = (weakref.ref(owner), graph)
    return graph.replay, result
