"""A pool of worker processes with a hard time limit for reward functions.

The workers are started as fresh interpreters rather than by multiprocessing: nothing of the training process
is copied into them (no CUDA context, no torch), its main script is not run again, and the pool works from any
thread. A worker that overruns its limit is killed with all its children and replaced.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Container, Mapping
from multiprocessing.connection import wait
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.calling import Batch, Failure, Outcome, Signature
from mmrl.rewards.process import LostWorkerError, Worker

__all__ = ["WorkerPool", "default_workers"]

LOAD_SECONDS = 120.0
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
        self._workers: list[Worker] = []
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
            return self.free_worker((), spec, what).loaded[spec]

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
            try:
                worker = self.free_worker((), spec)
            except UserError as error:  # it could be loaded before, so the machine is to blame
                return Failure("crashed", str(error))
            try:
                worker.send(("batch", spec, dict(options), batch))
                return worker.receive(limit_s)
            except LostWorkerError as lost:
                self.discard(worker)
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

    def free_worker(self, busy: Container[Worker], spec: str, what: str = "reward") -> Worker:
        """Return a living worker that is not busy and has loaded the function; the caller holds the lock.

        Args:
            busy: Workers that cannot be used; fewer than the size of the pool.
            spec: Function.
            what: Config key that names it, for the errors.

        Raises:
            UserError: The function cannot be loaded.
        """
        for worker in [worker for worker in self._workers if worker not in busy and worker.has_ended()]:
            self.discard(worker)
        worker = next((worker for worker in self._workers if worker not in busy), None) or self._start()
        if spec not in worker.loaded:
            try:
                worker.send(("load", spec, what))
                reply = worker.receive(LOAD_SECONDS)
            except LostWorkerError as lost:
                self.discard(worker)
                raise UserError(f"{what}: {spec} cannot be loaded: {lost.failure.message}") from None
            if isinstance(reply, UserError):
                raise reply
            worker.loaded[spec] = reply
        return worker

    def discard(self, worker: Worker) -> None:
        """Stop a worker and forget it."""
        worker.stop()
        if worker in self._workers:
            self._workers.remove(worker)

    def _start(self) -> Worker:
        self._workers.append(Worker())
        return self._workers[-1]


def _stop_all(workers: list[Worker], owner: int) -> None:
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
        self.running: dict[Worker, deque[int]] = {}
        self.deadline: dict[Worker, float] = {}

    def finish(self) -> list[Outcome]:
        """Work until every row has an outcome or the time is up."""
        try:
            while self.waiting or self.running:
                if self.end is not None and time.monotonic() > self.end:
                    message = "given up: the rows together took too long; raise timeout_s if they are only slow"
                    self._give_up(Failure("timeout", message))
                    break
                self._hand_out()
                self._collect()
        finally:
            for worker in self.running:  # only after an error of our own: no reply may stay in a socket
                self.pool.discard(worker)
        return self.outcomes

    def _hand_out(self) -> None:
        share = -(-len(self.waiting) // (2 * self.pool.size))
        while self.waiting and len(self.running) < self.pool.size:
            try:
                worker = self.pool.free_worker(self.running, self.spec)
            except UserError as error:  # it could be loaded before, so the machine is to blame
                self._give_up(Failure("crashed", str(error)))
                return
            count = min(ROWS_AT_ONCE, max(1, share), len(self.waiting))
            self._send(worker, deque(self.waiting.popleft() for _ in range(count)))

    def _send(self, worker: Worker, rows: deque[int]) -> None:
        try:
            worker.send(("rows", self.spec, self.options, self.batch.select(list(rows))))
        except LostWorkerError as lost:
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
        connections: dict[Any, Worker] = {worker.connection: worker for worker in self.running}
        for connection in wait(list(connections), max(0.0, nearest - time.monotonic())):
            self._take(connections[connection])
        for worker in [worker for worker in self.running if time.monotonic() > self.deadline[worker]]:
            if not worker.connection.poll(0):
                message = f"no result after {self.limit_s:g} s; the worker was stopped"
                self._fail(worker, self.running[worker], Failure("timeout", message))

    def _take(self, worker: Worker) -> None:
        rows = self.running[worker]
        try:
            outcome = worker.receive(0.0)
        except LostWorkerError as lost:
            self._fail(worker, rows, lost.failure)
            return
        self.outcomes[rows.popleft()] = outcome
        self.deadline[worker] = time.monotonic() + self.limit_s
        if not rows:
            del self.running[worker], self.deadline[worker]

    def _fail(self, worker: Worker, rows: deque[int], failure: Failure) -> None:
        """Charge the failure to the row in work and give the worker's other rows back."""
        self.outcomes[rows.popleft()] = failure
        self.waiting.extendleft(reversed(rows))
        self.running.pop(worker, None)
        self.deadline.pop(worker, None)
        self.pool.discard(worker)

    def _give_up(self, failure: Failure) -> None:
        for row in [*self.waiting, *(row for rows in self.running.values() for row in rows)]:
            self.outcomes[row] = failure
        self.waiting.clear()
        for worker in list(self.running):
            self.pool.discard(worker)
        self.running.clear()
