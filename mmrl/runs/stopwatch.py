"""Seconds of a step by stage; any code may open a stage by name."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

STAGES = ("rollout", "score", "old_logp", "ref_logp", "masked_logp", "advantages", "update")
"""Stages that follow one another within a step; every other stage is a part of one of them."""
STAGES_BETWEEN = ("evaluate", "checkpoint")
"""Stages that take place since the step before, not inside the step's seconds."""


class Stopwatch:
    """Adds up seconds by stage.

    On a GPU, whose work is only queued when a call returns, a stage lasts from the end of the work queued before it
    to the end of its own; events in the queue mark both, so that measuring does not synchronise.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have `stopwatch` count into this one."""
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to a stage."""
        start = self._now()
        try:
            yield
        finally:
            self._spans.append((name, start, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by stage since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, start, end in self._spans:
            seconds[name] += end - start if isinstance(start, float) else start.elapsed_time(end) / 1000
        self._spans = []
        return dict(seconds)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


@contextmanager
def stopwatch(name: str) -> Iterator[None]:
    """Add the seconds spent inside to `time/<name>` of the running step; does nothing where no step is running."""
    watch = _RUNNING.get()
    if watch is None:
        yield
        return
    with watch.stage(name):
        yield


_RUNNING: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)
