"""Parallel environments in separate processes, each of which may raise, hang or die without harm to the run.

    with EnvPool(EnvironmentConfig("my_envs.py:Maze", workers=4)) as pool:
        turns = pool.reset({row: AgentTask(f"maze/{row}", {"size": 5}, seed=row) for row in range(4)})
        while pool.live:
            turns = pool.step({row: policy(turns[row].observation) for row in pool.live})

A row is a slot of the pool. An environment that dies, hangs, raises or returns something malformed ends the episode of
its row: the result then has a `failure` and the reward NaN, never 0. A fresh process replaces one that died, hung or
raised while the other episodes go on. An episode that does not start is tried again a few times.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from omegaconf import MISSING

from mmrl.agents.environments.env_service import make
from mmrl.agents.environments.environment import Action, MalformedError, Observation, unpack_outcome
from mmrl.agents.environments.tasks import AgentTask
from mmrl.errors import RunError, UserError
from mmrl.fields import bounded, check_config, rare
from mmrl.workers.engine import FailureLog, WorkerFailure, WorkerSpec, one_line
from mmrl.workers.in_process import InProcessEngine
from mmrl.workers.pool import WorkerPool
from mmrl.workers.slots import Answer, Request
from mmrl.workers.wire import decode, encode

SERVICE = Path(__file__).resolve().with_name("env_service.py")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
OF_PROCESSES = (
    *("variables", "memory_mb", "heartbeat_timeout_s"),
    *("start_timeout_s", "reset_timeout_s", "step_timeout_s"),
)
"""Options that nothing reads where environments run in the training process."""


@dataclass
class EnvironmentConfig:
    """Environment in which episodes run."""

    factory: str = MISSING
    """`module:function` or `path/to/file.py:function`, or a class instead, that makes the environment: a gymnasium.Env,
    or an object with reset(task, seed), step(action) and close(). `gymnasium:make` takes any id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of mmrl.agents.environments.gym.GymEnvironment, where the factory makes a gymnasium.Env."""
    workers: int = bounded(2, at_least=1)
    """Parallel environments of each training process, each in a separate process."""
    isolate: bool = True
    """Whether each environment runs in a separate process. If not, all run in the training process one after another,
    which is faster where an action takes less than a millisecond or they share a browser; limits of time and memory
    do not hold, and one that hangs or ends its process takes the run with it."""
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
    """Retries of an episode that did not start, each in a fresh process."""
    max_restarts: int = rare(bounded(20, at_least=1))
    """Restarts of a worker that completed no episode after which the run stops."""

    def validate(self) -> None:
        """Check that the options of the environment are JSON; raises UserError."""
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"environment.{name} must be JSON: {error}") from None
        if not self.isolate:
            plain = EnvironmentConfig(self.factory)
            for name in OF_PROCESSES:
                if getattr(self, name) != getattr(plain, name):
                    raise UserError(
                        f"environment.{name} is {getattr(self, name)!r}, but it is for processes; leave it out, or set "
                        "environment.isolate: true"
                    )

    def worker_spec(self) -> WorkerSpec:
        """Settings with which a process is started."""
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


@dataclass(frozen=True)
class TurnResult:
    """Result of a reset or step of one row."""

    observation: Observation
    """Empty where the environment failed."""
    reward: float
    """0 after a reset, NaN where the environment failed."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    failure: WorkerFailure | None = None
    """Reason why the episode has no result."""
    seconds: float = field(default=0.0, compare=False)
    """Time that the environment took for the action."""

    @property
    def over(self) -> bool:
        """Whether the episode takes no more actions."""
        return self.terminated or self.truncated or self.failure is not None


