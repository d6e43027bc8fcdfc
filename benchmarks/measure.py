"""Measurements inside the process of an arm: CPU seconds, wall seconds and peak memory, all by stage."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MEBIBYTE = 2**20
WHOLE = "total"
"""Stage that spans a repetition."""


class PeakMemory:
    """Peak memory in MB while each stage was open, minus the memory at the start.

    Resident memory of the process, or allocated memory of the GPU. Where the system does not let a process reset its
    own peak, the peak of a stage is the largest until its end.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.by_stage: dict[str, float] = {}
        self._read = _CudaMemory() if device == "cuda" else ResidentMemory()
        self.start_mb = 0.0
        """Memory in use at the start."""
        self._open: list[str] = []

    def start(self) -> None:
        """Start counting, after unused memory has been freed."""
        gc.collect()
        self._read.trim()
        self._read.reset()
        self.start_mb = self._read.now_mb()

    def held_mb(self) -> float:
        """Memory in use now, minus the memory at the start."""
        gc.collect()
        self._read.trim()
        return self._read.now_mb() - self.start_mb

    def enter(self, stage: str) -> None:
        """Begin a stage; stages may be nested."""
        self._note()
        self._open.append(stage)

    def leave(self, stage: str) -> None:
        """End a stage."""
        self._note()
        self._open.remove(stage)

    def _note(self) -> None:
        peak = self._read.peak_mb() - self.start_mb
        for stage in self._open:
            self.by_stage[stage] = max(self.by_stage.get(stage, 0.0), peak)
        self._read.reset()


class Stopwatch:
    """Seconds of one repetition by stage; a stage that is entered again adds up.

    Args:
        memory: notified when stages begin and end.
        device: "cpu" or "cuda"; on a GPU wall seconds are those between two CUDA events.
        cpu_clock: seconds of CPU time so far; those of this process when None.
    """

    def __init__(self, memory: PeakMemory, device: str = "cpu", cpu_clock: Callable[[], float] | None = None) -> None:
        self.cpu_s: dict[str, float] = {}
        self.wall_s: dict[str, float] = {}
        self._memory = memory
        self._clock = _CudaClock if device == "cuda" else _WallClock
        self._cpu_clock = cpu_clock or time.process_time

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to a stage."""
        self._memory.enter(name)
        clock = self._clock()
        cpu = self._cpu_clock()
        try:
            yield
        finally:
            wall = clock.stop()
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + self._cpu_clock() - cpu
            self.wall_s[name] = self.wall_s.get(name, 0.0) + wall
            self._memory.leave(name)


class Recorder:
    """Measures the repetitions of an arm; the first one is a warm-up and only counts for memory."""

    def __init__(self, device: str = "cpu", cpu_clock: Callable[[], float] | None = None) -> None:
        self.device = device
        self.memory = PeakMemory(device)
        self._cpu_clock = cpu_clock
        self.watch = Stopwatch(self.memory, device, cpu_clock)
        self._laps: list[Stopwatch] = []
        self._held = 0.0
        self._whole = contextlib.ExitStack()

    def start(self) -> None:
        """Begin the warm-up, after what the repetitions share has been set up."""
        self.memory.start()
        self._begin()

    def lap(self) -> None:
        """End a repetition and begin the next."""
        self._whole.close()
        self._laps.append(self.watch)
        if len(self._laps) == 1:
            self._held = self.memory.held_mb()
        self._begin()

    def result(self) -> dict[str, Any]:
        """Collect the measurements.

        Returns:
            cpu_s and wall_s: median seconds of a repetition by stage, the whole of it as "total"; peak_mb: peak
            memory by stage over what was in use before the warm-up, so gradients and optimiser states count;
            held_mb: what the warm-up left in use, such as optimiser states.
        """
        counted = self._laps[1:]
        return {
            "cpu_s": _medians([watch.cpu_s for watch in counted]),
            "wall_s": _medians([watch.wall_s for watch in counted]),
            "peak_mb": dict(self.memory.by_stage),
            "held_mb": self._held,
        }

    def _begin(self) -> None:
        self.watch = Stopwatch(self.memory, self.device, self._cpu_clock)
        self._whole.enter_context(self.watch.stage(WHOLE))


def repeat(
    body: Callable[[Stopwatch], None],
    repetitions: int,
    device: str = "cpu",
    cpu_clock: Callable[[], float] | None = None,
) -> dict[str, Any]:
    """Run a body once to warm up and then for the timed repetitions.

    Args:
        body: one repetition; it may time stages with the stopwatch that it is given.
        repetitions: repetitions that count, at least 1.
        device: "cpu" or "cuda".
        cpu_clock: as in `Stopwatch`; for work that is done in other processes.

    Returns:
        `Recorder.result`.
    """
    recorder = Recorder(device, cpu_clock)
    recorder.start()
    for _ in range(repetitions + 1):
        body(recorder.watch)
        recorder.lap()
    return recorder.result()


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


class _WallClock:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        return time.perf_counter() - self._started


class _CudaClock:
    def __init__(self) -> None:
        import torch

        torch.cuda.synchronize()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> float:
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1000.0


class ResidentMemory:
    """Resident set of this process as Linux counts it, in MB; NaN on other systems."""

    def now_mb(self) -> float:
        """Resident memory now."""
        return self._status("VmRSS")

    def peak_mb(self) -> float:
        """Peak resident memory since `reset`, or since the process began if the system does not allow a reset."""
        return self._status("VmHWM")

    def reset(self) -> None:
        """Look for a new peak."""
        with contextlib.suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def trim(self) -> None:
        """Give free pages of the heap back."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError, AttributeError):  # another C library than glibc has no such call
                ctypes.CDLL("libc.so.6").malloc_trim(0)

    def _status(self, key: str) -> float:
        try:
            lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        except OSError:  # not Linux
            return float("nan")
        return next((float(line.split()[1]) / 1024 for line in lines if line.startswith(f"{key}:")), float("nan"))


class _CudaMemory:
    """Memory that torch has allocated on the current GPU."""

    def now_mb(self) -> float:
        import torch

        return torch.cuda.memory_allocated() / MEBIBYTE

    def peak_mb(self) -> float:
        import torch

        return torch.cuda.max_memory_allocated() / MEBIBYTE

    def reset(self) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats()

    def trim(self) -> None:
        pass
