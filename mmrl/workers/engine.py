"""Workers: how one is started, answers and fails.

A worker is a fresh interpreter that this process speaks to through pipes (`LocalEngine`). Nothing of this process is
copied into it (no CUDA context, no torch), its main script is not run again, and it may use another Python. Every pipe
is served while any answer is awaited, so that a worker that hangs, dies or prints a lot holds up no other.

Services whose processes would cost more than their work can run in this process instead (`InProcessEngine`):

    pool = WorkerPool(spec, 4, engine=InProcessEngine(make_service))

There an exception is a failure like any other, but a service that hangs or ends the process takes this one with it, and
limits of time and memory do not hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.errors import RunError
from mmrl.workers import family, given, sandbox, wire
from mmrl.workers.loading import RESTRICTED
from mmrl.workers.memory import device_variables
from mmrl.workers.wire import Message, describe_error

if TYPE_CHECKING:
    import numpy as np

    from mmrl.workers.serve import Service

SCRIPT = Path(__file__).resolve().with_name("serve.py")
READ_BYTES = 1 << 16
"""Capacity of a pipe in bytes; a larger buffer would be allocated for nothing at every read."""
READS_AT_ONCE = 64
"""Maximum number of consecutive reads from one pipe, so that a worker that writes endlessly does not block the
others."""
OUTPUT_BYTES = 8192
"""Number of bytes of a worker's output that are kept."""
EXIT_SECONDS = 2.0
"""Seconds to wait for the exit code of a process that closed its pipe."""
ORPHAN_SECONDS = 60.0
"""Seconds beyond the pool's limit for which a worker that holds the GIL may live."""


@dataclass(frozen=True)
class WorkerFailure:
    """Returned if there is no reply; the worker has been stopped."""

    kind: str
    """Key of `WORKER_FAILURES`, `limit` if a strict process exceeded a limit other than memory, or a kind defined by
    the pool's user."""
    reason: str
    """One line."""
    evidence: str = ""
    """Traceback, or the last lines of the process's output."""
    for_user: bool = False
    """Whether the service blames the user's request."""
    stage: str = "answer"
    """Phase of the worker: start, prepare or answer; send if a request could not be created or sent."""
    exit_code: int | None = None
    """Exit code of a process that ended; negative if it was ended by a signal."""
    limit_s: float | None = None
    """The time limit that was exceeded."""


def one_line(text: str) -> str:
    """Join the lines of a text and truncate it to 500 characters."""
    return " ".join(text.split())[:500]


WORKER_FAILURES: dict[str, str] = {
    "crashed": "The process ended or sent invalid data.",
    "hung": "There was no reply, or no heartbeat, within the time limit.",
    "memory": "The process and its child processes used more memory than allowed.",
    "raised": "The service raised an exception.",
}


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is started: command, limits and environment."""

    service: str
    """`path/to/file.py:function` that creates a `mmrl.workers.serve.Service`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of that function; JSON."""
    purpose: str = "a service"
    """Purpose of the workers, for error messages."""
    python: str | None = None
    """Interpreter; None for this one, which then finds the same modules as this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to those of this process."""
    start_timeout_s: float = 120.0
    """Seconds for imports and construction of the service."""
    heartbeat_timeout_s: float | None = 30.0
    """Maximum seconds without a heartbeat; heartbeats are only missed if code holds the GIL or the process is stopped.
    None if the time limit of the request is sufficient."""
    capture_output: bool = True
    """Keep the end of a worker's output to explain failures; otherwise it goes to this process's standard error."""
    closing_s: float = 2.0
    """Seconds that `close` gives a service to close; 0 kills it immediately."""
    memory_bytes: int | None = None
    """Maximum memory of a worker and its children, checked while waiting for replies; None for no limit."""
    max_reply_bytes: int = 1 << 30
    """Maximum number of bytes in a worker's message."""
    strict: sandbox.Limits | None = None
    """Limits of a worker that runs untrusted code (`mmrl.workers.sandbox`). None for a plain
    process."""
    readable: tuple[str, ...] = ()
    """Files and folders that a strict worker needs in addition to the modules that this process finds."""


@dataclass(frozen=True)
class Ending:
    """End of a worker."""

    reason: str
    """One line."""
    exit_code: int | None = None
    """Exit code, negative if ended by a signal; None while the process runs."""


