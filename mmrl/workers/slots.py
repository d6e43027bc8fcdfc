"""A started worker and the requests that it has not answered yet."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmrl.workers.engine import WORKER_FAILURES, Engine, WorkerFailure, WorkerSpec, one_line
from mmrl.workers.wire import Message

if TYPE_CHECKING:
    import numpy as np


LOADING_SECONDS = 0.5
"""Seconds for which a note that the worker imports modules is valid: until the next heartbeat."""
MEMORY_SECONDS = 0.2
"""Seconds between two measurements of a worker's memory and of what else is limited."""
TEXT_CHARS = 20_000
"""Most characters kept of a worker's account of an exception."""

Answer: TypeAlias = "Message | WorkerFailure"


@dataclass(frozen=True)
class Request:
    """A request to a worker's service."""

    fields: Mapping[str, Any]
    """JSON."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays by name, see `mmrl.workers.wire.pack`."""


@dataclass(frozen=True)
class Preparation:
    """A request that a worker has to answer once before others make sense, such as loading a module or a model."""

    key: str
    """Names it; a worker that has answered is not asked again."""
    request: Request
    timeout_s: float
    """Seconds for the answer."""


class Pending(NamedTuple):
    """A request without an answer."""

    number: int
    timeout_s: float
    stage: str
    """start, prepare or answer."""
    tag: Any
    """Identifier of the request in its pool."""


class Worker:
    """One worker; requests are answered in the order in which they were sent."""

    def __init__(self, engine: Engine, spec: WorkerSpec) -> None:
        self.spec = spec
        self.handle = engine.start(spec)
        self.prepared: dict[str, Message] = {}
        """Answers to preparations by key."""
        self.pending = deque([Pending(0, spec.start_timeout_s, "start", None)])
        """Requests without an answer, the oldest first; the start is the first of all."""
        self._number, self._since = 0, time.monotonic()
        self._measured_at = self._look_at = 0.0

    def send(self, request: Request, timeout_s: float, stage: str = "answer", tag: Any = None) -> None:
        """Queue a request of a stage, prepare or answer; `timeout_s` counts from when the worker gets to it."""
        body = {"kind": "request", "id": self._number + 1, "body": dict(request.fields)}
        self.handle.send(body, request.arrays)
        self._number += 1
        if not self.pending:
            self._since = time.monotonic()
            self._look_at = 0.0
        self.pending.append(Pending(self._number, timeout_s, stage, tag))

    def flush(self) -> None:
        """Send the queued requests."""
        self.handle.flush()

    def forget(self) -> None:
        """Drop requests whose answers nobody waits for any more, those of an interrupted call."""
        if self.pending:
            self.pending = deque(pending for pending in self.pending if pending.stage == "start")

    @property
    def interrupted(self) -> bool:
        """Whether it works on a request whose answer nobody waited for."""
        return any(pending.stage != "start" for pending in self.pending)

    def collect(self) -> list[tuple[Pending, Answer]]:
        """Take the answers so far in the order of the requests, up to the first failure."""
        messages = self.handle.receive()
        if not messages and self.handle.ending is None and time.monotonic() < self._look_at:
            return []
        found: list[tuple[Pending, Answer]] = []
        for message in messages:
            if not self.pending or message.fields.get("id") != self.pending[0].number:
                continue  # the answer to a request that was forgotten
            pending = self.pending.popleft()
            self._since, self._look_at = time.monotonic(), 0.0
            answer = _answer_in(message, pending.stage)
            found.append((pending, answer))
            if isinstance(answer, WorkerFailure):
                return found
            if pending.stage == "prepare":
                self.prepared[pending.tag] = answer
        if self.pending and (failure := self._failure() or self._over_limit()) is not None:
            found.append((self.pending.popleft(), failure))
        return found

    def seconds_left(self) -> float:
        """Until the oldest request has taken too long."""
        return min(self._deadline(), self._last_beat_due()) - time.monotonic()

    def patience_s(self) -> float:
        """Seconds after which to look at the worker again, if nothing comes from it before."""
        now = time.monotonic()
        if now >= self._look_at:
            left_s = self.seconds_left()
            # A deadline only ever moves away from here on, so none is missed until then.
            self._look_at = now + (left_s if self.spec.memory_bytes is None else min(left_s, MEMORY_SECONDS))
        return self._look_at - now

    def _deadline(self) -> float:
        # A request that is still being written has not begun.
        begun = max(self._since, self.handle.taken_at)
        if self.handle.loading_at > begun:  # imports are not the request's time, within the limit of a start
            begun = min(self.handle.loading_at + LOADING_SECONDS, begun + self.spec.start_timeout_s)
        return begun + self.pending[0].timeout_s

    def _last_beat_due(self) -> float:
        if self.spec.heartbeat_timeout_s is None or self.pending[0].stage == "start":
            return float("inf")
        return self.handle.heard_at + self.spec.heartbeat_timeout_s

    def _failure(self) -> WorkerFailure | None:
        """Failure of the oldest request where no answer will come in time."""
        ending, stage = self.handle.ending, self.pending[0].stage
        if ending is not None:
            return self._with_output(WorkerFailure("crashed", ending.reason, stage=stage, exit_code=ending.exit_code))
        if self.seconds_left() > 0:
            return None
        limit_s, reason = self.pending[0].timeout_s, "no answer in {:g} s"
        if time.monotonic() < self._deadline() and self.spec.heartbeat_timeout_s is not None:
            limit_s, reason = self.spec.heartbeat_timeout_s, "no sign of life for {:g} s"
        return self._with_output(WorkerFailure("hung", reason.format(limit_s), stage=stage, limit_s=limit_s))

    def _over_limit(self) -> WorkerFailure | None:
        limit, now = self.spec.memory_bytes, time.monotonic()
        if limit is None or now < self._measured_at + MEMORY_SECONDS:
            return None
        self._measured_at, held = now, self.handle.memory_bytes()
        stage = self.pending[0].stage
        if held > limit:
            reason = f"it held {held >> 20} MiB of memory; at most {limit >> 20} MiB are allowed"
            return self._with_output(WorkerFailure("memory", reason, stage=stage))
        if self.spec.strict is not None and (reason := self.handle.over_limit()):
            return self._with_output(WorkerFailure("limit", reason, stage=stage))
        return None

    def _with_output(self, failure: WorkerFailure) -> WorkerFailure:
        output = self.handle.last_output()
        reason = f"{failure.reason}; it last wrote: {output.splitlines()[-1]}" if output else failure.reason
        return WorkerFailure(**{**vars(failure), "reason": one_line(reason), "evidence": output})


def _answer_in(message: Message, stage: str) -> Answer:
    try:
        body = message.fields["body"]
        if message.fields["kind"] != "error":
            return Message(dict(body), message.arrays)
        for_user, text, trace = bool(body["for_user"]), str(body["message"])[:TEXT_CHARS], str(body["traceback"])
        reason = text if for_user else one_line(f"{body['type']}: {text}")
    except (KeyError, TypeError, ValueError) as error:
        return WorkerFailure("crashed", f"its message is malformed: {error!r}", stage=stage)
    return WorkerFailure("raised", reason, trace[-TEXT_CHARS:], for_user, stage)


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
        """Wait, up to a limit in seconds, until one of these workers has answered or failed."""
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
        self.counts[failure.kind] = self.counts.get(failure.kind, 0) + 1
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
