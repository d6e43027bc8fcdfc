"""A pool of worker processes, any of which may raise, hang or die without harm to this process.

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
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from mmrl.errors import RunError, UserError
from mmrl.workers.engine import Engine, WorkerFailure, WorkerSpec, one_line
from mmrl.workers.process import LocalEngine
from mmrl.workers.slots import Answer, Pending, Preparation, Request, Slots
from mmrl.workers.wire import Message

FIRST_SHARE = 0.1
"""Part of its time that a request gets first once another one has hung,"""
SLOWEST_FACTOR = 4.0
"""or this multiple of the slowest answer's time, if that is more."""
HUNG_IN_A_ROW = 10
"""Requests with their whole time after which the others that hung in theirs first are given up."""
AT_ONCE = 16
"""Most requests that wait in the pipe of one worker, so that it need not wait for the pool between two of them."""


class Spread:
    """The requests of one call on their path through the workers.

    A failure is charged to the request that its worker was working on; those that waited behind it go to others. After
    one request has hung, the others get a part of their time first, so that those that do answer are not kept waiting
    by more that hang; these get their whole time at the end, until some of them in a row have hung again.
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
        """Work until every request has an answer or the time is up."""
        try:
            while self._waiting or self._running or self._again:
                if time.monotonic() > self._end:
                    reason = f"not all requests were answered in {self._total_s:g} s"
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
        share = -(-len(self._waiting) // (2 * self._slots.size))
        while self._waiting and len(self._running) < self._slots.size:
            count = min(AT_ONCE, max(1, share), len(self._waiting))
            self._send(self._slots.free(self._running), [self._waiting.popleft() for _ in range(count)])

    def _send(self, slot: int, numbers: list[int]) -> None:
        worker, first = self._slots.worker(slot), self._preparation
        self._running.add(slot)
        if first is not None and first.key not in worker.prepared:
            worker.send(first.request, first.timeout_s, "prepare", first.key)
        for number in numbers:
            try:
                worker.send(self._make_request(number), self._first_s, tag=number)
            except Exception as error:
                reason = one_line(f"{type(error).__name__}: {error}")
                self._answers[number] = WorkerFailure("raised", reason, stage="send")
        worker.flush()
        self._heard_at[slot] = time.monotonic()
        if not worker.pending:
            self._running.discard(slot)

    def _take_answers(self) -> None:
        if not self._running:
            return
        found = self._slots.collect(self._running, self._end - time.monotonic())
        now = time.monotonic()
        for slot, pending, answer in found:
            if pending.stage == "answer" and not isinstance(answer, WorkerFailure):
                self._answers[pending.tag] = answer
                self._slowest_s, self._hung_in_a_row = max(self._slowest_s, now - self._heard_at[slot]), 0
            self._heard_at[slot] = now
        for slot, pending, answer in found:
            if isinstance(answer, WorkerFailure) and slot in self._running:
                self._fail(slot, pending, answer)
        self._running = {slot for slot in self._running if self._slots.worker(slot).pending}

    def _fail(self, slot: int, pending: Pending, failure: WorkerFailure) -> None:
        """Charge the failure to the request in work and give the worker's other requests back."""
        behind = [other.tag for other in self._slots.worker(slot).pending if other.stage == "answer"]
        self._waiting.extendleft(reversed(behind))
        self._running.discard(slot)
        self._slots.lose(slot, failure)
        if pending.stage != "answer":  # no other worker will get further
            self._give_up(failure)
        elif failure.kind == "hung" and pending.timeout_s < self._timeout_s:
            self._again.append(pending.tag)
        else:
            self._answers[pending.tag] = failure
            if failure.kind == "hung":
                self._note_hung(failure)

    def _note_hung(self, failure: WorkerFailure) -> None:
        """Give the others a part of their time first, or give up on those that had it."""
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
        max_restarts: restarts a slot without `note_success`, after which `ask_with_retries` raises; None for any
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
        self._slots = Slots(spec, size, engine or LocalEngine())
        self._lock = threading.RLock()

    @property
    def counts(self) -> Mapping[str, int]:
        """Failures by kind (keys of `WORKER_FAILURES`) and restarts since the pool was made."""
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
            self.start_missing()
            hellos = self._slots.gather(range(self.size))
            failed = {slot: hello for slot, hello in sorted(hellos.items()) if isinstance(hello, WorkerFailure)}
            for slot, failure in failed.items():
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
        check: Callable[[Request, Message], WorkerFailure | None] | None = None,
    ) -> dict[int, Answer]:
        """Send workers a request each and wait for all of them.

        Args:
            requests: by slot.
            timeout_s: seconds for each answer.
            check: returns what is wrong with an answer, which then counts as a failure; None where nothing is.

        Returns:
            Answers by slot. A worker that failed has been killed; its slot is empty until it is used or
            `start_missing`.

        Raises:
            UserError: a service says that the user asked for something impossible; the pool is closed.
            RunError: a process cannot be started.
        """
        with self._lock:
            for slot, request in requests.items():
                worker = self._slots.worker(slot)
                worker.forget()
                worker.send(request, timeout_s)
                worker.flush()
            found = self._slots.gather(requests)
            answers: dict[int, Answer] = {}
            for slot in requests:
                answer = found[slot]
                if check is not None and isinstance(answer, Message):
                    answer = check(requests[slot], answer) or answer
                answers[slot] = answer
                if isinstance(answer, WorkerFailure):
                    self.lose(slot, answer)
            return answers

    def ask_with_retries(
        self,
        requests: Mapping[int, Request],
        timeout_s: float,
        retries: int,
        *,
        check: Callable[[Request, Message], WorkerFailure | None] | None = None,
    ) -> dict[int, Answer]:
        """Like `ask`, where a request that failed is tried again in a fresh process.

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
            waiting = dict(requests)
            for _ in range(1 + retries):
                if not waiting:
                    break
                self.start_missing()
                self._check_restarts()
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
        """Spread requests over the workers; one that hangs or crashes its worker costs itself only.

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
        """Prepare one worker, unless it is prepared already, and return its answer."""
        with self._lock:
            slot = self._slots.free(())
            worker = self._slots.worker(slot)
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
            if failure.for_user:
                self.close()
                raise UserError(failure.reason)
            self._slots.lose(slot, failure)

    def note_success(self) -> None:
        """Forgive the restarts so far."""
        self._slots.restarts_in_a_row = 0

    def processes(self) -> list[int]:
        """Numbers of the processes that run now."""
        return [worker.handle.pid for worker in self._slots.workers if worker is not None]

    def memory_bytes(self) -> int:
        """Memory of the largest worker, including its children."""
        return max((worker.handle.memory_bytes() for worker in self._slots.workers if worker is not None), default=0)

    def close(self) -> None:
        """End all workers; also done when the pool is garbage or the interpreter ends."""
        with self._lock:
            self._slots.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_restarts(self) -> None:
        restarts, last = self._slots.restarts_in_a_row, self._slots.last_failure
        if self._max_restarts is not None and restarts > self._max_restarts * self.size:
            raise RunError(
                f"{restarts} restarts without one {self._goal}; the last worker {last.kind}: {last.reason}\n"
                f"{last.evidence}"
            )
