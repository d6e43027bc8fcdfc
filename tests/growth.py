"""Growth of a function's time with its input, which unlike seconds is the same on any machine."""

import time
from collections.abc import Callable
from typing import Any

FEW, FACTOR = 12_500, 4
CLOCK_S = 2e-3
"""Error of a measurement."""


def assert_no_worse_than_linear(run: Callable[[Any], object], make: Callable[[int], Any]) -> None:
    """Fail where four times the input takes nearer to sixteen times the CPU time, the square, than to four times.

    Args:
        run: what is measured.
        make: its input, of a given length.
    """
    few, many = (_least_seconds(run, make(size)) for size in (FEW, FACTOR * FEW))
    assert many < FACTOR**1.5 * few + CLOCK_S, f"{FEW} take {few:.4f} s, {FACTOR} times as many {many:.4f} s"


def _least_seconds(run: Callable[[Any], object], given: Any) -> float:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        run(given)
        seconds.append(time.process_time() - start)
    return min(seconds)
