"""Parallel environments in separate processes; each may raise, hang or crash without affecting the run.

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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.agents.environments.agent_tasks import AgentTask
from mmrl.agents.environments.environment import Action, MalformedError, Observation, unpack_outcome
from mmrl.agents.environments.environment_service import make
from mmrl.agents.environments.separate_python import environment_python
from mmrl.errors import UserError
from mmrl.fields import bounded, check_config, only_with, rare
from mmrl.workers.engine import InProcessEngine, WorkerFailure, one_line
from mmrl.workers.row_pool import RowLimits, RowPool
from mmrl.workers.wire import Message, decode, encode
from mmrl.workers.worker import Request

SERVICE = Path(__file__).resolve().with_name("environment_service.py")
FOREIGN_SERVICE = Path(__file__).resolve().with_name("foreign_service.py")
"""The same service for another interpreter, which lacks this package."""


@dataclass
class EnvironmentConfig:
    """Environment in which episodes run."""

    factory: str = MISSING
    """Function (`module:function` or `path/to/file.py:function`) or class that creates the environment: a
    gymnasium.Env, or an object with reset(task, seed), step(action) and close(). `gymnasium:make` takes any id. Or an
    agent program: a function of (task, endpoint) that calls the model over HTTP and returns the reward."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory or the program."""
    adapter: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of mmrl.agents.environments.gym.GymEnvironment, if the factory creates a gymnasium.Env."""
    workers: int = bounded(2, at_least=1)
    """Number of parallel environments per training process, each in its own process."""
    isolate: bool = True
    """Whether each environment runs in its own process. Otherwise all run in the training process, one after another.
    That is faster if an action takes less than a millisecond or if environments share a browser. Time and memory limits
    then do not apply, and an environment that hangs or exits takes the run with it."""
    python: str | None = rare(only_with(None, isolate=True))
    """Python in which the environments run, for packages that conflict with the ones here: the path of an interpreter
    of version 3.11 or newer with numpy, or the name of an environment that `mmrl setup` made, such as browsergym.
    Default: the current interpreter."""
    variables: dict[str, str] = rare(only_with(field(default_factory=dict), isolate=True))
    """Environment variables to set in the environment processes, in addition to the inherited ones."""
    start_timeout_s: float = rare(only_with(bounded(180.0, above=0), isolate=True))
    """Time limit in seconds for imports and construction."""
    reset_timeout_s: float = rare(only_with(bounded(120.0, above=0), isolate=True))
    """Time limit in seconds for starting an episode."""
    step_timeout_s: float = rare(only_with(bounded(60.0, above=0), isolate=True))
    """Time limit in seconds for an action."""
    memory_mb: float | None = rare(only_with(bounded(None, above=0), isolate=True))
    """Memory limit in MiB for an environment process and its children; beyond it, the episode fails. Default: no
    limit."""

    def validate(self) -> None:
        """Check that the options of the environment are JSON; raises UserError."""
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"environment.{name} must be JSON: {error}") from None

    def limits(self) -> RowLimits:
        """The options of the processes."""
        return RowLimits(
            python=None if self.python is None else environment_python(self.python),
            environment=self.variables,
            start_timeout_s=self.start_timeout_s,
            reset_timeout_s=self.reset_timeout_s,
            memory_mb=self.memory_mb,
        )


@dataclass(frozen=True)
class TurnResult:
    """Result of a reset or step of one row."""

    observation: Observation
    """Empty if the environment failed."""
    reward: float
    """0 after a reset, NaN if the environment failed."""
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    failure: WorkerFailure | None = None
    """Reason why the episode has no result."""
    seconds: float = field(default=0.0, compare=False)
    """Seconds that the environment took to execute the action."""

    @property
    def over(self) -> bool:
        """Whether the episode accepts no more actions."""
        return self.terminated or self.truncated or self.failure is not None


class EnvPool(RowPool["TurnResult | Action"]):
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
        # Without processes one service after the other answers in this one, with the same messages.
        limits, engine = config.limits(), None if config.isolate else InProcessEngine(make)
        options = {"factory": config.factory, "kwargs": dict(config.kwargs), "adapter": dict(config.adapter)}
        service = SERVICE if limits.python is None else FOREIGN_SERVICE
        spec = limits.worker_spec(service, f"the environment {config.factory}", options)
        kinds = ("malformed", "dropped")
        super().__init__(
            config.factory, spec, config.workers, limits, config.step_timeout_s, engine=engine, kinds=kinds
        )
        self.failures.folder = folder
        hello = self.start().fields
        self.actions: Mapping[str, str] = hello["actions"]
        """Names and descriptions of the environment's actions; empty if it declares none."""
        self.tools: list[dict[str, Any]] = hello["tools"]
        """JSON schemas of the environment's tools; empty if it has none."""
        self.formats: list[str] | None = hello.get("formats")
        """Formats that can express its actions; None if it does not declare any."""
        self.chat: bool = hello["chat"]
        """Whether it runs an agent program, whose requests are the observations."""
        if self.chat and not config.isolate:
            self.close()
            raise UserError(f"{config.factory} is an agent program; it needs processes (environment.isolate: true)")
        self.has_expert: bool = hello["expert"]
        """Whether the environment has a method `expert`."""
        self.show_images = True
        """Whether the model can see images; environments with an attribute of this name are told at each reset."""
        self._busy: dict[int, Action | AgentTask] = {}
        """The action that each busy row executes, or the task that it starts, by row number."""

    @property
    def live(self) -> list[int]:
        """Rows with a running episode, in order."""
        return sorted(self._live)

    def reset(self, tasks: Mapping[int, AgentTask]) -> dict[int, TurnResult]:
        """Start episodes; episodes still running in these rows are dropped.

        Args:
            tasks: by row, 0 to `size` - 1.

        Returns:
            Results by row; rows without a failure are live.

        Raises:
            UserError: there is no such row, or a task is not plain data.
            RunError: workers restart again and again without completing an episode.
        """
        return self._ask_all(tasks)

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
        # Sent together: a turn of the pool takes as long as its slowest environment.
        return self._ask_all(actions)

    def submit(self, row: int, asked: Action | AgentTask) -> None:
        """Execute an action in a live row, or start an episode in any row, without waiting for it; see `poll`.

        A task drops what the row was doing.

        Raises:
            ValueError: an action's row is not live, or still executes another one.
            UserError: there is no such row, or task or arguments are not plain data.
            RunError: workers restart again and again without completing an episode.
        """
        self._submit_all({row: asked})

    def poll(self, timeout_s: float = math.inf) -> dict[int, TurnResult]:
        """Results of submitted actions and tasks, each as `step` and `reset` return it.

        Args:
            timeout_s: seconds to wait for the next result if there is none; 0 only looks.

        Returns:
            Results by row; none if the time is up, or if nothing is submitted. Rows without a failure are live unless
            their episode is over.
        """
        results = {row: _turn(reply) for row, reply in self.poll_rows(timeout_s).items()}
        if acted := [row for row in results if isinstance(self._busy.pop(row), Action)]:
            # an ended row frees its process, and lost processes start while the policy answers
            self.settle([row for row in acted if results[row].over])
            self.start_missing()
        return results

    def ask_expert(self, row: int) -> Action | WorkerFailure:
        """The action, without text, that the environment's expert takes in a live row; a failure ends its episode.

        Raises:
            ValueError: the row is not live.
            UserError: the environment has no expert.
        """
        self._check_live([row])
        reply = self.ask({row: _request("expert", {})})[row]
        if isinstance(reply, WorkerFailure):
            self.settle([row])
            self.start_missing()
            return reply
        assert isinstance(reply, Action)
        return reply

    def stop(self, rows: Collection[int]) -> None:
        """End the episodes of some rows because they reached a limit of the caller; this is not a failure.

        Results of what these rows are still executing are dropped.
        """
        for row in self._busy.keys() & set(rows):
            self.forget(row)
            del self._busy[row]
        # rows that have already ended are not settled twice
        self.settle(self._live & set(rows))

    def _submit_all(self, asked: Mapping[int, Action | AgentTask]) -> None:
        self.check_open()
        actions = [row for row, what in asked.items() if isinstance(what, Action)]
        self._check_rows([row for row in asked if row not in actions])
        self._check_live(actions)
        if busy := sorted(self._busy.keys() & set(actions)):
            raise ValueError(f"rows {busy} still execute an action; poll() returns its result")
        # all requests first: nothing is sent if one of them cannot be
        requests = {row: self._request_for(what) for row, what in asked.items()}
        for row, request in requests.items():
            self.submit_request(row, request) if row in actions else self.submit_start(row, request)
            self._busy[row] = asked[row]

    def _ask_all(self, asked: Mapping[int, Action | AgentTask]) -> dict[int, TurnResult]:
        """Submit, and wait for all results."""
        # their results would come in between
        if others := sorted(self._busy.keys() - asked.keys()):
            raise ValueError(f"rows {others} still execute an action or a task; poll() returns its result")
        self._submit_all(asked)
        results = dict[int, TurnResult]()
        while len(results) < len(asked):
            results |= self.poll()
        return {row: results[row] for row in asked}

    def _request_for(self, asked: Action | AgentTask) -> Request:
        if isinstance(asked, Action):
            return _request("step", {"name": asked.name, "arguments": dict(asked.arguments), "text": asked.text})
        return _request("reset", {"task": dict(asked.task), "seed": asked.seed, "show_images": self.show_images})

    def _read(self, answer: Message) -> TurnResult | Action | WorkerFailure:
        fields, arrays = answer.fields, answer.arrays
        try:
            # The worker has looked for the same faults, but it runs the user's code, which may have taken it over.
            if "malformed" in fields:
                raise MalformedError(str(fields["malformed"]))
            if "move" in fields:
                move = decode(fields["move"], arrays)
                return Action(move["name"], move["arguments"])
            outcome = unpack_outcome(fields, arrays)
        except MalformedError as error:
            return WorkerFailure("malformed", one_line(str(error)))
        flags = (outcome.terminated, outcome.truncated)
        seconds = float(fields.get("seconds", 0.0))
        return TurnResult(outcome.observation, outcome.reward, *flags, outcome.info, seconds=seconds)

    def _check_rows(self, rows: Collection[int]) -> None:
        if unknown := [row for row in rows if not 0 <= row < self.size]:
            raise UserError(
                f"there are no rows {unknown}; environment.workers is {self.size}, so rows range from 0 to workers - 1"
            )

    def _check_live(self, rows: Collection[int]) -> None:
        dead = [row for row in rows if row not in self._live]
        if dead:
            raise ValueError(f"rows {dead} have no running episode; call reset() on them first. Live rows: {self.live}")


def _turn(reply: TurnResult | Action | WorkerFailure) -> TurnResult:
    if isinstance(reply, WorkerFailure):
        # NaN, so that a failure cannot pass for a reward of 0
        return TurnResult(Observation(), math.nan, failure=reply)
    assert isinstance(reply, TurnResult)
    return reply


def _request(kind: str, body: Mapping[str, Any]) -> Request:
    # Encode even without worker processes, so that a task that works in one mode works in the other.
    try:
        tree, arrays = encode(dict(body))
    except (TypeError, RecursionError) as error:
        raise UserError(f"{kind} of an environment: {error}") from None
    return Request({"kind": kind, "body": tree}, arrays)
