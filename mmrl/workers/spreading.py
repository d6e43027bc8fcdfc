"""Many requests that any worker can answer, spread over the workers of a pool."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from mmrl.workers.failures import WorkerFailure, one_line
from mmrl.workers.slots import Slots
from mmrl.workers.worker import Answer, Pending, Preparation, Request

FIRST_SHARE = 0.1
"""Part of its time that a request gets first once another one has hung,"""
SLOWEST_FACTOR = 4.0
"""or so many times what the slowest answer took, if that is more."""
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
        """Let the others have a part of their time first, or give up those that had it."""
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