class EnvPool:
    """Environments in `config.workers` rows.

    Args:
        config: environment and time limits.
        folder: where tracebacks of failures are written; None for nowhere.

    Raises:
        UserError: an option is out of range, or the environment cannot be made as asked for.
        RunError: it does not start; the message holds its traceback.
    """

    def __init__(self, config: EnvironmentConfig, folder: Path | None = None) -> None:
        check_config(config, "environment")
        self._config, self.factory = config, config.factory
        goal = f"episode of {config.factory} that came to its end"
        engine = None if config.isolate else InProcessEngine(make)
        spec, restarts = config.worker_spec(), config.max_restarts
        self._pool = WorkerPool(spec, config.workers, engine=engine, max_restarts=restarts, goal=goal)
        self.failures = FailureLog(config.factory, folder)
        """Reasons of failures, counted; each is logged once."""
        self._live: set[int] = set()
        self._dropped = self._malformed = 0
        hello = self._pool.start()
        if isinstance(hello, WorkerFailure):
            if hello.for_user:
                raise UserError(hello.reason)
            reason = f"it {hello.kind}: {hello.reason}\n{hello.evidence}"
            raise RunError(f"the environment {config.factory} did not start; {reason}")
        self.actions: Mapping[str, str] = dict(hello.fields.get("actions") or {})
        """Names and descriptions of the environment's actions; empty where it names none."""
        self.tools: list[dict[str, Any]] = list(hello.fields.get("tools") or [])
        """JSON schemas of the environment's tools; empty where it has none."""
        self.formats: list[str] | None = hello.fields.get("formats")
        """Formats that can express its actions; None if it does not say."""
        self.has_expert = bool(hello.fields.get("expert"))
        """Whether the environment has a method `expert`."""

    @property
    def size(self) -> int:
        """Rows: episodes that can run at once."""
        return self._config.workers

    @property
    def live(self) -> list[int]:
        """Rows with a running episode, in order."""
        return sorted(self._live)

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures by kind, restarts, and episodes without a result, since the pool was made."""
        return {**self._pool.counts, "malformed": self._malformed, "dropped": self._dropped}

    def reset(self, tasks: Mapping[int, AgentTask]) -> dict[int, TurnResult]:
        """Start episodes; running ones of these rows are dropped.

        Args:
            tasks: by row, 0 to `size` - 1.

        Returns:
            Results by row; rows without a failure are live.

        Raises:
            UserError: there is no such row, or a task is not plain data.
            RunError: workers restart again and again without completing an episode.
        """
        if self._pool.closed:
            raise RuntimeError("this EnvPool has been closed")
        unknown = [row for row in tasks if not 0 <= row < self.size]
        if unknown:
            raise UserError(f"there are no rows {unknown}; environment.workers is {self.size}, rows are 0 to that - 1")
        requests = {row: _request("reset", {"task": dict(task.task), "seed": task.seed}) for row, task in tasks.items()}
        self._live -= set(tasks)
        config = self._config
        results = self._results(self._pool.ask_with_retries(requests, config.reset_timeout_s, config.reset_retries))
        self._live |= {row for row, result in results.items() if not result.over}
        return results

    def step(self, actions: Mapping[int, Action]) -> dict[int, TurnResult]:
        """Execute an action in some of the live rows, all at the same time.

        Args:
            actions: by row.

        Returns:
            Results by row; rows whose episode is over are no longer live.

        Raises:
            ValueError: a row is not live.
            UserError: an argument of an action is not plain data.
        """
        self._check_live(actions)
        requests = {
            row: _request("step", {"name": action.name, "arguments": dict(action.arguments), "text": action.text})
            for row, action in actions.items()
        }
        results = self._results(self._pool.ask(requests, self._config.step_timeout_s))
        over = {row for row, result in results.items() if result.over}
        self._live -= over
        if any(results[row].failure is None for row in over):
            self._pool.note_success()
        self._pool.start_missing()
        return results

    def ask_expert(self, row: int) -> Action | WorkerFailure:
        """The action, without text, that the environment's own expert takes in a live row; a failure ends its episode.

        Raises:
            ValueError: the row is not live.
            UserError: the environment has no expert.
        """
        self._check_live([row])
        answer = self._pool.ask({row: _request("expert", {})}, self._config.step_timeout_s)[row]
        if not isinstance(answer, WorkerFailure) and "malformed" not in answer.fields:
            move = decode(answer.fields["move"], answer.arrays)
            return Action(move["name"], move["arguments"])
        failure = self._result(answer).failure
        assert failure is not None
        self._live.discard(row)
        self._pool.start_missing()
        return failure

    def stop(self, rows: Collection[int]) -> None:
        """End the episodes of some rows, which have reached a limit of the caller's; this is no failure."""
        stopped = self._live & set(rows)
        self._live -= stopped
        if stopped:
            self._pool.note_success()

    def processes(self) -> list[int]:
        """PIDs of the running workers."""
        return self._pool.processes()

    def memory_mb(self) -> float:
        """Memory in 10^6 bytes of the largest worker with its children."""
        return self._pool.memory_bytes() / 1e6

    def close(self) -> None:
        """End all processes; also done when the interpreter ends."""
        self.failures.summary()
        self.failures.counts.clear()
        self._live = set()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_live(self, rows: Collection[int]) -> None:
        dead = [row for row in rows if row not in self._live]
        if dead:
            raise ValueError(f"rows {dead} have no running episode; reset them first. Live rows: {self.live}")

    def _results(self, answers: Mapping[int, Answer]) -> dict[int, TurnResult]:
        return {row: self._result(answer) for row, answer in answers.items()}

    def _result(self, answer: Answer) -> TurnResult:
        if not isinstance(answer, WorkerFailure):
            try:
                if "malformed" in answer.fields:
                    raise MalformedError(str(answer.fields["malformed"]))
                outcome = unpack_outcome(answer.fields, answer.arrays)
                return TurnResult(
                    outcome.observation,
                    outcome.reward,
                    outcome.terminated,
                    outcome.truncated,
                    outcome.info,
                    seconds=float(answer.fields.get("seconds", 0.0)),
                )
            except MalformedError as error:
                answer = WorkerFailure("malformed", one_line(str(error)))
                self._malformed += 1
        self._dropped += 1
        self.failures.note(answer)
        return TurnResult(Observation(), math.nan, failure=answer)


def _request(kind: str, body: Mapping[str, Any]) -> Request:
    try:
        tree, arrays = encode(dict(body))
    except (TypeError, RecursionError) as error:
        raise UserError(f"{kind} of an environment: {error}") from None
    return Request({"kind": kind, "body": tree}, arrays)
