"""One worker of a pool: its requests, its answers in order, and when it has failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from mmrl.workers.engine import Engine, WorkerFailure, WorkerSpec, one_line
from mmrl.workers.wire import Message

if TYPE_CHECKING:
    import numpy as np

LOADING_SECONDS = 0.5
"""Seconds for which a report that the worker imports modules is valid: until the next heartbeat."""
MEMORY_SECONDS = 0.2
"""Seconds between two measurements of a worker's memory and other limited quantities."""
TEXT_CHARS = 20_000
"""Maximum number of characters kept of a worker's description of an exception."""

Answer: TypeAlias = "Message | WorkerFailure"


@dataclass(frozen=True)
class Request:
    """A request to a worker's service."""

    fields: Mapping[str, Any]
    """JSON."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays by name; see `mmrl.workers.wire.pack`."""


@dataclass(frozen=True)
class Preparation:
    """A request that a worker must complete once before other requests, such as loading a module or a model."""

    key: str
    """Its identifier; a worker that has completed it is not asked again."""
    request: Request
    timeout_s: float
    """Time limit in seconds for the reply."""


class Pending(NamedTuple):
    """A request without a reply."""

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
        # Not waited for: the hello is request 0, so that the workers of a pool start at the same time.
        self.handle = engine.start(spec)
        self.prepared: dict[str, Message] = {}
        """Replies to preparations by key."""
        self.pending = deque([Pending(0, spec.start_timeout_s, "start", None)])
        """Requests without a reply, oldest first; the very first one is the start."""
        # `_look_at`: nothing can go wrong before this time, so the worker need not be asked before it.
        self._number, self._since = 0, time.monotonic()
        self._measured_at = self._look_at = 0.0

    def send(self, request: Request, timeout_s: float, stage: str = "answer", tag: Any = None) -> None:
        """Queue a request of a stage, prepare or answer; `timeout_s` counts from when the worker gets to it."""
        # The id pairs an answer with its request, since a forgotten request is still answered.
        body = {"kind": "request", "id": self._number + 1, "body": dict(request.fields)}
        self.handle.send(body, request.arrays)
        self._number += 1
        # Behind other requests it does not begin yet: its time starts when the one before is answered.
        if not self.pending:
            self._since = time.monotonic()
            self._look_at = 0.0
        self.pending.append(Pending(self._number, timeout_s, stage, tag))

    def flush(self) -> None:
        """Send the queued requests."""
        self.handle.flush()

    def forget(self) -> None:
        """Drop requests of an interrupted call, whose replies are no longer needed."""
        if self.pending:
            # Answers to the dropped ones still come; `collect` knows them by their numbers and throws them away.
            self.pending = deque(pending for pending in self.pending if pending.stage == "start")

    @property
    def interrupted(self) -> bool:
        """Whether it is working on a request whose reply is no longer needed."""
        return any(pending.stage != "start" for pending in self.pending)

    def collect(self) -> list[tuple[Pending, Answer]]:
        """Take the replies so far in the order of the requests, up to the first failure."""
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
            # The caller kills the worker, so that later messages of this process mean nothing.
            if isinstance(answer, WorkerFailure):
                return found
            if pending.stage == "prepare":
                self.prepared[pending.tag] = answer
        # Looked at last: a worker that answered and then died has still answered.
        if self.pending and (failure := self._failure() or self._over_limit()) is not None:
            found.append((self.pending.popleft(), failure))
        return found

    def seconds_left(self) -> float:
        """Seconds until the oldest request has taken too long."""
        # The earlier of two limits: the request's own, and that of the heartbeat.
        return min(self._deadline(), self._last_beat_due()) - time.monotonic()

    def patience_s(self) -> float:
        """Seconds after which to check the worker again, if nothing arrives from it before."""
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
        # An answer on its way is not late: a full pipe makes the worker wait while this process does something else.
        if self.handle.receiving:
            begun = max(begun, self.handle.heard_at)
        return begun + self.pending[0].timeout_s

    def _last_beat_due(self) -> float:
        # Imports of C extensions keep Python's lock for long; a start has its own limit instead.
        if self.spec.heartbeat_timeout_s is None or self.pending[0].stage == "start":
            return float("inf")
        return self.handle.heard_at + self.spec.heartbeat_timeout_s

    def _failure(self) -> WorkerFailure | None:
        """Failure of the oldest request if no answer will come in time."""
        # An exit code says more than a time limit, so the end of the process is looked at first.
        ending, stage = self.handle.ending, self.pending[0].stage
        if ending is not None:
            return self._with_output(WorkerFailure("crashed", ending.reason, stage=stage, exit_code=ending.exit_code))
        if self.seconds_left() > 0:
            return None
        limit_s, reason = self.pending[0].timeout_s, "no reply within {:g} s"
        # Both limits may have passed; the reason names the one that has.
        if time.monotonic() < self._deadline() and self.spec.heartbeat_timeout_s is not None:
            limit_s, reason = self.spec.heartbeat_timeout_s, "no heartbeat for {:g} s"
        return self._with_output(WorkerFailure("hung", reason.format(limit_s), stage=stage, limit_s=limit_s))

    def _over_limit(self) -> WorkerFailure | None:
        limit, now = self.spec.memory_bytes, time.monotonic()
        # Not at every look: memory is read from /proc, a file for each process below the worker.
        if limit is None or now < self._measured_at + MEMORY_SECONDS:
            return None
        self._measured_at, held = now, self.handle.memory_bytes()
        stage = self.pending[0].stage
        if held > limit:
            reason = f"it used {held >> 20} MiB of memory; at most {limit >> 20} MiB are allowed"
            return self._with_output(WorkerFailure("memory", reason, stage=stage))
        if self.spec.strict is not None and (reason := self.handle.over_limit()):
            return self._with_output(WorkerFailure("limit", reason, stage=stage))
        return None

    def _with_output(self, failure: WorkerFailure) -> WorkerFailure:
        # The last line a worker wrote often holds the reason, such as an assertion in C++.
        output = self.handle.last_output()
        reason = f"{failure.reason}; its last output was: {output.splitlines()[-1]}" if output else failure.reason
        return WorkerFailure(**{**vars(failure), "reason": one_line(reason), "evidence": output})


def _answer_in(message: Message, stage: str) -> Answer:
    try:
        body = message.fields["body"]
        if message.fields["kind"] != "error":
            return Message(dict(body), message.arrays)
        # Cut here: a worker must not make this process hold a text of any size.
        for_user, text, trace = bool(body["for_user"]), str(body["message"])[:TEXT_CHARS], str(body["traceback"])
        reason = text if for_user else one_line(f"{body['type']}: {text}")
    except (KeyError, TypeError, ValueError) as error:
        return WorkerFailure("crashed", f"its message is malformed: {error!r}", stage=stage)
    return WorkerFailure("raised", reason, trace[-TEXT_CHARS:], for_user, stage)
