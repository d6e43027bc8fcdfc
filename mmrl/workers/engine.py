"""What a pool needs of the engine that starts its workers and moves messages.

`mmrl.workers.process.LocalEngine` starts processes on this machine. Another engine, one whose workers live on other
machines for instance, offers the same few methods and is given to `WorkerPool(engine=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from mmrl.workers.sandbox import Limits
    from mmrl.workers.wire import Message


@dataclass(frozen=True)
class WorkerSpec:
    """How to start a worker, and how long to wait for it."""

    service: str
    """`path/to/file.py:function` that makes a `mmrl.workers.serve.Service`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; JSON."""
    purpose: str = "a service"
    """What the workers are for, in error messages."""
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
    """Keep the last of what a worker prints as evidence of a failure; otherwise it goes to this process's standard
    error."""
    closing_s: float = 2.0
    """Seconds that `close` leaves a service to close by itself; 0 = it is killed at once."""
    memory_bytes: int | None = None
    """Memory that a worker and what it starts may hold, looked at while answers are awaited; None for any."""
    max_reply_bytes: int = 1 << 30
    """Bytes of one message of a worker."""
    strict: Limits | None = None
    """What the worker may use where it runs code that nobody has read; see `mmrl.workers.sandbox`. None for a plain
    process."""
    readable: tuple[str, ...] = ()
    """Files and folders that a strict worker needs beside the modules that this process finds."""


@dataclass(frozen=True)
class Ending:
    """Why nothing more will come from a worker."""

    reason: str
    """One line."""
    exit_code: int | None = None
    """Of the process; the negative number of the signal that ended it; None where it still runs."""


class WorkerHandle(Protocol):
    """One started worker. `Engine.wait` fills what the attributes and `receive` show."""

    heard_at: float
    """`time.monotonic()` when something last arrived from the worker, or when it was last given something."""
    taken_at: float
    """`time.monotonic()` when the worker last took a part of a request."""
    loading_at: float
    """`time.monotonic()` when the worker last said that it imports modules; 0 where it never did."""
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
        """Begin to transfer what is queued, without waiting for the worker."""
        ...

    def receive(self) -> list[Message]:
        """Messages that arrived since the last call, oldest first."""
        ...

    def memory_bytes(self) -> int:
        """Memory that the worker and what it started hold now; 0 where it cannot be found out."""
        ...

    def last_output(self) -> str:
        """The last of what the worker printed, where it is captured."""
        ...

    def ask_to_end(self) -> None:
        """Let the worker close its service and end; `kill` makes sure later."""
        ...

    def has_ended(self) -> bool:
        """Whether the process is gone."""
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
