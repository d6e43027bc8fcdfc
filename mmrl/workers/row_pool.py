"""Rows of environments in worker processes: each runs one episode at a time and may fail without harm to the others.

A domain gives how its workers are started, the requests, and what it makes of the replies. Assigning rows to processes,
replacing those that died, trying again, and counting are here, once for agents, robots and Gymnasium's vector
interface.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from mmrl.errors import RunError, UserError
from mmrl.fields import bounded
from mmrl.workers.engine import WORKER_FAILURES, Engine, WorkerFailure, WorkerSpec
from mmrl.workers.pool import WorkerPool
from mmrl.workers.wire import Message
from mmrl.workers.worker import Request

LOGGER = logging.getLogger(__name__)
Reply = TypeVar("Reply")
MAX_FILES = 100
"""Maximum number of tracebacks kept per run; further reasons are still counted and logged."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """How environment processes are started, and limits for environments that break."""

    python: str | None = None
    """Interpreter of the environments; None uses this one, with its module paths."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes in addition to those of this process."""
    start_timeout_s: float = bounded(180.0, above=0)
    """Time limit in seconds for imports and construction."""
    reset_timeout_s: float = bounded(120.0, above=0)
    """Time limit in seconds for beginning an episode, which may load another scene."""
    heartbeat_timeout_s: float = bounded(30.0, above=0)
    """Maximum seconds without a heartbeat; heartbeats are only missed if code holds the GIL or the process is
    stopped."""
    memory_mb: float | None = bounded(None, above=0)
    """Memory limit in MiB for a process and its children while it works; if it is exceeded, the episode fails and a
    fresh process takes over. null disables it."""
    reset_retries: int = bounded(2, at_least=0)
    """Number of additional attempts to begin an episode, each in a fresh process."""
    max_restarts: int = bounded(20, at_least=1)
    """Number of restarts of a process without a completed episode in between after which the run stops."""

    def worker_spec(
        self, service: Path, purpose: str, options: Mapping[str, Any], variables: Mapping[str, str] | None = None
    ) -> WorkerSpec:
        """Settings for starting a worker from the function `make` of a service's file.

        Args:
            service: the file.
            purpose: for error messages.
            options: keyword arguments of `make`.
            variables: environment variables that `environment` may change.
        """
        # One thread each by default: with a process per environment, more threads only wait for each other's cores.
        threads = {name: os.environ.get(name, "1") for name in THREADS}
        return WorkerSpec(
            f"{service}:make",
            options,
            purpose=purpose,
            python=self.python,
            # The later ones win: the user's variables over the domain's, and those over the defaults.
            environment={**threads, **(variables or {}), **self.environment},
            start_timeout_s=self.start_timeout_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            memory_bytes=None if self.memory_mb is None else int(self.memory_mb * (1 << 20)),
        )


