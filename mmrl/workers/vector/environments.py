"""Settings, time limits and failures of the environments behind `PoolVectorEnv`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded
from mmrl.workers import wire
from mmrl.workers.engine import WorkerFailure, WorkerSpec
from mmrl.workers.loading import names_function
from mmrl.workers.memory import usable_cores
from mmrl.workers.pool import Answer, Request, WorkerPool

SERVICE = Path(__file__).resolve().with_name("vector_service.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class VectorSettings:
    """Distribution of environments over processes, and limits for those that break."""

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
    """Largest memory of a process and its children in MiB; None = any."""
    reset_retries: int = bounded(2, at_least=0)
    """Retries, each in a fresh process, of an episode that did not begin."""
    max_restarts: int = bounded(20, at_least=1)
    """Restarts of a process without a complete episode after which the run stops."""

    def worker_spec(self, purpose: str) -> WorkerSpec:
        """Settings with which a worker is started."""
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


class Environments:
    """Workers that each have some of N environments; arguments as for `PoolVectorEnv`."""

    def __init__(
        self,
        env: str,
        num_envs: int,
        kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
        mode: str,
        settings: VectorSettings,
    ) -> None:
        self.name, self._mode, self._settings = env, mode, settings
        self._factory, self._kwargs = _what_to_make(env, num_envs, kwargs)
        workers = min(settings.workers or usable_cores(), num_envs)
        self.rows = [rows.tolist() for rows in np.array_split(np.arange(num_envs), workers)]
        """Numbers of the environments of each worker."""
        goal, spec = f"episode of {env} that came to its end", settings.worker_spec(f"the environment {env}")
        self.pool = WorkerPool(spec, workers, max_restarts=settings.max_restarts, goal=goal)

    def start(self) -> list[dict[str, Any]]:
        """Start all workers; returns each worker's report of its environments."""
        hello = self.pool.start()
        if isinstance(hello, WorkerFailure):
            raise self.error("did not start", hello)
        return self._ask("describe", {slot: {} for slot in range(len(self.rows))}, self._settings.start_timeout_s)

    def requests(self, kind: str, contents: Mapping[int, Mapping[str, Any]]) -> dict[int, Request]:
        """Requests by worker, each with the setup that a fresh process needs before it can answer."""
        requests = {}
        for slot, content in contents.items():
            rows = self.rows[slot]
            kwargs = [self._kwargs[row] for row in rows]
            make = {"factory": self._factory, "kwargs": kwargs, "first": rows[0], "mode": self._mode}
            try:
                tree, arrays = wire.encode({**content, "make": make})
            except TypeError as error:
                raise UserError(f"options of an environment: {error}") from None
            requests[slot] = Request({"kind": kind, "content": tree}, arrays)
        return requests

    def ask_all(self, kind: str, content: Mapping[str, Any], each: Sequence[Any] | None = None) -> list[Any]:
        """Answers of all environments, in their order; `each` has a value for every environment."""
        contents = {}
        for slot, rows in enumerate(self.rows):
            contents[slot] = {**content, "values": [each[row] for row in rows] if each is not None else []}
        found = self._ask(kind, contents, self._settings.step_timeout_s)
        return [value for part in found for value in part or ()]

    def error(self, what: str, failure: WorkerFailure) -> UserError | RunError:
        """The exception for a failure that ends the run."""
        if failure.for_user:
            return UserError(failure.reason)
        return RunError(f"the environment {self.name} {what}; it {failure.kind}: {failure.reason}\n{failure.evidence}")

    def _ask(self, kind: str, contents: Mapping[int, Mapping[str, Any]], timeout_s: float) -> list[Any]:
        answers = self.pool.ask(self.requests(kind, contents), timeout_s)
        for answer in answers.values():
            if isinstance(answer, WorkerFailure):
                raise self.error("did not start" if kind == "describe" else f"failed at {kind}", answer)
        return [content_of(answer) for answer in answers.values()]


def content_of(answer: Answer) -> Any:
    """A worker's message; None where there is none."""
    if isinstance(answer, WorkerFailure) or not answer.fields:
        return None
    try:
        return wire.decode(answer.fields["content"], answer.arrays)
    except Exception as error:
        raise RunError(f"an environment's worker sent something that cannot be read: {error!r:.200}") from None


def _what_to_make(
    env: str, num_envs: int, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
) -> tuple[str, list[dict[str, Any]]]:
    """A factory, and the arguments with which each environment calls it."""
    each = [dict(kwargs or {})] * num_envs if kwargs is None or isinstance(kwargs, Mapping) else [*map(dict, kwargs)]
    if len(each) != num_envs:
        raise UserError(f"kwargs has {len(each)} entries; expected {num_envs}, one for each environment")
    if names_function(env):
        return env, each
    return "gymnasium:make", [{"id": env, **options} for options in each]
