"""Time limits and failures of the environments behind `PoolVectorEnv`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.fields import bounded
from mmrl.workers.engine import WorkerSpec

SERVICE = Path(__file__).resolve().with_name("service.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class VectorSettings:
    """How environments are spread over processes, and what happens when one breaks."""

    workers: int | None = bounded(None, at_least=1)
    """Processes; as many as there are usable cores when None, at most one an environment. The environments of a process
    step one after the other and break together; a process each is `workers=num_envs`."""
    failed_reward: float = math.nan
    """Reward of the step in which an environment broke. It has none, so this is NaN; a training loop that cannot leave
    such a step out needs a number."""
    python: str | None = None
    """Interpreter of the environments; this one when None."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes on top of this process's."""
    start_timeout_s: float = bounded(180.0, above=0)
    """Seconds for imports and construction."""
    reset_timeout_s: float = bounded(120.0, above=0)
    """Seconds for the reset of the environments of a process."""
    step_timeout_s: float = bounded(120.0, above=0)
    """Seconds for a step of the environments of a process."""
    heartbeat_timeout_s: float = bounded(30.0, above=0)
    """Seconds without a heartbeat, which only code that keeps Python's lock, or a stopped process, leaves out."""
    memory_mb: float | None = bounded(None, above=0)
    """MiB that a process may hold with what it starts; None = any."""
    reset_retries: int = bounded(2, at_least=0)
    """How often an episode that did not begin is tried again in a fresh process."""
    max_restarts: int = bounded(20, at_least=1)
    """Restarts a process without one episode that came to its end, after which the run stops."""

    def worker_spec(self, purpose: str) -> WorkerSpec:
        """Say how a worker is started."""
        # Threads that wait for each other's cores cost more than they bring with a process an environment.
        threads = {name: os.environ.get(name, "1") for name in THREADS}
        return WorkerSpec(
            f"{SERVICE}:make",
            purpose=purpose,
            python=self.python,
            environment={**threads, **self.environment},
            start_timeout_s=self.start_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            memory_bytes=None if self.memory_mb is None else int(self.memory_mb * (1 << 20)),
        )
