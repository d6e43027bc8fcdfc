"""Workers as processes of this machine: fresh interpreters, spoken to through pipes.

Nothing of this process is copied into a worker (no CUDA context, no torch), its main script is not run again, and a
worker may use another Python. Every pipe is served while any answer is awaited, so that a worker that hangs, dies or
prints a lot holds up no other.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.errors import RunError
from mmrl.workers import family, sandbox, wire
from mmrl.workers.engine import Ending, WorkerSpec
from mmrl.workers.loading import RESTRICTED
from mmrl.workers.memory import device_variables

if TYPE_CHECKING:
    import numpy as np

SCRIPT = Path(__file__).resolve().with_name("serve.py")
READ_BYTES = 1 << 16
"""Capacity of a pipe in bytes; a larger buffer would be allocated for nothing at every read."""
READS_AT_ONCE = 64
"""Reads of one pipe in a row, so that a worker that writes without end does not keep this process from the others."""
OUTPUT_BYTES = 8192
"""Bytes of a worker's output that are kept."""
EXIT_SECONDS = 2.0
"""Seconds to wait for the exit code of a process that closed its pipe."""
ORPHAN_SECONDS = 60.0
"""Seconds beyond the pool's limit that a worker holding the GIL may live."""


class LocalEngine:
    """Starts `WorkerProcess`es and serves their pipes; an `Engine`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def start(self, spec: WorkerSpec) -> WorkerProcess:
        """Start a process without waiting for it."""
        return WorkerProcess(spec, self._selector)

    def wait(self, timeout_s: float) -> None:
        """Serve all pipes until something has happened or the time is up."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            key.data()


