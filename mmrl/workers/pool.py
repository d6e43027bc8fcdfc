"""A pool of worker processes, which may raise, hang or die without affecting this process.

    spec = WorkerSpec("path/to/service.py:make", {"limit": 3}, purpose="parsing")
    with WorkerPool(spec, 4) as pool:
        answers = pool.map(lambda row: Request({"text": texts[row]}), len(texts), timeout_s=10.0)

`map` is for work that any worker can do: requests are spread over workers, which are started when they are needed.
`ask` is for workers with a state of their own, such as a simulated scene: each has a slot and its own requests. A
worker that does not answer in time, ends or raises is killed with everything that it started; a `WorkerFailure` takes
the place of its answer.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Self, TypeAlias

from mmrl.errors import RunError, UserError
from mmrl.workers.engine import WORKER_FAILURES, Engine, LocalEngine, WorkerFailure, WorkerSpec, one_line
from mmrl.workers.wire import Message
from mmrl.workers.worker import Answer, Pending, Preparation, Request, Worker

FIRST_SHARE = 0.1
"""Fraction of its time that a request gets at first once another one has hung,"""
SLOWEST_FACTOR = 4.0
"""or this multiple of the slowest answer's time, if that is more."""
HUNG_IN_A_ROW = 10
"""Number of consecutive requests that hang in their full time after which the remaining hung ones are given up."""
AT_ONCE = 16
"""Maximum number of requests queued in a worker's pipe, so that it does not have to wait for the pool between them."""

Check: TypeAlias = "Callable[[Request, Message], WorkerFailure | None]"
"""Returns what is wrong with an answer, or None."""


class Slots:
    """Workers by number; a slot is empty until its worker is started, and after it failed."""

    def __init__(self, spec: WorkerSpec, size: int, engine: Engine) -> None:
        self.spec, self.size, self._engine = spec, size, engine
        # One list for good: the finaliser and `_stop_all` work on it.
        self.workers: list[Worker | None] = [None] * size
        self.counts: dict[str, int] = dict.fromkeys((*WORKER_FAILURES, "restarted"), 0)
        self.closed = False
        self._failed: set[int] = set()
        self.restarts_in_a_row = 0
        self.last_failure = WorkerFailure("", "")
        # Must not hold `self`; `_stop_all` gets the number of this process, since a fork inherits the finaliser.
        self._finalizer = weakref.finalize(self, _stop_all, self.workers, spec.closing_s, os.getpid())

    def worker(self, slot: int) -> Worker:
        """The worker of a slot, started if there is none."""
        worker = self.workers[slot]
        # Started only when it is needed: a call with few requests starts few workers.
        if worker is None:
            worker = self.workers[slot] = Worker(self._engine, self.spec)
            self.closed = False
            # Only after a failure: workers of a pool that was closed and used again are no restarts.
            if slot in self._failed:
                self._failed.remove(slot)
                self.counts["restarted"] += 1
                self.restarts_in_a_row += 1
        return worker

    def free(self, busy: Container[int]) -> int:
        """A slot that is not busy, preferably with a running worker; otherwise one is started."""
        idle = [slot for slot in range(self.size) if slot not in busy]
        for slot in idle:
            worker = self.workers[slot]
            # One interrupted call (Ctrl-C, an error) leaves a worker that is still busy with what nobody waits for.
            if worker is not None and (worker.interrupted or worker.handle.has_ended()):
                self.discard(slot)
        slot = next((slot for slot in idle if self.workers[slot] is not None), idle[0])
        self.worker(slot)
        return slot

    def collect(self, slots: Collection[int], at_most_s: float = math.inf) -> list[tuple[int, Pending, Answer]]:
        """Wait, up to a limit in seconds, until one of these workers has replied or failed."""
        # 0 at first: answers that have arrived already are taken without a wait.
        end, patience_s = time.monotonic() + at_most_s, 0.0
        while True:
            self._engine.wait(patience_s)
            # `wait` serves all pipes of the engine, also those of workers that are not waited for here.
            found = [(slot, *pair) for slot in slots for pair in self.worker(slot).collect()]
            left_s = end - time.monotonic()
            if found or left_s <= 0:
                return found
            patience_s = max(0.0, min(left_s, *(self.worker(slot).patience_s() for slot in slots)))

    def gather(self, slots: Iterable[int]) -> dict[int, Answer]:
        """Wait until each of these workers has replied to all its requests or failed."""
        answers: dict[int, Answer] = {}
        waiting = set(slots)
        while waiting:
            for slot, _, answer in self.collect(waiting):
                answers[slot] = answer
                # A failure ends a worker, so its other requests have no answer either.
                if isinstance(answer, WorkerFailure) or not self.worker(slot).pending:
                    waiting.discard(slot)
        return answers

    def lose(self, slot: int, failure: WorkerFailure) -> None:
        """Count a failure and kill the worker; its next start is a restart."""
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
        self.last_failure = failure
        # Counted as a restart when the slot is used again, not now: a closed pool never does.
        self._failed.add(slot)
        self.discard(slot)

    def discard(self, slot: int) -> None:
        """Kill the worker of a slot without counting it."""
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
    # In place: the finaliser holds this very list, and workers may be started again after `close`.
    handles = [worker.handle for worker in workers if worker is not None]
    workers[:] = [None] * len(workers)
    # 0 kills at once, for services that have nothing to close.
    if closing_s > 0:
        for handle in handles:
            handle.ask_to_end()
    deadline = time.monotonic() + closing_s
    while time.monotonic() < deadline and not all(handle.has_ended() for handle in handles):
        time.sleep(0.01)
    for handle in handles:
        handle.kill()


