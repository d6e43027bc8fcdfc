"""A worker process, seen from the training: started as a fresh interpreter, spoken to through a socket."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from mmrl.errors import RunError
from mmrl.rewards.calling import Failure, Signature

__all__ = ["LostWorkerError", "Worker"]

MESSAGE_SECONDS = 30


class LostWorkerError(Exception):
    """A worker that did not answer; it is stopped already."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Worker:
    """One worker process and the socket to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        # A stopped worker neither reads nor completes a message; it must not hold up the training.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", MESSAGE_SECONDS, 0))
        paths = [os.path.abspath(path) for path in sys.path]
        command = [sys.executable, "-P", "-m", "mmrl.rewards.worker", str(theirs.fileno()), str(os.getpid())]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise RunError(f"no worker process for rewards can be started: {error}") from error
        finally:
            theirs.close()
        self.connection = Connection(ours.detach())
        self.loaded: dict[str, Signature] = {}

    def send(self, message: Any) -> None:
        """Send a request.

        Raises:
            LostWorkerError: The worker does not take it.
        """
        try:
            self.connection.send(message)
        except OSError as error:
            self.stop()
            raise LostWorkerError(Failure("crashed", f"the worker does not take messages: {error}")) from None

    def receive(self, limit_s: float) -> Any:
        """Wait for a reply.

        Args:
            limit_s: Seconds after which the worker is stopped.

        Raises:
            LostWorkerError: There is none.
        """
        if not self.connection.poll(limit_s):
            self.stop()
            raise LostWorkerError(Failure("timeout", f"no result after {limit_s:g} s; the worker was stopped"))
        try:
            return self.connection.recv()
        except Exception as error:
            raise LostWorkerError(Failure("crashed", self._obituary(error))) from None

    def _obituary(self, error: Exception) -> str:
        ended = self.has_ended(1.0)
        self.stop()
        code = self.process.returncode
        if not ended:
            return f"the worker's reply is broken: {error!r}"
        if code < 0:
            return f"the worker was ended by signal {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def has_ended(self, patience_s: float = 0.0) -> bool:
        """Tell whether the process is gone; without reaping it, so that nobody else gets its group id yet."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):  # reaped already
            while os.waitid(os.P_PID, self.process.pid, flags) is None:
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
        return True

    def stop(self) -> None:
        """Kill the process and what it started; a second time does nothing."""
        if self.process.returncode is not None:
            return
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
