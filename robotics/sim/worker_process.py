"""One environment's process as its owner sees it, and the wait for the answers of many.

Every pipe is served while any answer is awaited, so that a worker that hangs, dies or prints a lot holds up no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robotics.sim import wire

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StartSpec", "WorkerFailure", "WorkerProcess", "stop_all", "wait_for_answers"]

SCRIPT = Path(__file__).resolve().parent / "env_worker.py"
READ_BYTES = 1 << 20
LAST_WORDS_BYTES = 8192
PARTING_SECONDS = 2.0
ORPHAN_SECONDS = 60.0
"""How much longer than its owner waits a worker lives that keeps Python's lock."""


@dataclass(frozen=True)
class StartSpec:
    """How to start a worker."""

    python: str
    """Interpreter."""
    factory: str
    """As env_worker.py takes it."""
    options: Mapping[str, Any]
    """As env_worker.py takes them."""
    environment: Mapping[str, str]
    """All variables of the process."""
    start_timeout_s: float
    """Seconds until it must have said hello."""
    heartbeat_timeout_s: float
    """Seconds without a sign of life after which a worker that computes counts as hung."""


@dataclass(frozen=True)
class WorkerFailure:
    """Why there is no answer."""

    kind: str
    """crashed, hung, raised or diverged."""
    reason: str
    """One line."""
    evidence: str = ""
    """Traceback, or what the process wrote last."""
    for_user: bool = False
    """Whether the environment says that the mistake is in what was asked of it."""