class WorkerProcess:
    """A process in a group of its own; a `WorkerHandle`."""

    def __init__(self, spec: WorkerSpec, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._token = secrets.token_hex(8)
        self._limits = spec.strict
        self._process = _start(spec, self._token)
        self._pipes = [self._process.stdin, self._process.stdout, self._process.stderr]
        self._stdin, self._stdout, self._stderr = (pipe.fileno() if pipe is not None else -1 for pipe in self._pipes)
        self._decoder, self._outgoing, self._output = wire.Decoder(spec.max_reply_bytes), bytearray(), bytearray()
        self._inbox: list[wire.Message] = []
        self._killed = self._writing = False
        self.heard_at = self.taken_at = time.monotonic()
        self.loading_at = 0.0
        self.ending: Ending | None = None
        for fd in (self._stdin, self._stdout, self._stderr):
            if fd >= 0:
                os.set_blocking(fd, False)
        self._serve(self._stdout, selectors.EVENT_READ, self._read_messages)
        self._serve(self._stderr, selectors.EVENT_READ, self._read_output)

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a message."""
        self._outgoing += wire.pack(fields, arrays)
        self.heard_at = self.taken_at = time.monotonic()

    def flush(self) -> None:
        """Write as much of the queue as the pipe takes; waits do the rest."""
        self._write()
        if self._outgoing and not self._writing:
            self._serve(self._stdin, selectors.EVENT_WRITE, self._write)
            self._writing = True

    def receive(self) -> list[wire.Message]:
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
        self._read_output()
        return self._output.decode(errors="replace").strip()

    def ask_to_end(self) -> None:
        """Close its input, after which it closes its service and ends."""
        self._forget(self._stdin)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._stdin = -1

    def has_ended(self) -> bool:
        """Whether the process is gone; it is not reaped, so that nobody else gets its group's number yet."""
        return self._killed or self._exit_status() is not None

    def kill(self) -> None:
        """End the process and everything that it started, in whatever group that is, and free its pipes."""
        if self._killed:
            return
        self._killed = True
        for fd in (self._stdin, self._stdout, self._stderr):
            self._forget(fd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGSTOP)
        family.end_descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        family.end_tagged(self._token)
        for pipe in self._pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._stdin = self._stdout = self._stderr = -1

    def _serve(self, fd: int, event: int, action: Callable[[], None]) -> None:
        if fd >= 0 and fd not in self._selector.get_map():
            self._selector.register(fd, event, action)

    def _forget(self, fd: int) -> None:
        if fd >= 0 and fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _write(self) -> None:
        try:
            sent = os.write(self._stdin, self._outgoing)
            self.taken_at = time.monotonic()
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._outgoing)  # the end of its output has the reason
        del self._outgoing[:sent]
        if not self._outgoing and self._writing:
            self._forget(self._stdin)
            self._writing = False

    def _read_messages(self) -> None:
        data, closed = _drain(self._stdout)
        if data:
            self.heard_at = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                if message.fields.get("kind") != "beat":
                    self._inbox.append(message)
                elif message.fields.get("loading") is True:
                    self.loading_at = time.monotonic()
        except wire.WireError as error:
            self.ending = Ending(str(error))
        if closed and self.ending is None:
            self.ending = self._why_it_ended()
        if self.ending is not None:  # a closed pipe is ready for ever; the wait would turn into a busy loop
            self._forget(self._stdout)

    def _read_output(self) -> None:
        if self._stderr < 0 or self._killed:
            return
        data, closed = _drain(self._stderr)
        if closed:
            self._forget(self._stderr)
        self._output += data
        del self._output[:-OUTPUT_BYTES]

    def _why_it_ended(self) -> Ending:
        end = time.monotonic() + EXIT_SECONDS
        while (code := self._exit_status()) is None:
            if time.monotonic() > end:
                return Ending("it closed its output")
            time.sleep(0.01)
        if code < 0:
            return Ending(f"killed by {signal.Signals(-code).name}", code)
        return Ending(f"ended with code {code}", code)

    def _exit_status(self) -> int | None:
        """Exit code of the process, negative for a signal; None while it runs."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:  # reaped by somebody else
            return 0
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _start(spec: WorkerSpec, token: str) -> subprocess.Popen[bytes]:
    watchdog_s = 0.0 if spec.heartbeat_timeout_s is None else spec.heartbeat_timeout_s + ORPHAN_SECONDS
    paths = [] if spec.python is None else [os.getcwd()]
    options = {"service": dict(spec.options), "paths": paths, "watchdog_s": watchdog_s}
    command = [spec.python or sys.executable, str(SCRIPT), spec.service, json.dumps(options)]
    variables = _variables(spec)
    if spec.strict is not None:
        sandbox.require_strict()
        readable = [*spec.readable, *map(os.path.abspath, sys.path), str(SCRIPT.parent)]
        command = [*sandbox.strict_command(spec.strict, readable), *command]
        kept = {name: variables[name] for name in ("PYTHONPATH", RESTRICTED) if name in variables}
        variables = {**sandbox.strict_environment(), **kept, **spec.environment}
    try:
        # A group of its own: what it starts ends with it, and Ctrl-C reaches only this process. A session of its own
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
        raise RunError(f"no worker process for {spec.purpose} can be started: {error}") from error


def _variables(spec: WorkerSpec) -> dict[str, str]:
    """Environment of the process; the same interpreter finds the modules that this process finds now."""
    variables = {**os.environ, **device_variables(), **spec.environment}
    for name in ("PYTHONPATH", "PYTHONHOME"):
        if spec.python is not None and name not in spec.environment:
            variables.pop(name, None)
    if spec.python is None:
        given = [spec.environment["PYTHONPATH"]] if "PYTHONPATH" in spec.environment else []
        variables["PYTHONPATH"] = os.pathsep.join([*map(os.path.abspath, sys.path), *given])
    return variables


def _drain(fd: int) -> tuple[bytes, bool]:
    """Content of a pipe, and whether its other end is closed."""
    parts: list[bytes] = []
    for _ in range(READS_AT_ONCE):
        try:
            part = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return b"".join(parts), False
        except OSError:
            return b"".join(parts), True
        if not part:
            return b"".join(parts), True
        parts.append(part)
        if len(part) < READ_BYTES:  # what came since wakes the next wait
            break
    return b"".join(parts), False