class Spread:
    """The requests of one call while the workers process them.

    A failure is attributed to the request that its worker was processing; requests queued behind it go to other
    workers. After one request has hung, the others first get only a part of their time, so that normal requests do not
    have to wait for more that hang. Requests that exceed it get their full time at the end, until some of them in a row
    have hung again.
    """

    def __init__(
        self,
        slots: Slots,
        make_request: Callable[[int], Request],
        count: int,
        timeout_s: float,
        total_s: float | None,
        preparation: Preparation | None,
    ) -> None:
        self._slots, self._make_request, self._timeout_s = slots, make_request, timeout_s
        self._total_s, self._preparation = total_s, preparation
        # One limit for the whole call, on top of the limit of each request.
        self._end = math.inf if total_s is None else time.monotonic() + total_s
        self._answers: dict[int, Answer] = {}
        self._count = count
        self._waiting = deque(range(count))
        self._running: set[int] = set()
        self._again: deque[int] = deque()
        self._first_s, self._retrying = timeout_s, False
        self._slowest_s, self._hung_in_a_row = 0.0, 0
        self._heard_at: dict[int, float] = {}

    def run(self) -> list[Answer]:
        """Work until every request has a reply or the time is up."""
        try:
            while self._waiting or self._running or self._again:
                if time.monotonic() > self._end:
                    reason = f"not all requests were completed within {self._total_s:g} s"
                    self._give_up(WorkerFailure("hung", reason, stage="total", limit_s=self._total_s))
                    break
                self._hand_out()
                self._take_answers()
        finally:
            self._discard_running()  # only after an error of our own: no answer may stay in a pipe
        return [self._answers[number] for number in range(self._count)]

    def _hand_out(self) -> None:
        if self._again and not self._waiting and not self._running:
            self._waiting, self._again = self._again, deque()
            self._first_s, self._retrying, self._hung_in_a_row = self._timeout_s, True, 0
        # Half of a fair share, so that the last requests are not all behind one slow one.
        share = -(-len(self._waiting) // (2 * self._slots.size))
        while self._waiting and len(self._running) < self._slots.size:
            count = min(AT_ONCE, max(1, share), len(self._waiting))
            self._send(self._slots.free(self._running), [self._waiting.popleft() for _ in range(count)])

    def _send(self, slot: int, numbers: list[int]) -> None:
        worker, first = self._slots.worker(slot), self._preparation
        self._running.add(slot)
        # In the pipe before the first request, so that it costs no round trip.
        if first is not None and first.key not in worker.prepared:
            worker.send(first.request, first.timeout_s, "prepare", first.key)
        for number in numbers:
            try:
                # Made now and not before: all requests of a batch together can be larger than memory.
                worker.send(self._make_request(number), self._first_s, tag=number)
            except Exception as error:
                reason = one_line(f"{type(error).__name__}: {error}")
                self._answers[number] = WorkerFailure("raised", reason, stage="send")
        worker.flush()
        self._heard_at[slot] = time.monotonic()
        # Every request of this slot failed to be made, so nothing will come from it.
        if not worker.pending:
            self._running.discard(slot)

    def _take_answers(self) -> None:
        if not self._running:
            return
        # With no time left it returns at once, and `run` gives up.
        found = self._slots.collect(self._running, self._end - time.monotonic())
        now = time.monotonic()
        for slot, pending, answer in found:
            if pending.stage == "answer" and not isinstance(answer, WorkerFailure):
                self._answers[pending.tag] = answer
                # Since the worker's last answer, not since it was sent: it may have waited behind others in the pipe.
                self._slowest_s, self._hung_in_a_row = max(self._slowest_s, now - self._heard_at[slot]), 0
            self._heard_at[slot] = now
        # After all answers: `_fail` may give up the rest, and answers that are there count.
        for slot, pending, answer in found:
            if isinstance(answer, WorkerFailure) and slot in self._running:
                self._fail(slot, pending, answer)
        self._running = {slot for slot in self._running if self._slots.worker(slot).pending}

    def _fail(self, slot: int, pending: Pending, failure: WorkerFailure) -> None:
        """Charge the failure to the request in work and give the worker's other requests back."""
        # These were only waiting in the pipe: what failed was the request before them.
        behind = [other.tag for other in self._slots.worker(slot).pending if other.stage == "answer"]
        # First again and in their order, so that equal runs send equal requests in equal order.
        self._waiting.extendleft(reversed(behind))
        self._running.discard(slot)
        self._slots.lose(slot, failure)
        if pending.stage != "answer":  # no other worker will get further
            self._give_up(failure)
        # It had a part of its time only; the whole of it comes when nobody else waits.
        elif failure.kind == "hung" and pending.timeout_s < self._timeout_s:
            self._again.append(pending.tag)
        else:
            self._answers[pending.tag] = failure
            if failure.kind == "hung":
                self._note_hung(failure)

    def _note_hung(self, failure: WorkerFailure) -> None:
        """Give the others a part of their time first, or give up on those that had it."""
        # Measured on this call's own answers: a fixed share would cut off work that is slow but sound.
        if self._first_s == self._timeout_s and not self._retrying:
            self._first_s = min(self._timeout_s, max(FIRST_SHARE * self._timeout_s, SLOWEST_FACTOR * self._slowest_s))
        self._hung_in_a_row += 1
        if self._retrying and self._hung_in_a_row >= HUNG_IN_A_ROW:
            self._give_up(failure)

    def _give_up(self, failure: WorkerFailure) -> None:
        for number in range(self._count):
            self._answers.setdefault(number, failure)
        self._waiting.clear()
        self._again.clear()
        self._discard_running()

    def _discard_running(self) -> None:
        for slot in self._running:
            self._slots.discard(slot)
        self._running.clear()


class WorkerPool:
    """Workers in numbered slots; safe to use from several threads.

    Args:
        spec: how to start a worker.
        size: slots.
        engine: starts the workers; processes of this machine when None.
        max_restarts: restarts per slot without `note_success`, after which `ask_with_retries` raises; None for any
            number.
        goal: what `note_success` reports, for that error.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        size: int,
        *,
        engine: Engine | None = None,
        max_restarts: int | None = None,
        goal: str = "success",
    ) -> None:
        self.size, self._max_restarts, self._goal = size, max_restarts, goal
        # Not started here: a pool that is never used costs nothing.
        self._slots = Slots(spec, size, engine or LocalEngine())
        # Reentrant: `lose` and `close` are called from inside `ask`.
        self._lock = threading.RLock()
        self._submitted: dict[int, tuple[Request, Check | None]] = {}
        """By slot, requests of `submit` without an answer."""

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures by kind (keys of `WORKER_FAILURES`) and restarts since the pool was created."""
        return self._slots.counts

    @property
    def closed(self) -> bool:
        """Whether `close` has ended the workers; a request starts new ones."""
        return self._slots.closed

    def start(self) -> Message | WorkerFailure:
        """Start all workers and wait until each has said hello or failed.

        Returns:
            The first hello; a failure, after which the pool is closed, where all failed or where a service says that
            the user asked for something impossible.

        Raises:
            RunError: no process can be started.
        """
        with self._lock:
            # Empty slots only: `start` may be called on a pool that has lost some workers.
            self.start_missing()
            hellos = self._slots.gather(range(self.size))
            failed = {slot: hello for slot, hello in sorted(hellos.items()) if isinstance(hello, WorkerFailure)}
            for slot, failure in failed.items():
                # Some of many may fail for want of memory or a licence; the others carry the run.
                if failure.for_user or len(failed) == self.size:
                    self.close()
                    return failure
                self.lose(slot, failure)
            return next(hello for _, hello in sorted(hellos.items()) if isinstance(hello, Message))

    def start_missing(self) -> None:
        """Start a worker in every empty slot, without waiting for it."""
        with self._lock:
            for slot in range(self.size):
                self._slots.worker(slot)

    def ask(
        self,
        requests: Mapping[int, Request],
        timeout_s: float,
        *,
        check: Check | None = None,
    ) -> dict[int, Answer]:
        """Send one request to each of some workers and wait for all replies.

        Args:
            requests: by slot.
            timeout_s: seconds for each answer.
            check: returns what is wrong with an answer, which then counts as a failure, or None.

        Returns:
            Answers by slot. A worker that failed has been killed; its slot is empty until it is used or
            `start_missing`.

        Raises:
            UserError: a service says that the user asked for something impossible; the pool is closed.
            RunError: a process cannot be started.
        """
        with self._lock:
            for slot, request in requests.items():
                # All are sent before any is waited for, so that workers work at the same time.
                self._send(slot, request, timeout_s)
            found = self._slots.gather(requests)
            return {slot: self._checked(slot, request, check, found[slot]) for slot, request in requests.items()}

    def submit(self, slot: int, request: Request, timeout_s: float, *, check: Check | None = None) -> None:
        """Send a request to a worker without waiting; `poll` returns the answer.

        Args:
            slot: of the worker; a request that it still has is forgotten.
            request: what is sent.
            timeout_s: seconds for the answer.
            check: as for `ask`.

        Raises:
            UserError: the pool is closed.
            RunError: a process cannot be started.
        """
        with self._lock:
            self._send(slot, request, timeout_s)
            self._submitted[slot] = request, check

    def poll(self, timeout_s: float = math.inf) -> dict[int, Answer]:
        """Answers to submitted requests: those that are there, or the next ones.

        Args:
            timeout_s: seconds to wait if there is none; 0 only looks.

        Returns:
            Answers by slot; none if the time is up, or if there is no request. A worker that failed has been killed,
            as in `ask`.

        Raises:
            UserError: a service says that the user asked for something impossible.
        """
        end, answers = time.monotonic() + timeout_s, dict[int, Answer]()
        with self._lock:
            while self._submitted and not answers:
                for slot, pending, answer in self._slots.collect(self._submitted, max(0.0, end - time.monotonic())):
                    # a new process says hello first
                    if pending.stage == "answer" or isinstance(answer, WorkerFailure):
                        answers[slot] = self._checked(slot, *self._submitted.pop(slot), answer=answer)
                if time.monotonic() >= end:
                    break
        return answers

    def forget(self, slot: int) -> None:
        """Drop the submitted request of a slot; its answer is no longer needed."""
        with self._lock:
            if self._submitted.pop(slot, None) is not None:
                self._slots.worker(slot).forget()

    def ask_with_retries(
        self,
        requests: Mapping[int, Request],
        timeout_s: float,
        retries: int,
        *,
        check: Check | None = None,
    ) -> dict[int, Answer]:
        """Like `ask`, but failed requests are retried in a fresh process.

        Args:
            requests: by slot.
            timeout_s: seconds for each answer.
            retries: how often a request is tried again.
            check: as for `ask`.

        Returns:
            Answers by slot.

        Raises:
            UserError: a service says that the user asked for something impossible; the pool is closed.
            RunError: a process cannot be started, or there were too many restarts without `note_success`.
        """
        answers: dict[int, Answer] = {}
        with self._lock:
            # By slot, and only those that failed: an answer that is there is not asked for again.
            waiting = dict(requests)
            for _ in range(1 + retries):
                if not waiting:
                    break
                # Fresh processes for all rows that failed in the last try, counted before another one is spent on them.
                self.start_missing()
                self.check_restarts()
                answers.update(self.ask(waiting, timeout_s, check=check))
                waiting = {slot: requests[slot] for slot in waiting if isinstance(answers[slot], WorkerFailure)}
        return answers

    def map(
        self,
        make_request: Callable[[int], Request],
        count: int,
        timeout_s: float,
        *,
        total_s: float | None = None,
        preparation: Preparation | None = None,
    ) -> list[Answer]:
        """Distribute requests over the workers; a request that hangs or crashes its worker fails alone.

        Args:
            make_request: makes a request from its number, when it is sent.
            count: requests.
            timeout_s: seconds for one request.
            total_s: seconds after which the remaining requests are given up (stage total); None for any time.
            preparation: what a worker has to answer first; a failure of it is that of all remaining requests.

        Returns:
            One answer a request.

        Raises:
            RunError: a process cannot be started.
        """
        with self._lock:
            return Spread(self._slots, make_request, count, timeout_s, total_s, preparation).run()

    def prepare(self, preparation: Preparation) -> Answer:
        """Prepare one worker, unless it is already prepared, and return its reply."""
        with self._lock:
            slot = self._slots.free(())
            worker = self._slots.worker(slot)
            # Preparations last as long as the process; a restart prepares again.
            if preparation.key not in worker.prepared:
                worker.send(preparation.request, preparation.timeout_s, "prepare", preparation.key)
                worker.flush()
                answer = self._slots.gather([slot])[slot]
                if isinstance(answer, WorkerFailure):
                    self.lose(slot, answer)
                    return answer
            return worker.prepared[preparation.key]

    def lose(self, slot: int, failure: WorkerFailure) -> None:
        """Count a failure and kill the worker of the slot; a user's mistake closes the pool and raises UserError."""
        with self._lock:
            # The same request would fail in every worker, so the run ends with the user's message.
            if failure.for_user:
                self.close()
                raise UserError(failure.reason)
            self._slots.lose(slot, failure)

    def note_success(self) -> None:
        """Reset the count of restarts."""
        self._slots.restarts_in_a_row = 0

    def processes(self) -> list[int]:
        """Ids of the running processes."""
        return [worker.handle.pid for worker in self._slots.workers if worker is not None]

    def memory_bytes(self) -> int:
        """Memory of the largest worker, including its children."""
        return max((worker.handle.memory_bytes() for worker in self._slots.workers if worker is not None), default=0)

    def close(self) -> None:
        """End all workers; also done when the pool is garbage-collected or the interpreter exits."""
        with self._lock:
            self._submitted.clear()
            self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, slot: int, request: Request, timeout_s: float) -> None:
        worker = self._slots.worker(slot)
        worker.forget()
        worker.send(request, timeout_s)
        worker.flush()
        self._submitted.pop(slot, None)

    def _checked(self, slot: int, request: Request, check: Check | None, answer: Answer) -> Answer:
        """An answer, or what is wrong with it."""
        if check is not None and isinstance(answer, Message):
            answer = check(request, answer) or answer
        # A worker whose answer is wrong is killed as well: its state cannot be trusted either.
        if isinstance(answer, WorkerFailure):
            self.lose(slot, answer)
        return answer

    def check_restarts(self) -> None:
        """Raise RunError if there were too many restarts without `note_success`."""
        restarts, last = self._slots.restarts_in_a_row, self._slots.last_failure
        # Per slot: a pool of many workers may lose one each without being broken.
        if self._max_restarts is not None and restarts > self._max_restarts * self.size:
            raise RunError(
                f"{restarts} restarts without one {self._goal}; the last worker {last.kind}: {last.reason}\n"
                f"{last.evidence}"
            )
