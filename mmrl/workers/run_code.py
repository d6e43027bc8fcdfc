r"""Runs a program that a model wrote in a strict sandbox and returns its output.

    result = run_code("print(sum(range(10)))", timeout_s=5)
    result.stdout == "45\n" and result.exit_code == 0

Each program has its own process and folder, see `mmrl.workers.sandbox`. It gets its input as text and files and
answers with text: it never shares a process with the reward or the environment that judges it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mmrl.errors import UserError
from mmrl.workers import family
from mmrl.workers.sandbox import (
    ENTERED,
    Limits,
    over_limit,
    require_strict,
    strict_command,
    strict_environment,
)

PROGRAM = "program.py"
LOOK_SECONDS = 0.1
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class CodeResult:
    """Result of a program."""

    exit_code: int
    """Exit code of the process; negative if it was ended by a signal."""
    stdout: str
    """Standard output, truncated to the limit; bytes that are not UTF-8 are replaced."""
    stderr: str
    """Standard error, truncated in the same way."""
    seconds: float
    """Wall time in seconds, including the start."""
    stopped: str = ""
    """Limit that stopped it: timeout, memory, cpu, processes or files; empty if it ended normally."""
    cut: bool = False
    """Whether its output was truncated."""

    @property
    def succeeded(self) -> bool:
        """Whether it ended without an error."""
        return self.exit_code == 0 and not self.stopped


def run_code(
    source: str,
    *,
    stdin: str = "",
    files: Mapping[str, bytes] | None = None,
    timeout_s: float = 10.0,
    limits: Limits | None = None,
    output_bytes: int = 1 << 20,
) -> CodeResult:
    """Run Python source in a separate strict process.

    Args:
        source: the program.
        stdin: its standard input.
        files: contents by name, put into its working folder.
        timeout_s: seconds after which it is ended.
        limits: memory, CPU time, files and processes.
        output_bytes: most that is kept of each of its two outputs.

    Returns:
        Its outputs and how it ended. A program that fails is no error of this function.

    Raises:
        UserError: strict processes cannot be run here, or a file's name is no plain name.
    """
    require_strict()
    # Bytes that no text has are replaced: the program of a model may hold anything.
    contents = {**(files or {}), PROGRAM: source.encode(errors="replace")}
    for name in contents:
        # Plain names only, or `..` would reach outside its folder.
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise UserError(f"the file {name!r} of a program must be a plain name without a folder")
    with contextlib.ExitStack() as stack:
        given = {name: stack.enter_context(_in_memory(data)) for name, data in contents.items()}
        run = _Run(limits or Limits(), given, stdin.encode(errors="replace"), output_bytes)
    return run.result(timeout_s)


@contextlib.contextmanager
def _in_memory(data: bytes) -> Iterator[int]:
    """A descriptor from which bubblewrap reads a file of the program."""
    # In memory: the program must not find its source or data on a disk.
    with os.fdopen(os.memfd_create("file"), "w+b") as file:
        file.write(data)
        file.seek(0)
        yield file.fileno()


class _Run:
    """A program while it runs."""

    def __init__(self, limits: Limits, files: Mapping[str, int], stdin: bytes, output_bytes: int) -> None:
        self._token = secrets.token_hex(8)
        self._most = output_bytes
        self._input = stdin
        self._began = time.monotonic()
        self._cut = False
        self._limits = limits
        # A pipe on which the sandbox says that it has entered: a failure before that is ours, not the program's.
        self._report, said = os.pipe()
        # -I: no site packages of the user, and no environment variables that steer Python.
        command = [*strict_command(limits, (), files, said), sys.executable, "-I", PROGRAM]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**strict_environment(), family.TAG: self._token},
            start_new_session=True,
            pass_fds=(said, *files.values()),
            bufsize=0,
        )
        # Only the child holds the writing end, so that its end closes the pipe.
        os.close(said)
        self._pipes = [
            pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr) if pipe
        ]
        # Standard output and error; standard input is the first pipe.
        self._outputs = {fd: bytearray() for fd in self._pipes[1:]}
        self._selector = selectors.DefaultSelector()
        for fd in self._pipes:
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_WRITE if fd == self._pipes[0] else selectors.EVENT_READ)

    def result(self, timeout_s: float) -> CodeResult:
        """Wait for its end, or end it at the time limit."""
        try:
            stopped = self._serve(timeout_s)
        finally:
            # Also after an error here: nothing may outlive this call.
            entered = self._end()
        code = self._process.returncode
        if code > 128:  # bubblewrap's way to report a signal
            code = 128 - code
        # SIGXCPU names the limit; the hard limit a second later would only kill.
        if not stopped and code == -signal.SIGXCPU:
            stopped = "cpu"
        texts = [self._outputs[fd].decode(errors="replace") for fd in self._pipes[1:]]
        # The sandbox itself failed, which is a matter of the machine and not of the program.
        if not entered and not stopped:
            raise UserError(f"sandbox: strict no longer works on this machine: {texts[1].strip()[-200:]}")
        return CodeResult(code, texts[0], texts[1], time.monotonic() - self._began, stopped, self._cut)

    def _serve(self, timeout_s: float) -> str:
        """Move its input and outputs until it ends; returns why it has to be ended."""
        look_at = 0.0
        while True:
            # Nothing left to move: the process may still run with closed pipes.
            for key, _ in self._selector.select(LOOK_SECONDS if self._selector.get_map() else 0.0):
                self._move(int(key.fd))
            if self._process.poll() is not None:
                for fd in self._outputs:
                    # What is left in the pipes after its end.
                    self._move(fd)
                return ""
            if not self._selector.get_map():
                time.sleep(LOOK_SECONDS)
            now = time.monotonic()
            if now - self._began > timeout_s:
                return "timeout"
            # Memory and files are looked at less often than pipes.
            if now > look_at:
                look_at = now + LOOK_SECONDS
                if family.resident_bytes(self._process.pid) > self._limits.memory_mb * (1 << 20):
                    return "memory"
                if (over := over_limit(self._process.pid, self._limits)) is not None:
                    return over[0]

    def _move(self, fd: int) -> None:
        if fd == self._pipes[0]:
            self._write()
            return
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._forget(fd)
        room = self._most - len(self._outputs[fd])
        # What is over the limit is read and dropped, or the program would block on a full pipe.
        self._cut = self._cut or len(data) > room
        self._outputs[fd] += data[: max(0, room)]

    def _write(self) -> None:
        try:
            self._input = self._input[os.write(self._pipes[0], self._input) :] if self._input else b""
        except BlockingIOError:
            return
        except OSError:
            # Not an error: a program need not read its input.
            self._input = b""  # it does not read
        if not self._input and self._process.stdin is not None:
            self._forget(self._pipes[0])
            self._process.stdin.close()

    def _forget(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _end(self) -> bool:
        """Kill its remaining processes; returns whether the program had begun."""
        # As in `WorkerProcess.kill`: children first, then the group, then what has left it.
        family.end_descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        family.end_tagged(self._token)
        self._selector.close()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        os.set_blocking(self._report, False)
        try:
            return os.read(self._report, len(ENTERED)) == ENTERED
        except BlockingIOError:
            return False
        finally:
            os.close(self._report)
