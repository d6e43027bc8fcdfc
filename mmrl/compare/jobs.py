"""Commands run side by side, each with a log, a time limit and one thread, and none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

_POLL_S = 0.1
_GRACE_S = 10.0


@dataclass(frozen=True)
class Job:
    """A command to run."""

    label: str
    """Name in messages."""
    command: tuple[str, ...]
    """Program and arguments."""
    log: Path
    """File that takes standard output and error."""
    before: Callable[[], None] | None = None
    """Called right before the start."""


@dataclass(frozen=True)
class JobResult:
    """End of a command."""

    job: Job
    """The command."""
    returncode: int
    """Exit status; negative for a signal."""
    seconds: float
    """Run time."""
    timed_out: bool
    """Whether it was stopped at the time limit."""

    @property
    def reason(self) -> str | None:
        """Reason of a failure, with the last line of output; None after success."""
        if self.timed_out:
            return f"stopped after {self.seconds:.0f} s, its time limit"
        if self.returncode == 0:
            return None
        return f"exit code {self.returncode}: {_last_line(self.job.log)}"


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    started: float


def run_jobs(jobs: Sequence[Job], limit: int, timeout_s: float, on_done: Callable[[JobResult], None]) -> None:
    """Run commands, at most `limit` at once; when this call ends, for any reason, its commands have ended too."""
    waiting = deque(jobs)
    running: list[_Running] = []
    with _signals_raise():
        try:
            _run(waiting, running, limit, timeout_s, on_done)
        finally:
            for entry in running:
                _stop(entry.process)


def _run(
    waiting: deque[Job],
    running: list[_Running],
    limit: int,
    timeout_s: float,
    on_done: Callable[[JobResult], None],
) -> None:
    while waiting or running:
        while waiting and len(running) < limit:
            running.append(_start(waiting.popleft()))
        for entry in list(running):
            result = _poll(entry, timeout_s)
            if result is not None:
                running.remove(entry)
                on_done(result)
        if running:
            time.sleep(_POLL_S)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP, which otherwise end a process on the spot, raise SystemExit, so that commands are stopped."""

    def leave(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    previous: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for ends in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(ends) == signal.SIG_DFL:
                previous[ends] = signal.signal(ends, leave)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _start(job: Job) -> _Running:
    if job.before is not None:
        job.before()
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("ab") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a separate group, so that its worker processes end with it
        )
    return _Running(job, process, time.monotonic())


def _poll(entry: _Running, timeout_s: float) -> JobResult | None:
    seconds = time.monotonic() - entry.started
    code = entry.process.poll()
    if code is not None:
        return JobResult(entry.job, code, seconds, timed_out=False)
    if seconds <= timeout_s:
        return None
    _stop(entry.process)
    return JobResult(entry.job, entry.process.returncode, seconds, timed_out=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        return


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        return f"no log ({error})"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
