"""Reward functions in worker processes, so that failures only affect their own rows."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.calling import FAILURE_KINDS, Batch, RewardFailure, RewardOutcome, Signature
from mmrl.workers.engine import WorkerFailure, WorkerSpec
from mmrl.workers.memory import machine_bytes, usable_cores
from mmrl.workers.pool import WorkerPool
from mmrl.workers.sandbox import Limits, require_strict
from mmrl.workers.wire import Message, encode
from mmrl.workers.worker import Answer, Preparation, Request

SERVICE = Path(__file__).resolve().with_name("reward_service.py")
LOAD_SECONDS = 120.0
MESSAGE_CHARS, TRACE_CHARS = 500, 4000
STRICT_MEMORY_MB, STRICT_CPU_SECONDS = 4096.0, 600.0
REPLY_BYTES = 64 << 20
"""Maximum size of a worker's reply (numbers and reasons) in bytes."""


def default_workers() -> int:
    """Return the maximum number of workers: half of the usable cores, 1 to 8."""
    # half: the other half is the training process's own
    return min(8, max(1, usable_cores() // 2))


class RewardWorkers:
    """Calls reward functions in worker processes, which are started on first use and reused between calls."""

    def __init__(self, size: int | None = None, memory_mb: float | None = None, strict: str = "") -> None:
        spec = WorkerSpec(
            f"{SERVICE}:make",
            purpose="rewards",
            # one thread each, since there is a worker a core
            environment={"OMP_NUM_THREADS": "1"},
            start_timeout_s=LOAD_SECONDS,
            heartbeat_timeout_s=None,  # timeout_s bounds each call, and C code may keep Python's lock as long
            capture_output=bool(strict),  # a terminal is no place for what a model's code prints
            closing_s=0.0,
            memory_bytes=_memory_bytes(memory_mb),
            max_reply_bytes=REPLY_BYTES,
        )
        self.strict = bool(strict)
        if strict:
            spec = _strictly(spec, memory_mb, strict)
        self.size = size or default_workers()
        self._pool = WorkerPool(spec, self.size)

    def load(self, function: str, what: str) -> Signature:
        """Import a function in a worker."""
        answer = self._pool.prepare(_loading(function, what))
        if isinstance(answer, WorkerFailure):
            raise UserError(f"{what}: {function} cannot be loaded: {_failure(answer).message}")
        try:
            return _signature(answer.fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{what}: {function}: invalid reply from the worker: {error!r}") from None

    def call_together(
        self, function: str, options: Mapping[str, Any], batch: Batch, limit_s: float
    ) -> list[RewardOutcome] | RewardFailure:
        """Call a function once with all rows."""

        def make_request(_: int) -> Request:
            return _request(function, options, batch)

        (answer,) = self._pool.map(make_request, 1, limit_s, preparation=_loading(function))
        # of all rows together, so the cause is one of the values
        if isinstance(answer, WorkerFailure) and answer.stage == "send":
            return RewardFailure("raised", f"the rows cannot be sent to a worker: {answer.reason}")
        return _outcomes(answer, function, len(batch))

    def call_rows(
        self, function: str, options: Mapping[str, Any], batch: Batch, limit_s: float, total_s: float
    ) -> list[RewardOutcome]:
        """Call a function row by row on all workers; a row that hangs or crashes fails alone."""

        # made when it is sent: all rows at once may not fit in memory
        def make_request(row: int) -> Request:
            return _request(function, options, batch.select([row]))

        answers = self._pool.map(make_request, len(batch), limit_s, total_s=total_s, preparation=_loading(function))
        outcomes: list[RewardOutcome] = []
        for answer in answers:
            found = _outcomes(answer, function, 1)
            outcomes += [found] if isinstance(found, RewardFailure) else found
        return outcomes

    def close(self) -> None:
        """Stop all workers; a later call starts new ones."""
        self._pool.close()


def _loading(function: str, what: str = "reward") -> Preparation:
    return Preparation(function, Request({"kind": "load", "function": function, "what": what}), LOAD_SECONDS)


def _request(function: str, options: Mapping[str, Any], batch: Batch) -> Request:
    # encoded as plain data: nothing is pickled for a worker
    state = None if batch.state is None else asdict(batch.state)
    tree, arrays = encode([batch.prompts, batch.completions, batch.columns, dict(options), state])
    return Request({"kind": "call", "function": function, "arguments": tree}, arrays)


def _outcomes(answer: Answer, function: str, rows: int) -> list[RewardOutcome] | RewardFailure:
    """Read an untrusted answer: anything but numbers, None and failures counts as a failure."""
    if not isinstance(answer, Message):
        return _failure(answer, function)
    # A strict worker runs code that a model wrote, which may have taken it over: although `calling.call` in the worker
    # sends nothing else, this is the check that counts.
    try:
        if "failure" in answer.fields:
            return _reported(answer.fields["failure"])
        found = [_reported(each) if isinstance(each, dict) else each for each in answer.fields["outcomes"]]
    except (KeyError, TypeError, ValueError) as error:
        return RewardFailure("crashed", f"invalid reply from the worker: {error!r}"[:MESSAGE_CHARS])
    # bool is an int, and NaN would silently unscore the row
    sound = all(each is None or isinstance(each, RewardFailure) or _is_finite(each) for each in found)
    if len(found) != rows or not sound:
        return RewardFailure("crashed", f"invalid reply from the worker: {answer.fields!r:.200}")
    return found


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _reported(fields: Mapping[str, Any]) -> RewardFailure:
    """A failure that a worker reports; raises an error if the message is not one."""
    kind, message = fields["kind"], fields["message"]
    if not isinstance(kind, str) or kind not in FAILURE_KINDS or not isinstance(message, str):
        raise ValueError(f"{kind!r:.80} is not a kind of failure")
    # printable only: a traceback goes to a terminal
    trace = "".join(x for x in str(fields.get("trace", ""))[:TRACE_CHARS] if x.isprintable() or x == "\n")
    return RewardFailure(kind, message[:MESSAGE_CHARS], trace)


def _signature(fields: Mapping[str, Any]) -> Signature:
    names = {name: tuple(map(str, fields[name])) for name in ("required", "optional", "refused", "unfilled")}
    return Signature(takes_all=bool(fields["takes_all"]), **names)


def _strictly(spec: WorkerSpec, memory_mb: float | None, function: str) -> WorkerSpec:
    """The same workers in a sandbox, which can read the function's file and its folder."""
    require_strict()
    place = function.rpartition(":")[0]
    # a module's functions are found from the working directory
    folder = Path(place).expanduser().resolve().parent if place.endswith(".py") else Path.cwd()
    paths = os.pathsep.join([*map(os.path.abspath, sys.path), str(folder)])
    limits = Limits(memory_mb=memory_mb or STRICT_MEMORY_MB, cpu_s=STRICT_CPU_SECONDS)
    return replace(
        spec,
        strict=limits,
        readable=(str(folder),) if place else (),
        memory_bytes=int(limits.memory_mb * (1 << 20)),
        environment={**spec.environment, "PYTHONPATH": paths},
    )


def _memory_bytes(memory_mb: float | None) -> int | None:
    if memory_mb is not None:
        return int(memory_mb * (1 << 20))
    machine = machine_bytes()
    # half of the machine: what the training process holds has to fit too
    return None if machine is None else machine // 2


def _failure(failure: WorkerFailure, function: str = "") -> RewardFailure:
    """Translate a worker's failure into a reward's failure."""
    if failure.stage == "total":
        return RewardFailure("timeout", "not finished: all rows together took longer than batch_timeout_s")
    if failure.stage == "send":
        return RewardFailure("raised", f"the row cannot be sent to a worker: {failure.reason}")
    if failure.for_user:  # it could be loaded before, so the machine is to blame
        return RewardFailure("crashed", failure.reason)
    kind, message = "crashed", f"invalid reply from the worker: {failure.reason}"
    if failure.kind == "hung":
        kind, message = "timeout", f"no result after {failure.limit_s:g} s; the worker was stopped"
    elif failure.kind == "raised":
        kind, message = "raised", failure.reason
    elif failure.kind == "memory":
        kind, message = "memory", f"{failure.reason} (memory_mb); the worker was stopped"
    elif failure.kind == "limit":
        kind, message = "limit", f"{failure.reason} (sandbox: strict); the worker was stopped"
    elif failure.exit_code is not None and failure.exit_code < 0:
        message = f"the worker was ended by signal {signal.Signals(-failure.exit_code).name}"
    elif failure.exit_code is not None:
        message = f"the worker ended with exit code {failure.exit_code}"
    if function and failure.stage in ("start", "prepare"):
        return RewardFailure("crashed", f"reward: {function} cannot be loaded: {message}")
    return RewardFailure(kind, message)
