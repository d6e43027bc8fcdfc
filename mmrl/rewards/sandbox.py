"""A pool of worker processes with a hard time limit for reward functions.

The workers are started as fresh interpreters rather than by multiprocessing: nothing of the training process
is copied into them (no CUDA context, no torch), its main script is not run again, and the pool works from any
thread. A worker that overruns its limit is killed with all its children and replaced.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from mmrl.errors import RunError, UserError
from mmrl.rewards.calling import Batch, Failure, Outcome, Signature

__all__ = ["WorkerPool", "default_workers"]

LOAD_SECONDS = 120.0
MESSAGE_SECONDS = 30
ROWS_AT_ONCE = 16


def default_workers() -> int:
    """Return how many workers a pool starts at most: half of the usable cores, 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(1, cores // 2))


class WorkerPool:
    """Persistent worker processes, started when first needed and reused between calls.

    Args:
        size: Most workers at a time.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size or default_workers()
        self._workers: list[_Worker] = []
        self._lock = threading.RLock()
        self._closer = weakref.finalize(self, _stop_all, self._workers, os.getpid())

    def load(self, spec: str, what: str) -> Signature:
        """Import a function in a worker.

        Args:
            spec: `module:function` or `file.py:function`.
            what: Config key that names it, for the errors.

        Returns:
            The named arguments it takes.

        Raises:
            UserError: It cannot be loaded.
        """
        with self._lock:
            return self._ready(0, spec, what)

    def call_batch(self, spec: str, options: Mapping[str, Any], batch: Batch, limit_s: float) -> Any:
        """Call a function once with all rows.

        Args:
            spec: Function.
            options: Keyword arguments.
            batch: Rows.
            limit_s: Seconds after which the worker is killed.

        Returns:
            One outcome a row, or one failure for the whole call.
        """
        with self._lock:
            self._ready(0, spec, "reward")
            worker = self._workers[0]
            try:
                worker.send(("batch", spec, dict(options), batch))
                return worker.receive(limit_s)
            except _Lost as lost:
                self._workers.remove(worker)
                return lost.failure
            except Exception as error:
                return Failure("raised", f"the rows cannot be sent to a worker: {error}")

    def call_rows(
        self, spec: str, options: Mapping[str, Any], batch: Batch, limit_s: float, total_s: float | None = None
    ) -> list[Outcome]:
        """Call a function row by row on all workers; a row that hangs or crashes costs itself only.

        Args:
            spec: Function.
            options: Keyword arguments.
            batch: Rows.
            limit_s: Seconds for one row.
            total_s: Seconds after which the remaining rows are given up.

        Returns:
            One outcome a row.
        """
        with self._lock:
            return _RowRun(self, spec, options, batch, limit_s, total_s).finish()

    def close(self) -> None:
        """Stop all workers; a later call starts new ones."""
        with self._lock:
            _stop_all(self._workers, os.getpid())

    def _ready(self, index: int, spec: str, what: str = "reward") -> Signature:
        """Make sure that the worker of this place runs and has loaded the function."""
        while len(self._workers) <= index:
            self._workers.append(_Worker())
        worker = self._workers[index]
        if spec not in worker.loaded:
            try:
                worker.send(("load", spec, what))
                reply = worker.receive(LOAD_SECONDS)
            except _Lost as lost:
                self._workers.remove(worker)
                raise UserError(f"{what}: {spec} cannot be loaded: {lost.failure.message}") from None
            if isinstance(reply, UserError):
                raise reply
            worker.loaded[spec] = reply
        return worker.loaded[spec]

    def _discard(self, worker: _Worker) -> None:
        worker.stop()
        if worker in self._workers:
            self._workers.remove(worker)


class _Lost(Exception):
    """A worker that did not answer; it is stopped already."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Worker:
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
        try:
            self.connection.send(message)
        except OSError as error:
            self.stop()
            raise _Lost(Failure("crashed", f"the worker does not take messages: {error}")) from None

    def receive(self, limit_s: float) -> Any:
        if not self.connection.poll(limit_s):
            self.stop()
            raise _Lost(Failure("timeout", f"no result after {limit_s:g} s; the worker was stopped"))
        try:
            return self.connection.recv()
        except Exception as error:
            raise _Lost(Failure("crashed", self._obituary(error))) from None

    def _obituary(self, error: Exception) -> str:
        ended = self._has_ended(1.0)
        self.stop()
        code = self.process.returncode
        if not ended:
            return f"the worker's reply is broken: {error!r}"
        if code < 0:
            return f"the worker was ended by signal {signal.Signals(-code).name}"
        return f"the worker ended with exit code {code}"

    def _has_ended(self, patience_s: float) -> bool:
        """Wait for the end without reaping, so that its process group cannot belong to anybody else yet."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        end = time.monotonic() + patience_s
        while os.waitid(os.P_PID, self.process.pid, flags) is None:
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

    def stop(self) -> None:
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _stop_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked copy of the training process must not end its workers
    while workers:
        workers.pop().stop()


class _RowRun:
    """The rows of one call on their way through the workers."""

    def __init__(
        self,
        pool: WorkerPool,
        spec: str,
        options: Mapping[str, Any],
        batch: Batch,
        limit_s: float,
        total_s: float | None,
    ) -> None:
        self.pool, self.spec, self.options, self.batch = pool, spec, dict(options), batch
        self.limit_s = limit_s
        self.end = None if total_s is None else time.monotonic() + total_s
        self.outcomes: list[Outcome] = [None] * len(batch)
        self.waiting: deque[int] = deque(range(len(batch)))
        self.running: dict[_Worker, deque[int]] = {}
        self.deadline: dict[_Worker, float] = {}

    def finish(self) -> list[Outcome]:
        """Work until every row has an outcome or the time is up."""
        try:
            while self.waiting or self.running:
                if self.end is not None and time.monotonic() > self.end:
                    self._give_up()
                    break
                self._hand_out()
                self._collect()
        finally:
            for worker in self.running:  # only after an error of our own: no reply may stay in a socket
                self.pool._discard(worker)
        return self.outcomes

    def _hand_out(self) -> None:
        share = -(-len(self.waiting) // (2 * self.pool.size))
        while self.waiting and len(self.running) < self.pool.size:
            index = next(
                (i for i, worker in enumerate(self.pool._workers) if worker not in self.running),
                len(self.pool._workers),
            )
            self.pool._ready(index, self.spec)
            worker = self.pool._workers[index]
            count = min(ROWS_AT_ONCE, max(1, share), len(self.waiting))
            rows = deque(self.waiting.popleft() for _ in range(count))
            self._send(worker, rows)

    def _send(self, worker: _Worker, rows: deque[int]) -> None:
        try:
            worker.send(("rows", self.spec, self.options, self.batch.select(list(rows))))
        except _Lost as lost:
            self._fail(worker, rows, lost.failure)
        except Exception as error:
            self._sort_out(rows, error)
        else:
            self.running[worker] = rows
            self.deadline[worker] = time.monotonic() + self.limit_s

    def _sort_out(self, rows: deque[int], error: Exception) -> None:
        """Fail the rows that cannot be pickled and give the others back."""
        for row in reversed(rows):
            try:
                pickle.dumps((self.options, self.batch.select([row])))
                blamed = len(rows) == 1
            except Exception as own_error:
                blamed, error = True, own_error
            if blamed:
                message = f"the row cannot be sent to a worker: {type(error).__name__}: {error}"
                self.outcomes[row] = Failure("raised", message)
            else:
                self.waiting.appendleft(row)

    def _collect(self) -> None:
        if not self.running:
            return
        nearest = min(self.deadline[worker] for worker in self.running)
        if self.end is not None:
            nearest = min(nearest, self.end)
        connections = {worker.connection: worker for worker in self.running}
        ready = wait(list(connections), max(0.0, nearest - time.monotonic()))
        for connection in ready:
            self._take(connections[connection])  # type: ignore[index]
        for worker in [w for w in self.running if time.monotonic() > self.deadline[w]]:
            if not worker.connection.poll(0):
                message = f"no result after {self.limit_s:g} s; the worker was stopped"
                self._fail(worker, self.running[worker], Failure("timeout", message))

    def _take(self, worker: _Worker) -> None:
        rows = self.running[worker]
        try:
            outcome = worker.receive(0.0)
        except _Lost as lost:
            self._fail(worker, rows, lost.failure)
            return
        self.outcomes[rows.popleft()] = outcome
        self.deadline[worker] = time.monotonic() + self.limit_s
        if not rows:
            del self.running[worker], self.deadline[worker]

    def _fail(self, worker: _Worker, rows: deque[int], failure: Failure) -> None:
        """Charge the failure to the row in work and give the worker's other rows back."""
        self.outcomes[rows.popleft()] = failure
        self.waiting.extendleft(reversed(rows))
        self.running.pop(worker, None)
        self.deadline.pop(worker, None)
        self.pool._discard(worker)

    def _give_up(self) -> None:
        left = [*self.waiting, *(row for rows in self.running.values() for row in rows)]
        message = "given up: the rows together took too long; raise timeout_s if the function is only slow"
        for row in left:
            self.outcomes[row] = Failure("timeout", message)
        self.waiting.clear()
        for worker in list(self.running):
            self.pool._discard(worker)
        self.running.clear()