class WorkerHandle(Protocol):
    """One started worker. `Engine.wait` updates the attributes and what `receive` returns."""

    heard_at: float
    """`time.monotonic()` when the worker last sent or was last given something."""
    taken_at: float
    """`time.monotonic()` when the worker last read part of a request."""
    loading_at: float
    """`time.monotonic()` of the worker's last report that it imports modules; 0 if there was none."""
    ending: Ending | None
    """Set once nothing more will arrive."""

    @property
    def receiving(self) -> bool:
        """Whether a part of a message has arrived, and the rest has not."""
        ...

    @property
    def pid(self) -> int:
        """Process id."""
        ...

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a message; raises `WireError` if it cannot be encoded."""
        ...

    def flush(self) -> None:
        """Start sending the queued requests, without waiting for the worker."""
        ...

    def receive(self) -> list[Message]:
        """Messages that arrived since the last call, oldest first."""
        ...

    def memory_bytes(self) -> int:
        """Memory of the worker and its children; 0 if unknown."""
        ...

    def over_limit(self) -> str:
        """Description of the limit, other than memory, that a strict worker exceeds; empty if there is none."""
        ...

    def last_output(self) -> str:
        """The end of the worker's output, if it is captured."""
        ...

    def ask_to_end(self) -> None:
        """Ask the worker to close its service and end; `kill` ensures it later."""
        ...

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        ...

    def kill(self) -> None:
        """End the worker and everything that it started; calling it again has no effect."""
        ...


class Engine(Protocol):
    """Starts workers and transports their messages."""

    def start(self, spec: WorkerSpec) -> WorkerHandle:
        """Start a worker without waiting for it; its hello is message 0. Raises RunError if it cannot start."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker has something new or the time is up, and serve all workers meanwhile."""
        ...


class LocalEngine:
    """Starts `WorkerProcess`es and serves their pipes; an `Engine`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a process without waiting for it."""
        return WorkerProcess(spec, self._selector)

    def wait(self, timeout_s: float) -> None:
        """Serve all pipes until something has happened or the time is up."""
        # Both directions: a worker that waits for room in its output pipe would never read its next request.
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            key.data()


