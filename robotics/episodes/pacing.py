"""The rate of a control loop on the wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ControlRate:
    """How regularly the control steps of an episode began."""

    hz: float
    """Control steps per second: the number of periods over their total time."""
    jitter_ms: float
    """Standard deviation of the periods in milliseconds."""
    longest_ms: float
    """The longest period in milliseconds."""
    late: int
    """Control steps that took longer than their period, so that the next one began late."""


class Pacer:
    """Starts the control steps of an episode at a fixed rate, the first one at once.

    A step that is a little late does not shift those after it. If it is late by more than half a period, the others
    follow at the rate from there on, because a robot must not catch up with a burst of commands.

    Args:
        hz: control steps per second.
        clock: monotonic time in seconds.
        sleep: waits for the given seconds.
    """

    def __init__(
        self, hz: float, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.hz, self._clock, self._sleep = hz, clock, sleep
        self._starts: list[float] = []
        self._due, self._late = 0.0, 0

    def wait(self) -> None:
        """Wait until the next control step is due; called once before each."""
        now, period = self._clock(), 1.0 / self.hz
        if not self._starts:
            self._due = now
        elif now < self._due:
            self._sleep(self._due - now)
        else:
            self._late += 1
            self._due = now if now - self._due > period / 2 else self._due
        self._starts.append(self._clock())
        self._due += period

    def rate(self) -> ControlRate | None:
        """The rate so far; None with fewer than two control steps."""
        periods = np.diff(self._starts)
        if not len(periods):
            return None
        return ControlRate(
            hz=float(len(periods) / periods.sum()),
            jitter_ms=float(1000 * periods.std()),
            longest_ms=float(1000 * periods.max()),
            late=self._late,
        )