class FailureLog:
    """Counts of failures by reason; reasons that only differ in numbers are counted together."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name = name
        self.folder = folder
        self.counts: Counter[str] = Counter()
        """Number of failures by reason."""

    def note(self, failure: WorkerFailure) -> None:
        """Count a failure; log the first, 10th, 100th, ... time that its reason occurs."""
        # Reasons that differ in a number (a port, a step) are one, or every failure would be new.
        reason = re.sub(r"\d+", "#", f"{failure.kind}: {failure.reason}")
        self.counts[reason] += 1
        count = self.counts[reason]
        # 10th, 100th, ...: a run of days with a flaky environment must not fill its log.
        if count == 1:
            kept = self._write(reason, failure)
            after = "; it is replaced by a fresh process" if failure.kind in WORKER_FAILURES else ""
            after += f"; its output is in {kept}" if kept is not None else ""
            LOGGER.warning("the environment %s %s: %s%s", self.name, failure.kind, failure.reason, after)
        elif re.fullmatch("10+", str(count)):
            LOGGER.warning("environment %s: %d times so far: %s", self.name, count, reason)

    def summary(self) -> None:
        """Log how often each reason occurred, if more than once."""
        for reason, count in self.counts.most_common():
            if count > 1:
                LOGGER.warning("environment %s: %d times in total: %s", self.name, count, reason)

    def _write(self, reason: str, failure: WorkerFailure) -> Path | None:
        # A file for each of the first reasons; a run that fails in ever new ways must not fill the disk.
        if self.folder is None or len(self.counts) > MAX_FILES:
            return None
        # By the reason, so that another process of the run writes the same file.
        digest = hashlib.sha256(reason.encode()).hexdigest()[:8]
        path = self.folder / f"environment-{failure.kind}-{digest}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{self.name} {failure.kind}: {failure.reason}\n\n{failure.evidence}\n", errors="replace")
        except OSError as error:
            LOGGER.warning("the environment's traceback could not be written to %s: %s", path, error)
            return None
        return path


class RowPool(Generic[Reply]):
    """Environments in worker processes; each row has its own process and one episode at a time.

    Args:
        name: of the environment, for messages.
        spec: how a worker is started.
        rows: number of processes.
        limits: time for beginning an episode, retries and restarts.
        step_timeout_s: seconds for any other request.
        engine: starts the workers; processes of this machine when None.
        kinds: other counts than failures of workers: `dropped` (episodes without a result), and kinds of `_read`.
    """

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        rows: int,
        limits: RowLimits,
        step_timeout_s: float,
        *,
        engine: Engine | None = None,
        kinds: Sequence[str] = (),
    ) -> None:
        self.factory = name
        self.size = rows
        self.failures = FailureLog(name)
        """Reasons of failures; tracebacks are written once its `folder` is set."""
        self._limits = limits
        self._step_timeout_s = step_timeout_s
        # The pool counts restarts in a row, and an episode that ends forgives them.
        goal = f"completed episode of {name}"
        self._pool = WorkerPool(spec, rows, engine=engine, max_restarts=limits.max_restarts, goal=goal)
        self._counts = dict.fromkeys(kinds, 0)
        self._live: set[int] = set()
        # By row and not by process: a row that failed stays failed while its fresh process serves others.
        self.broken: dict[int, WorkerFailure] = {}
        """Rows that have failed since they began, with the reason."""
        self._slots = list(range(rows))
        # What each process has loaded, by slot.
        self._scenes: list[str | None] = [None] * rows
        self._beginning: dict[int, tuple[Request, int]] = {}
        """Submitted starts by row, with the attempts that are left."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures of workers by kind, restarts, and the pool's own kinds, since the pool was created."""
        return {**self._pool.counts, **self._counts}

    def start(self) -> Message:
        """Start all workers; returns the first worker's description of its environment, or raises `error`."""
        hello = self._pool.start()
        if isinstance(hello, WorkerFailure):
            raise self.error("did not start", hello)
        return hello

    def error(self, what: str, failure: WorkerFailure) -> UserError | RunError:
        """The exception for a failure that ends the run."""
        # What the user asked for, in the user's words and without a traceback.
        if failure.for_user:
            return UserError(failure.reason)
        evidence = f"{failure.kind}: {failure.reason}\n{failure.evidence}"
        return RunError(f"the environment {self.factory} {what}; it {evidence}")

    def begin(
        self, requests: Mapping[int, Request], *, scenes: Sequence[str] = (), retries: int | None = None
    ) -> dict[int, Reply | WorkerFailure]:
        """Start episodes and drop running ones of these rows; failed starts are retried in a fresh process.

        Args:
            requests: by row; rows that begin are live.
            scenes: what each of the rows 0, 1, ... loads, which goes to a process that has loaded it before, if any.
            retries: instead of those of the limits.

        Returns:
            Answers by row.

        Raises:
            UserError: the environment refuses a request.
            RunError: workers restart again and again without completing an episode.
        """
        # Before anything is sent: if something fails from here on, the old episodes are gone all the same.
        self._live -= set(requests)
        if scenes:
            self._slots = self._assign(scenes)
        for row in requests:
            # A row that begins again is no longer broken.
            self.broken.pop(row, None)
        answers = self._pool.ask_with_retries(
            {self._slots[row]: request for row, request in requests.items()},
            self._limits.reset_timeout_s,
            self._limits.reset_retries if retries is None else retries,
            check=self._misshapen,
        )
        # For `_judge`, which counts a row that does not begin as dropped.
        self._live |= set(requests)
        judged = self._judge({row: answers[self._slots[row]] for row in requests})
        self._live -= set(self.broken)
        return judged

    def ask(self, requests: Mapping[int, Request], timeout_s: float | None = None) -> dict[int, Reply | WorkerFailure]:
        """Send one request to each of some rows at the same time; returns replies by row.

        A row that has failed is not asked, since its process, which is a fresh one by now, knows nothing of its
        episode: its answer is the failure.
        """
        # Not asked: its fresh process would answer about an episode that it has never begun.
        slots = {row: self._slots[row] for row in requests if row not in self.broken}
        answers = self._pool.ask(
            {slot: requests[row] for row, slot in slots.items()},
            timeout_s or self._step_timeout_s,
            check=self._misshapen,
        )
        judged = self._judge({row: answers[slot] for row, slot in slots.items()})
        return {row: judged[row] if row in slots else self.broken[row] for row in requests}

    def submit_start(self, row: int, request: Request) -> None:
        """Start an episode like `begin`, without waiting; `poll_rows` returns the answer once no attempt is left.

        Raises:
            RunError: workers restart again and again without completing an episode.
        """
        self._live.discard(row)
        self.broken.pop(row, None)
        self._try(row, request, self._limits.reset_retries)

    def submit_request(self, row: int, request: Request) -> None:
        """Send a request to a row that has not failed, without waiting."""
        self._pool.submit(self._slots[row], request, self._step_timeout_s, check=self._misshapen)

    def poll_rows(self, timeout_s: float = math.inf) -> dict[int, Reply | WorkerFailure]:
        """Replies to submitted requests by row: those that are there, or the next ones; none if the time is up."""
        end, judged = time.monotonic() + timeout_s, dict[int, Reply | WorkerFailure]()
        while not judged and (answers := self._pool.poll(max(0.0, end - time.monotonic()))):
            rows = {row: answers[slot] for row, slot in enumerate(self._slots) if slot in answers}
            for row, answer in rows.items():
                request, left = self._beginning.pop(row, (None, 0))
                if request is not None and left and isinstance(answer, WorkerFailure):
                    self._try(row, request, left - 1)
                    continue
                # live first: `_judge` counts a row that does not begin as dropped
                self._live |= set() if request is None else {row}
                judged |= self._judge({row: answer})
                if request is not None and row in self.broken:
                    self._live.discard(row)
        return judged

    def forget(self, row: int) -> None:
        """Drop the submitted request of a row, if there is one."""
        self._beginning.pop(row, None)
        self._pool.forget(self._slots[row])

    def _try(self, row: int, request: Request, left: int) -> None:
        self._pool.start_missing()
        self._pool.check_restarts()
        self._pool.submit(self._slots[row], request, self._limits.reset_timeout_s, check=self._misshapen)
        self._beginning[row] = request, left

    def settle(self, rows: Collection[int]) -> None:
        """Mark rows as finished because their episodes are over; a result resets the count of restarts."""
        self._live -= set(rows)
        # Only a result forgives: rows that broke say nothing about the others.
        if any(row not in self.broken for row in rows):
            self.note_success()

    def note_success(self) -> None:
        """Forgive the restarts so far."""
        self._pool.note_success()

    def start_missing(self) -> None:
        """Replace lost processes; they start in parallel with what the caller does next."""
        self._pool.start_missing()

    def processes(self) -> list[int]:
        """Process ids of the running workers."""
        return self._pool.processes()

    def memory_mb(self) -> float:
        """Memory of the largest worker including its children, in 10^6 bytes."""
        return self._pool.memory_bytes() / 1e6

    def check_open(self) -> None:
        """Raise an error if the pool has been closed."""
        # The pool itself would start again at the next request, without the episodes that its caller expects.
        if self._pool.closed:
            raise RuntimeError(f"this {type(self).__name__} has been closed")

    def close(self) -> None:
        """End all processes; also done when the interpreter exits."""
        self.failures.summary()
        self.failures.counts.clear()
        self._live.clear()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _misshapen(self, request: Request, answer: Message) -> WorkerFailure | None:
        """What is wrong with an answer if its process is to blame, which is then replaced; None if nothing is."""
        return None

    def _read(self, answer: Message) -> Reply | WorkerFailure:
        """The content of an answer, or what is wrong with its episode.

        The process of such a failure is sound and stays. The episode would fail again, so it is not tried again.
        """
        raise NotImplementedError

    def _judge(self, answers: Mapping[int, Message | WorkerFailure]) -> dict[int, Reply | WorkerFailure]:
        """Contents of answers; rows that failed are remembered, counted and logged."""
        judged: dict[int, Reply | WorkerFailure] = {}
        for row, answer in answers.items():
            # A sound answer may still report that its episode has failed.
            found = judged[row] = answer if isinstance(answer, WorkerFailure) else self._read(answer)
            if not isinstance(found, WorkerFailure):
                continue
            self.broken[row] = found
            self.failures.note(found)
            # An episode that had ended before (its last image was asked for) keeps its result.
            for kind in (found.kind, "dropped" if row in self._live else ""):
                if kind in self._counts:
                    self._counts[kind] += 1
        return judged

    def _assign(self, scenes: Sequence[str]) -> list[int]:
        """A process for each row, preferably one that has the row's scene: changing it may take seconds."""
        free = list(range(self.size))
        slots: dict[int, int] = {}
        for row, scene in enumerate(scenes):
            # Rows that find their scene choose first; the others take what is left, in order.
            same = next((slot for slot in free if self._scenes[slot] == scene), None)
            if same is not None:
                slots[row] = same
                free.remove(same)
        for row, scene in enumerate(scenes):
            if row not in slots:
                # Every slot is given away, so that each row has a process to itself.
                slots[row] = free.pop(0)
            self._scenes[slots[row]] = scene
        return [slots[row] for row in range(len(scenes))]
