"""A pool of worker processes, any of which may raise, hang or die without harm to this process.

    spec = WorkerSpec("path/to/service.py:make", {"limit": 3}, purpose="parsing")
    with WorkerPool(spec, 4) as pool:
        answers = pool.map(lambda row: Request({"text": texts[row]}), len(texts), timeout_s=10.0)

`map` is for work that any worker can do: requests are spread over workers, which are started when they are needed.
`ask` is for workers that hold a state of their own, such as a simulated scene: each has a slot and its own requests.
A worker that gives no answer in time, ends or raises is killed with everything that it started; a `WorkerFailure` takes
the place of its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Self

from mmrl.errors import RunError, UserError
from mmrl.workers.engine import Engine, WorkerSpec
from mmrl.workers.failures import WorkerFailure
from mmrl.workers.process import LocalEngine
from mmrl.workers.slots import Slots
from mmrl.workers.spreading import Spread
from mmrl.workers.wire import Message
from mmrl.workers.worker import Answer, Preparation, Request


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
        """Memory of the worker that holds most of it now, with what it started."""
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
