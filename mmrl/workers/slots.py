"""The workers of a pool: who runs, who is free, who has answered, and what became of those that failed."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Collection, Container, Iterable

from mmrl.workers.engine import Engine, WorkerSpec
from mmrl.workers.failures import WORKER_FAILURES, WorkerFailure
from mmrl.workers.worker import Answer, Pending, Worker


class Slots:
    """Workers by number; a slot is empty until its worker is started, and after it failed."""

    def __init__(self, spec: WorkerSpec, size: int, engine: Engine) -> None:
        self.spec, self.size, self._engine = spec, size, engine
        self.workers: list[Worker | None] = [None] * size
        self.counts: dict[str, int] = dict.fromkeys((*WORKER_FAILURES, "restarted"), 0)
        self.closed = False
        self._failed: set[int] = set()
        self.restarts_in_a_row = 0
        self.last_failure = WorkerFailure("", "")
        self._finalizer = weakref.finalize(self, _stop_all, self.workers, spec.closing_s, os.getpid())

    def worker(self, slot: int) -> Worker:
        """The worker of a slot, started if there is none."""
        worker = self.workers[slot]
        if worker is None:
            worker = self.workers[slot] = Worker(self._engine, self.spec)
            self.closed = False
            if slot in self._failed:
                self._failed.remove(slot)
                self.counts["restarted"] += 1
                self.restarts_in_a_row += 1
        return worker

    def free(self, busy: Container[int]) -> int:
        """A slot that is not busy, one whose worker runs where there is one; it is started otherwise."""
        idle = [slot for slot in range(self.size) if slot not in busy]
        for slot in idle:
            worker = self.workers[slot]
            if worker is not None and (worker.interrupted or worker.handle.has_ended()):
                self.discard(slot)
        slot = next((slot for slot in idle if self.workers[slot] is not None), idle[0])
        self.worker(slot)
        return slot

    def collect(self, slots: Collection[int], at_most_s: float = math.inf) -> list[tuple[int, Pending, Answer]]:
        """Wait, at most so many seconds, until one of these workers has answered or failed."""
        end, patience_s = time.monotonic() + at_most_s, 0.0
        while True:
            self._engine.wait(patience_s)
            found = [(slot, *pair) for slot in slots for pair in self.worker(slot).collect()]
            left_s = end - time.monotonic()
            if found or left_s <= 0:
                return found
            patience_s = max(0.0, min(left_s, *(self.worker(slot).patience_s() for slot in slots)))

    def gather(self, slots: Iterable[int]) -> dict[int, Answer]:
        """Wait until each of these workers has answered all its requests or failed."""
        answers: dict[int, Answer] = {}
        waiting = set(slots)
        while waiting:
            for slot, _, answer in self.collect(waiting):
                answers[slot] = answer
                if isinstance(answer, WorkerFailure) or not self.worker(slot).pending:
                    waiting.discard(slot)
        return answers

    def lose(self, slot: int, failure: WorkerFailure) -> None:
        """Count a failure and kill the worker; its next start is a restart."""
        self.counts[failure.kind] += 1
        self.last_failure = failure
        self._failed.add(slot)
        self.discard(slot)

    def discard(self, slot: int) -> None:
        """Kill the worker of a slot, without a count."""
        worker, self.workers[slot] = self.workers[slot], None
        if worker is not None:
            worker.handle.kill()

    def close(self) -> None:
        """End all workers."""
        _stop_all(self.workers, self.spec.closing_s, os.getpid())
        self._failed.clear()
        self.closed = True


def _stop_all(workers: list[Worker | None], closing_s: float, owner: int) -> None:
    """End workers, those that can by themselves; a forked copy of the owner must leave them alone."""
    if os.getpid() != owner:
        return
    handles = [worker.handle for worker in workers if worker is not None]
    workers[:] = [None] * len(workers)
    if closing_s > 0:
        for handle in handles:
            handle.ask_to_end()
    deadline = time.monotonic() + closing_s
    while time.monotonic() < deadline and not all(handle.has_ended() for handle in handles):
        time.sleep(0.01)
    for handle in handles:
        handle.kill()