class WorkerProcess:
    """A process in a separate group; a `WorkerHandle`."""

    def __init__(self, spec: WorkerSpec, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        # Finds what a worker started even where that left its group and lost its parent.
        self._token = secrets.token_hex(8)
        self._limits = spec.strict
        objects = _objects_for(spec)
        self._process = _start(spec, self._token, bool(objects))
        self._pipes = [self._process.stdin, self._process.stdout, self._process.stderr]
        self._stdin, self._stdout, self._stderr = (pipe.fileno() if pipe is not None else -1 for pipe in self._pipes)
        self._decoder, self._outgoing, self._output = (
            wire.MessageDecoder(spec.max_reply_bytes),
            bytearray(),
            bytearray(),
        )
        self._inbox: list[Message] = []
        self._killed = self._writing = False
        self.heard_at = self.taken_at = time.monotonic()
        self.loading_at = 0.0
        self.ending: Ending | None = None
        # No worker may make this process wait: neither by reading slowly nor by writing half a message.
        for fd in (self._stdin, self._stdout, self._stderr):
            if fd >= 0:
                os.set_blocking(fd, False)
        self._serve(self._stdout, selectors.EVENT_READ, self._read_messages)
        self._serve(self._stderr, selectors.EVENT_READ, self._read_output)
        if objects:
            self._outgoing += wire.pack({"kind": "given"}, objects)
            self.flush()

    @property
    def receiving(self) -> bool:
        """Whether a part of a message has arrived, and the rest has not."""
        return self._decoder.incomplete

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a message."""
        # Packed at once, so that the caller may change its arrays afterwards.
        self._outgoing += wire.pack(fields, arrays)
        self.heard_at = self.taken_at = time.monotonic()

    def flush(self) -> None:
        """Write as much of the queue as the pipe accepts; later waits write the rest."""
        self._write()
        # Only while there is something to write: an empty pipe is always ready and would never let a wait sleep.
        if self._outgoing and not self._writing:
            self._serve(self._stdin, selectors.EVENT_WRITE, self._write)
            self._writing = True

    def receive(self) -> list[Message]:
        """Messages that arrived since the last call, oldest first."""
        found, self._inbox = self._inbox, []
        return found

    def memory_bytes(self) -> int:
        """Memory of the process and its children."""
        return family.resident_bytes(self._process.pid)

    def over_limit(self) -> str:
        """Description of the limit that a strict process exceeds; empty if none."""
        over = None if self._limits is None else sandbox.over_limit(self._process.pid, self._limits)
        return "" if over is None else over[1]

    def last_output(self) -> str:
        """The end of the process's output, if it is captured."""
        # What has come since the last wait: the reason for a failure is often in the last lines.
        self._read_output()
        return self._output.decode(errors="replace").strip()

    def ask_to_end(self) -> None:
        """Close its input, so that it closes its service and ends."""
        # Needs no room in the pipe, and a busy worker finds it after its request.
        self._forget(self._stdin)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._stdin = -1

    def has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped, so that the id of its group is not reused yet."""
        return self._killed or self._exit_status() is not None

    def kill(self) -> None:
        """End the process and everything that it started, in any group, and free its pipes."""
        if self._killed:
            return
        self._killed = True
        # First: a closed descriptor may be opened again by somebody else, and the selector would serve that.
        for fd in (self._stdin, self._stdout, self._stderr):
            self._forget(fd)
        # Stopped before its children are listed: it cannot start more of them meanwhile.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGSTOP)
        family.end_descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Reaped only after its group is killed: before that nobody else can get the group's number.
        self._process.wait()
        family.end_tagged(self._token)
        for pipe in self._pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stdin = self._stdout = self._stderr = -1

    def _serve(self, fd: int, event: int, action: Callable[[], None]) -> None:
        # A selector takes a descriptor once.
        if fd >= 0 and fd not in self._selector.get_map():
            self._selector.register(fd, event, action)

    def _forget(self, fd: int) -> None:
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _write(self) -> None:
        try:
            sent = os.write(self._stdin, self._outgoing)
            # The request has begun when the worker takes a part of it; its time limit counts from here.
            self.taken_at = time.monotonic()
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._outgoing)  # the end of its output has the reason
        # In place: the rest stays queued for the next time the pipe has room.
        del self._outgoing[:sent]
        if not self._outgoing and self._writing:
            self._forget(self._stdin)
            self._writing = False

    def _read_messages(self) -> None:
        data, closed = _drain(self._stdout)
        # Any byte is a sign of life, also a part of a message that takes long to come.
        if data:
            # Not when a message is complete: a large one may take longer than a heartbeat.
            self.heard_at = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                if message.fields.get("kind") != "beat":
                    self._inbox.append(message)
                elif message.fields.get("loading") is True:
                    self.loading_at = time.monotonic()
        # What follows garbage cannot be told from it, so that the pipe is of no more use.
        except wire.WireError as error:
            self.ending = Ending(str(error))
        if closed and self.ending is None:
            self.ending = self._why_it_ended()
        if self.ending is not None:  # a closed pipe is ready for ever; the wait would turn into a busy loop
            self._forget(self._stdout)

    def _read_output(self) -> None:
        # After a kill the descriptor may already belong to something else.
        if self._stderr < 0 or self._killed:
            return
        data, closed = _drain(self._stderr)
        if closed:
            self._forget(self._stderr)
        self._output += data
        # The end of the output is what explains a failure.
        del self._output[:-OUTPUT_BYTES]

    def _why_it_ended(self) -> Ending:
        end = time.monotonic() + EXIT_SECONDS
        # A process that closes its pipe is usually about to exit, and its code is the better reason.
        while (code := self._exit_status()) is None:
            if time.monotonic() > end:
                return Ending("it closed its output")
            time.sleep(0.01)
        if code < 0:
            return Ending(f"killed by {signal.Signals(-code).name}", code)
        return Ending(f"ended with code {code}", code)

    def _exit_status(self) -> int | None:
        """Exit code of the process, negative for a signal; None while it runs."""
        # Already reaped by `Popen`, whose waitid would then find no such child.
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            # WNOWAIT: a process that was reaped would free its number, which `kill` still needs.
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # reaped by somebody else
            return 0
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _objects_for(spec: WorkerSpec) -> dict[str, np.ndarray]:
    """Objects of this program that a worker gets before its service is made; another interpreter gets none."""
    if spec.python is not None or not (objects := given.portable()):
        return {}
    import numpy as np

    return {name: np.frombuffer(content, dtype=np.uint8) for name, content in objects.items()}


def _start(spec: WorkerSpec, token: str, objects: bool) -> subprocess.Popen[bytes]:
    # Beyond the heartbeat's limit, since the pool should find a stuck worker first and say why.
    watchdog_s = 0.0 if spec.heartbeat_timeout_s is None else spec.heartbeat_timeout_s + ORPHAN_SECONDS
    # A foreign Python has not this process's paths, but a user's `path/to/file.py` is relative to here.
    paths = [] if spec.python is None else [os.getcwd()]
    options = {"service": dict(spec.options), "paths": paths, "watchdog_s": watchdog_s, "given": objects}
    command = [spec.python or sys.executable, str(SCRIPT), spec.service, json.dumps(options)]
    # Of this process, so that libraries and devices are found as here.
    variables = _variables(spec)
    # The sandbox's own environment, not this one's: variables may hold tokens.
    if spec.strict is not None:
        sandbox.require_strict()
        readable = [*spec.readable, *map(os.path.abspath, sys.path), str(SCRIPT.parent)]
        command = [*sandbox.strict_command(spec.strict, readable), *command]
        # The sandbox needs the modules and the list of functions that may be loaded, and no other variable.
        kept = {name: variables[name] for name in ("PYTHONPATH", RESTRICTED) if name in variables}
        variables = {**sandbox.strict_environment(), **kept, **spec.environment}
    try:
        # A separate group: what it starts ends with it, and Ctrl-C reaches only this process. A separate session
        # would do that too, but Linux schedules sessions against each other: on a busy machine every message would
        # then wait for a turn of several milliseconds (sched_autogroup). Code that nobody has read gets one still.
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if spec.capture_output else None,
            env={**variables, family.TAG: token},
            start_new_session=spec.strict is not None,
            process_group=0 if spec.strict is None else None,
            bufsize=0,
        )
    except OSError as error:
        raise RunError(f"cannot start a worker process for {spec.purpose}: {error}") from error


def _variables(spec: WorkerSpec) -> dict[str, str]:
    """Environment of the process; the same interpreter finds the modules that this process finds now."""
    # Paths of this Python's packages would hide those of another one.
    variables = {**os.environ, **device_variables(), **spec.environment}
    for name in ("PYTHONPATH", "PYTHONHOME"):
        if spec.python is not None and name not in spec.environment:
            variables.pop(name, None)
    if spec.python is None:
        given = [spec.environment["PYTHONPATH"]] if "PYTHONPATH" in spec.environment else []
        # Absolute: entries such as "" mean another folder in the worker.
        variables["PYTHONPATH"] = os.pathsep.join([*map(os.path.abspath, sys.path), *given])
    return variables


def _drain(fd: int) -> tuple[bytes, bool]:
    """Content of a pipe, and whether its other end is closed."""
    parts: list[bytes] = []
    # Bounded: a worker that writes without end would keep the others waiting.
    for _ in range(READS_AT_ONCE):
        try:
            part = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return b"".join(parts), False
        except OSError:
            return b"".join(parts), True
        # End of file: the process has closed this pipe, or has ended.
        if not part:
            return b"".join(parts), True
        parts.append(part)
        if len(part) < READ_BYTES:  # what came since wakes the next wait
            break
    return b"".join(parts), False


class InProcessHandle:
    """A service that runs in this process and replies in `flush`."""

    def __init__(self, make: Callable[..., Service], options: Mapping[str, Any]) -> None:
        # Heard in the infinite future: no heartbeat is ever missed.
        self.heard_at = float("inf")
        self.taken_at = 0.0
        self.loading_at = 0.0
        self.ending: Ending | None = None
        self._service: Service | None = None
        self._queue: list[Message] = []
        self._answers: list[Message] = []
        try:
            # As a worker would: making the service may fail, and the failure is the hello.
            self._service = make(**options)
            self._keep("hello", 0, self._service.hello())
        except Exception as error:
            self._keep("error", 0, describe_error(error))

    @property
    def receiving(self) -> bool:
        """False: messages are whole."""
        return False

    @property
    def pid(self) -> int:
        """Id of this process."""
        return os.getpid()

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a request."""
        self._queue.append(Message(dict(fields), dict(arrays or {})))

    def flush(self) -> None:
        """Process the queued requests."""
        queue, self._queue = self._queue, []
        for request in queue:
            # A service that could not be made answers nothing; its error is the hello.
            if self._service is None:
                return
            number = request.fields["id"]
            try:
                self._keep("result", number, *self._service.answer(request.fields["body"], request.arrays))
            except Exception as error:
                self._keep("error", number, describe_error(error))

    def receive(self) -> list[Message]:
        """Replies since the last call, oldest first."""
        found, self._answers = self._answers, []
        return found

    def memory_bytes(self) -> int:
        """Unknown: it shares this process."""
        return 0

    def over_limit(self) -> str:
        """There are no limits."""
        return ""

    def last_output(self) -> str:
        """Its output is part of this process's output."""
        return ""

    def ask_to_end(self) -> None:
        """Close the service."""
        # First, so that a second call does nothing even if closing fails.
        service, self._service = self._service, None
        if service is not None:
            with contextlib.suppress(Exception):  # it may have failed before
                service.close()

    def has_ended(self) -> bool:
        """Whether the service is closed, or was never created."""
        return self._service is None

    def kill(self) -> None:
        """Close the service."""
        self.ask_to_end()

    def _keep(
        self, kind: str, number: int, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        # Copies: a service may go on writing into an array that it has returned.
        own = {name: array.copy() for name, array in (arrays or {}).items()}
        self._answers.append(Message({"kind": kind, "id": number, "body": dict(body)}, own))


class InProcessEngine:
    """Creates services in this process.

    Args:
        make: creates a service from the options of a `WorkerSpec`, instead of the file given in the spec.
    """

    def __init__(self, make: Callable[..., Service]) -> None:
        self._make = make

    def start(self, spec: WorkerSpec) -> InProcessHandle:
        """Create a service."""
        return InProcessHandle(self._make, spec.options)

    def wait(self, timeout_s: float) -> None:
        """Return: answers are there as soon as requests are flushed."""