class WorkerProcess:
    """A process in a group of its own; `answer` holds what its last command came to.

    Args:
        spec: how to start it; it is started at once and says hello later.
    """

    def __init__(self, spec: StartSpec) -> None:
        self._spec = spec
        options = json.dumps({**spec.options, "watchdog_s": spec.heartbeat_timeout_s + ORPHAN_SECONDS})
        # A group of its own: what it starts ends with it, and Ctrl-C reaches only the owner.
        self._process = subprocess.Popen(
            [spec.python, str(SCRIPT), "--factory", spec.factory, "--options", options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(spec.environment),
            start_new_session=True,
            bufsize=0,
        )
        self._pipes = [self._process.stdin, self._process.stdout, self._process.stderr]
        self._fds = [pipe.fileno() for pipe in self._pipes if pipe is not None]
        for fd in self._fds:
            os.set_blocking(fd, False)
        self._decoder, self._outgoing, self._words = wire.Decoder(), bytearray(), bytearray()
        self._number, self._heard = 0, time.monotonic()
        self._deadline, self._limit_s = self._heard + spec.start_timeout_s, spec.start_timeout_s
        self.answer: wire.Message | WorkerFailure | None = None
        self.hello: dict[str, Any] | None = None
        """Sizes, tasks and versions once it has answered for the first time."""

    @property
    def pid(self) -> int:
        """Number of the process and of its group."""
        return self._process.pid

    def send(
        self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None, timeout_s: float = 60.0
    ) -> None:
        """Give a command; what it comes to is for `wait_for_answers`.

        Args:
            fields: the command; a number is added by which its answer is known.
            arrays: its numbers.
            timeout_s: seconds after which it counts as hung.
        """
        self._number += 1
        self._outgoing += wire.pack({**fields, "id": self._number}, arrays)
        with contextlib.suppress(OSError):  # the wait does the rest, or finds out why
            del self._outgoing[: os.write(self._fds[0], self._outgoing)]
        self.answer = None
        self._heard = time.monotonic()
        self._deadline, self._limit_s = self._heard + timeout_s, timeout_s

    def seconds_left(self) -> float:
        """Until the owner has waited long enough."""
        silence = self._heard + self._spec.heartbeat_timeout_s if self.hello is not None else self._deadline
        return min(self._deadline, silence) - time.monotonic()

    def check_time(self) -> None:
        """Give up where no answer or no sign of life came in time."""
        if self.answer is not None or self.seconds_left() > 0:
            return
        late = time.monotonic() >= self._deadline
        silence_s = self._spec.heartbeat_timeout_s
        self._give_up("hung", f"no answer in {self._limit_s:g} s" if late else f"no sign of life for {silence_s:g} s")

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have all pipes served."""
        stdin, stdout, stderr = self._fds
        selector.register(stdout, selectors.EVENT_READ, self._read_messages)
        selector.register(stderr, selectors.EVENT_READ, lambda: self._read_words(selector))
        if self._outgoing:
            selector.register(stdin, selectors.EVENT_WRITE, lambda: self._write(selector))

    def unregister(self, selector: selectors.BaseSelector) -> None:
        """Have no pipe served."""
        for fd in self._fds:
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(fd)

    def kill(self) -> None:
        """End the process and all that it started, and leave nothing of it behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in self._pipes:
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def part(self) -> None:
        """Ask it to close its environment and to end; `kill` then makes sure."""
        with contextlib.suppress(OSError):
            os.write(self._fds[0], wire.pack({"kind": "close", "id": 0}))
            if self._process.stdin is not None:
                self._process.stdin.close()

    def has_ended(self) -> bool:
        """Whether the process is gone, left for `kill` to clear away."""
        return self._process.poll() is not None

    def _write(self, selector: selectors.BaseSelector) -> None:
        try:
            sent = os.write(self._fds[0], self._outgoing)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._outgoing)  # the end of its output tells why
        del self._outgoing[:sent]
        if not self._outgoing:
            selector.unregister(self._fds[0])

    def _read_messages(self) -> None:
        data, ended = _drain(self._fds[1])
        if data:
            self._heard = time.monotonic()
        try:
            for message in self._decoder.feed(data):
                self._take(message)
        except wire.WireError as error:
            self._give_up("crashed", str(error))
        if ended and self.answer is None:
            self._give_up("crashed", self._why_it_ended())

    def _take(self, message: wire.Message) -> None:
        fields = message.fields
        kind = fields.get("kind")
        if kind == "beat" or fields.get("id") != self._number:
            return  # the answer to a command that was interrupted
        if kind == "hello":
            self.hello = fields
        if kind == "error":
            for_user = bool(fields["for_user"])
            reason = fields["message"] if for_user else f"{fields['type']}: {fields['message']}"
            self.answer = WorkerFailure("raised", _one_line(reason), fields["traceback"], for_user)
        else:
            self.answer = message

    def _read_words(self, selector: selectors.BaseSelector | None = None) -> None:
        data, ended = _drain(self._fds[2])
        # A closed pipe is ready for ever; the wait would turn into a busy loop.
        if ended and selector is not None:
            selector.unregister(self._fds[2])
        self._words += data
        del self._words[:-LAST_WORDS_BYTES]

    def _give_up(self, kind: str, reason: str) -> None:
        self._read_words()
        words = self._words.decode(errors="replace").strip()
        last = words.splitlines()[-1] if words else ""
        self.answer = WorkerFailure(kind, _one_line(f"{reason}; it last wrote: {last}" if last else reason), words)

    def _why_it_ended(self) -> str:
        try:
            code = self._process.wait(PARTING_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"ended with code {code}"


def wait_for_answers(processes: Sequence[WorkerProcess]) -> None:
    """Serve all pipes until each process has an answer, be it that there will be none.

    Args:
        processes: those that have a command or are starting; read `answer` afterwards.
    """
    with selectors.DefaultSelector() as selector:
        waiting = [process for process in processes if process.answer is None]
        for process in waiting:
            process.register(selector)
        while waiting:
            left = min(process.seconds_left() for process in waiting)
            for key, _ in selector.select(max(0.0, left)):
                key.data()
            for process in waiting:
                process.check_time()
                if process.answer is not None:
                    process.unregister(selector)
            waiting = [process for process in waiting if process.answer is None]


def stop_all(processes: Sequence[WorkerProcess | None]) -> None:
    """End processes, those that can by themselves.

    Args:
        processes: any of them; None is passed over.
    """
    alive = [process for process in processes if process is not None]
    for process in alive:
        process.part()
    deadline = time.monotonic() + PARTING_SECONDS
    while time.monotonic() < deadline and not all(process.has_ended() for process in alive):
        time.sleep(0.01)
    for process in alive:
        process.kill()


def _drain(fd: int) -> tuple[bytes, bool]:
    """All that lies in a pipe, and whether its other end is closed."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return b"".join(parts), False
        except OSError:
            return b"".join(parts), True
        if not part:
            return b"".join(parts), True
        parts.append(part)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
