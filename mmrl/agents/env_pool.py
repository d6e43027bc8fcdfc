"""Several environments at once, each in a process of its own that may raise, hang or die without harm to the run.

    with EnvPool(EnvironmentConfig("my_envs.py:Maze", workers=4)) as pool:
        turns = pool.reset({row: AgentTask(f"maze/{row}", {"size": 5}, seed=row) for row in range(4)})
        while pool.live:
            turns = pool.step({row: policy(turns[row].observation) for row in pool.live})

A row is a place in the pool. An environment that dies, hangs, raises or returns something malformed takes the episode
of its row with it: the result then has a `failure` and the reward NaN, never 0. A fresh process takes the place of a
dead one while the other episodes go on. An episode that does not begin is tried again a few times.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mmrl.agents.actions import Action
from mmrl.agents.env_config import EnvironmentConfig
from mmrl.agents.env_messages import unpack_outcome
from mmrl.agents.environment import MalformedError, Observation, Outcome
from mmrl.agents.tasks import AgentTask
from mmrl.errors import RunError, UserError
from mmrl.fields import check_config
from mmrl.workers.failure_log import FailureLog
from mmrl.workers.failures import WorkerFailure, one_line
from mmrl.workers.pool import WorkerPool
from mmrl.workers.values import decode, encode
from mmrl.workers.worker import Answer, Request


@dataclass(frozen=True)
class TurnResult:
    """What a reset or a step of one row led to."""

    observation: Observation
    """Empty where the environment failed."""
    reward: float
    """0 after a reset, NaN where the environment failed."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    failure: WorkerFailure | None = None
    """Why the episode has no result."""

    @property
    def over(self) -> bool:
        """Whether nothing more can be done in this episode."""
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
        self._config = config
        goal = f"episode of {config.factory} that came to its end"
        spec = config.worker_spec()
        self._pool = WorkerPool(spec, config.workers, max_restarts=config.max_restarts, goal=goal)
        self.failures = FailureLog(config.factory, folder)
        """Reasons of failures, counted; each is logged once."""
        self._live: set[int] = set()
        self._dropped = self._malformed = 0
        hello = self._pool.start()
        if isinstance(hello, WorkerFailure):
            raise _start_error(config.factory, hello)
        self.actions: Mapping[str, str] = dict(hello.fields.get("actions") or {})
        """Names and descriptions of the environment's actions; empty where it does not say."""
        self.has_expert = bool(hello.fields.get("expert"))
        """Whether the environment has a method `expert`."""

    @property
    def size(self) -> int:
        """Rows: episodes that can run at once."""
        return self._config.workers

    @property
    def live(self) -> list[int]:
        """Rows whose episode goes on, in order."""
        return sorted(self._live)

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures by kind, restarts, and episodes without a result, since the pool was made."""
        return {**self._pool.counts, "malformed": self._malformed, "dropped": self._dropped}

    def reset(self, tasks: Mapping[int, AgentTask]) -> dict[int, TurnResult]:
        """Begin episodes; what was going on in these rows is dropped.

        Args:
            tasks: by row, 0 to `size` - 1.

        Returns:
            Results by row; where there is no failure the row is live.

        Raises:
            UserError: there is no such row, or a task is no plain data.
            RunError: no episode comes to its end any more, there are only restarts.
        """
        self._check_rows(tasks)
        requests = {row: _request("reset", {"task": dict(task.task), "seed": task.seed}) for row, task in tasks.items()}
        self._live -= set(tasks)
        config = self._config
        answers = self._pool.ask_with_retries(requests, config.reset_timeout_s, config.reset_retries)
        results = self._read(answers)
        self._live |= {row for row, result in results.items() if not result.over}
        return results

    def step(self, actions: Mapping[int, Action]) -> dict[int, TurnResult]:
        """Execute an action in some of the live rows, all at the same time.

        Args:
            actions: by row.

        Returns:
            Results by row; rows whose episode is over are not live any more.

        Raises:
            ValueError: a row is not live.
            UserError: an argument of an action is no plain data.
        """
        self._check_live(actions)
        requests = {
            row: _request("step", {"name": action.name, "arguments": dict(action.arguments), "text": action.text})
            for row, action in actions.items()
        }
        results = self._read(self._pool.ask(requests, self._config.step_timeout_s))
        over = {row for row, result in results.items() if result.over}
        self._live -= over
        if any(results[row].failure is None for row in over):
            self._pool.note_success()
        self._pool.start_missing()
        return results

    def ask_expert(self, row: int) -> Action | WorkerFailure:
        """What the environment's own expert would do now.

        Args:
            row: a live row.

        Returns:
            The action, without text; or why there is none, and then the row's episode is over.

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
        """Give up the episodes of some rows, which have reached a limit of the caller's; this is no failure."""
        given_up = self._live & set(rows)
        self._live -= given_up
        if given_up:
            self._pool.note_success()

    def processes(self) -> list[int]:
        """Numbers of the processes that run now."""
        return self._pool.processes()

    def memory_mb(self) -> float:
        """Memory in 10^6 bytes of the process that holds most now, with what it started."""
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

    def _check_rows(self, tasks: Mapping[int, AgentTask]) -> None:
        if self._pool.closed:
            raise RuntimeError("this EnvPool has been closed")
        unknown = [row for row in tasks if not 0 <= row < self.size]
        if unknown:
            raise UserError(f"there are no rows {unknown}; environment.workers is {self.size}, rows are 0 to that - 1")

    def _check_live(self, rows: Collection[int]) -> None:
        dead = [row for row in rows if row not in self._live]
        if dead:
            raise ValueError(f"rows {dead} have no episode going on; reset them first. Live rows: {self.live}")

    def _read(self, answers: Mapping[int, Answer]) -> dict[int, TurnResult]:
        return {row: self._result(answer) for row, answer in answers.items()}

    def _result(self, answer: Answer) -> TurnResult:
        if not isinstance(answer, WorkerFailure):
            found = _outcome(answer.fields, answer.arrays)
            if isinstance(found, Outcome):
                return TurnResult(found.observation, found.reward, found.terminated, found.truncated, found.info)
            answer = found
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


def _outcome(fields: Mapping[str, Any], arrays: Mapping[str, Any]) -> Outcome | WorkerFailure:
    if "malformed" in fields:
        return WorkerFailure("malformed", one_line(str(fields["malformed"])))
    try:
        return unpack_outcome(fields, arrays)
    except MalformedError as error:
        return WorkerFailure("malformed", one_line(str(error)))


def _start_error(factory: str, failure: WorkerFailure) -> UserError | RunError:
    if failure.for_user:
        return UserError(failure.reason)
    return RunError(f"the environment {factory} did not start; it {failure.kind}: {failure.reason}\n{failure.evidence}")
