"""Interface between the pool and its workers: how a worker is started, answers and fails."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from mmrl.workers.sandbox import Limits
    from mmrl.workers.wire import Message

log = logging.getLogger(__name__)
MAX_FILES = 100
"""Tracebacks kept of a run; reasons beyond that are still counted and logged."""


@dataclass(frozen=True)
class WorkerFailure:
    """Takes the place of an answer that will not come; the worker has been stopped."""

    kind: str
    """Key of `WORKER_FAILURES`, `limit` where a strict process was over another limit than its memory, or a kind of a
    pool's user."""
    reason: str
    """One line."""
    evidence: str = ""
    """Traceback, or the last lines that the process wrote."""
    for_user: bool = False
    """Whether the service blames the user's request."""
    stage: str = "answer"
    """Phase of the worker: start, prepare or answer; send where a request could not be made or sent."""
    exit_code: int | None = None
    """Exit code of a process that ended; negative for the signal that ended it."""
    limit_s: float | None = None
    """The time limit that was exceeded."""


def one_line(text: str) -> str:
    """Join the lines of a text and cut it to 500 characters."""
    return " ".join(text.split())[:500]


WORKER_FAILURES: dict[str, str] = {
    "crashed": "The process ended or sent garbage.",
    "hung": "There was no answer, or no heartbeat, within the time limit.",
    "memory": "The process, with what it started, held more memory than allowed.",
    "raised": "The service raised an exception.",
}


class FailureLog:
    """Reasons that differ only in numbers are one."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.folder = name, folder
        self.counts: Counter[str] = Counter()
        """Number of failures by reason."""

    def note(self, failure: WorkerFailure) -> None:
        """Count a failure; log it where its reason is new, or when it came for the 10th, 100th, ... time."""
        reason = re.sub(r"\d+", "#", f"{failure.kind}: {failure.reason}")
        self.counts[reason] += 1
        count = self.counts[reason]
        if count == 1:
            kept = self._write(reason, failure)
            after = "; a fresh process takes its place" if failure.kind in WORKER_FAILURES else ""
            after += f"; what it said is in {kept}" if kept is not None else ""
            log.warning("the environment %s %s: %s%s", self.name, failure.kind, failure.reason, after)
        elif re.fullmatch("10+", str(count)):
            log.warning("the environment %s: %d times so far: %s", self.name, count, reason)

    def summary(self) -> None:
        """Log how often each reason came that came more than once."""
        for reason, count in self.counts.most_common():
            if count > 1:
                log.warning("the environment %s: %d times in all: %s", self.name, count, reason)

    def _write(self, reason: str, failure: WorkerFailure) -> Path | None:
        if self.folder is None or len(self.counts) > MAX_FILES:
            return None
        digest = hashlib.sha256(reason.encode()).hexdigest()[:8]
        path = self.folder / f"environment-{failure.kind}-{digest}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{self.name} {failure.kind}: {failure.reason}\n\n{failure.evidence}\n", errors="replace")
        except OSError as error:
            log.warning("the environment's traceback cannot be written to %s: %s", path, error)
            return None
        return path


@dataclass(frozen=True)
class WorkerSpec:
    """Command, limits and environment of a worker."""

    service: str
    """`path/to/file.py:function` that makes a `mmrl.workers.serve.Service`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; JSON."""
    purpose: str = "a service"
    """Purpose of the workers, for error messages."""
    python: str | None = None
    """Interpreter; None for this one, which then finds the modules that this process finds."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables on top of this process's."""
    start_timeout_s: float = 120.0
    """Seconds for imports and construction of the service."""
    heartbeat_timeout_s: float | None = 30.0
    """Seconds without a heartbeat, which only code that keeps Python's lock, or a stopped process, leaves out; None
    where the time limit of the request is enough."""
    capture_output: bool = True
    """Keep the end of a worker's output as evidence of a failure; otherwise it goes to this process's standard
    error."""
    closing_s: float = 2.0
    """Seconds that `close` leaves a service to close by itself; 0 = it is killed at once."""
    memory_bytes: int | None = None
    """Largest memory of a worker and its children, checked while waiting for answers; None for any."""
    max_reply_bytes: int = 1 << 30
    """Bytes of one message of a worker."""
    strict: Limits | None = None
    """Limits of a worker that runs untrusted code (`mmrl.workers.sandbox`). None for a plain
    process."""
    readable: tuple[str, ...] = ()
    """Files and folders that a strict worker needs besides the modules that this process finds."""


@dataclass(frozen=True)
class Ending:
    """End of a worker."""

    reason: str
    """One line."""
    exit_code: int | None = None
    """Exit code, negative for the signal that ended it; None while the process runs."""


class WorkerHandle(Protocol):
    """One started worker. `Engine.wait` fills what the attributes and `receive` show."""

    heard_at: float
    """`time.monotonic()` when something last arrived from the worker, or when it was last given something."""
    taken_at: float
    """`time.monotonic()` when the worker last took a part of a request."""
    loading_at: float
    """`time.monotonic()` of the worker's last report that it imports modules; 0 without one."""
    ending: Ending | None
    """Set once nothing more will come."""

    @property
    def pid(self) -> int:
        """Number of the process."""
        ...

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a message. Raises `WireError` where it cannot be one."""
        ...

    def flush(self) -> None:
        """Begin to send the queued requests, without waiting for the worker."""
        ...

    def receive(self) -> list[Message]:
        """Messages that arrived since the last call, oldest first."""
        ...

    def memory_bytes(self) -> int:
        """Memory of the worker and its children; 0 if unknown."""
        ...

    def over_limit(self) -> str:
        """Description of the limit, other than memory, that a strict worker exceeds; empty if none."""
        ...

    def last_output(self) -> str:
        """The end of the worker's output, if it is captured."""
        ...

    def ask_to_end(self) -> None:
        """Let the worker close its service and end; `kill` makes sure later."""
        ...

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        ...

    def kill(self) -> None:
        """End the worker and everything that it started; a second time does nothing."""
        ...


class Engine(Protocol):
    """Starts workers and moves their messages."""

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker without waiting for it; its hello is message 0. RunError where it cannot be started."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a started worker has something new or the time is up, and serve all of them meanwhile."""
        ...
