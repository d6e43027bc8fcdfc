"""Which environment a run uses, how many at once, and how long to wait for them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.errors import UserError
from mmrl.fields import bounded, rare
from mmrl.workers.engine import WorkerSpec

SERVICE = Path(__file__).resolve().with_name("env_service.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class EnvironmentConfig:
    """Where episodes run."""

    factory: str = MISSING
    """`module:function` or `path/to/file.py:function`, or a class instead, that makes the environment: a gymnasium.Env,
    or an object with reset(task, seed), step(action) and close(). `gymnasium:make` takes any id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of mmrl.agents.gym_env.GymEnvironment, where the factory makes a gymnasium.Env."""
    workers: int = bounded(2, at_least=1)
    """Environments at once of each training process, each in a process of its own."""
    variables: dict[str, str] = rare(field(default_factory=dict))
    """Environment variables of the processes, on top of this one's."""
    start_timeout_s: float = rare(bounded(180.0, above=0, finite=True))
    """Seconds for imports and construction."""
    reset_timeout_s: float = rare(bounded(120.0, above=0, finite=True))
    """Seconds for starting an episode."""
    step_timeout_s: float = rare(bounded(60.0, above=0, finite=True))
    """Seconds for an action."""
    heartbeat_timeout_s: float = rare(bounded(30.0, above=0, finite=True))
    """Seconds without a heartbeat, which is missed only while code holds the GIL or the process is stopped."""
    memory_mb: float | None = rare(bounded(None, above=0, finite=True))
    """MiB that a process and its children may hold; its episode fails beyond that. Empty = any."""
    reset_retries: int = rare(bounded(2, at_least=0))
    """How often an episode that did not start is tried again, in a fresh process."""
    max_restarts: int = rare(bounded(20, at_least=1))
    """Restarts of a worker that completed no episode after which the run stops."""

    def validate(self) -> None:
        """Check that the options of the environment are JSON; raises UserError."""
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"environment.{name} must be JSON: {error}") from None

    def worker_spec(self) -> WorkerSpec:
        """How a process is started."""
        # One thread each by default: with a process per environment, more threads only wait for each other's cores.
        threads = {name: os.environ.get(name, "1") for name in THREADS}
        return WorkerSpec(
            f"{SERVICE}:make",
            {"factory": self.factory, "kwargs": dict(self.kwargs), "adapter": dict(self.adapter)},
            purpose=f"the environment {self.factory}",
            environment={**threads, **self.variables},
            start_timeout_s=self.start_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            memory_bytes=None if self.memory_mb is None else int(self.memory_mb * (1 << 20)),
        )
