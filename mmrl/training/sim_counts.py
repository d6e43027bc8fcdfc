"""What a run says of its environments: failures since its beginning, whichever process counted them, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from accelerate import PartialState

from mmrl.training.processes import sum_over_processes
from mmrl.workers.engine import FailureLog


class Counted(Protocol):
    """Environments that count what goes wrong."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures since they were made, by kind."""
        ...


@runtime_checkable
class InProcesses(Protocol):
    """Environments that live in processes of their own."""

    failures: FailureLog
    """What went wrong, with tracebacks."""

    def memory_mb(self) -> float:
        """Memory in 10^6 bytes of the process that holds most now, with what it started."""
        ...


class SimCounts:
    """Counts that survive an interruption; environments themselves count from their start."""

    def __init__(self, sim: Counted, run_dir: Path) -> None:
        self._sim = sim
        self._before: dict[str, int] = {}
        self._latest: dict[str, int] = {}
        if isinstance(sim, InProcesses):
            sim.failures.folder = run_dir / "failures"

    def metrics(self) -> dict[str, float]:
        """Totals over all processes, and the memory of this one's largest worker; every process calls it."""
        self._latest = self._totals(sum_over_processes(self._sim.counts))
        found = {f"sim/{name}": float(count) for name, count in self._latest.items()}
        if isinstance(self._sim, InProcesses):
            found["memory/worker_mb"] = self._sim.memory_mb()
        return found

    def state_dict(self) -> dict[str, int]:
        """Counts for a checkpoint."""
        # Those of an evaluation since the step are known without asking the others in a single process only.
        return self._totals(self._sim.counts) if PartialState().num_processes == 1 else dict(self._latest)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from the counts of a checkpoint."""
        self._before = {name: int(count) for name, count in state.items()}
        self._latest = dict(self._before)

    def _totals(self, counts: Mapping[str, float]) -> dict[str, int]:
        return {name: self._before.get(name, 0) + int(count) for name, count in counts.items()}
