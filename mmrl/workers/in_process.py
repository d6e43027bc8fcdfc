"""Workers in this process, for services whose processes would cost more than their work.

pool = WorkerPool(spec, 4, engine=InProcessEngine(make_service))

An exception is a failure like any other. A service that hangs or ends the process takes this one with it, and the
limits of time and memory do not hold.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mmrl.workers.engine import Ending, WorkerSpec
from mmrl.workers.wire import Message, error_text

if TYPE_CHECKING:
    import numpy as np

    from mmrl.workers.serve import Service


class InProcessHandle:
    """A service that answers in `flush`."""

    def __init__(self, make: Callable[..., Service], options: Mapping[str, Any]) -> None:
        self.heard_at, self.taken_at, self.loading_at = float("inf"), 0.0, 0.0
        self.ending: Ending | None = None
        self._service: Service | None = None
        self._queue: list[Message] = []
        self._answers: list[Message] = []
        try:
            self._service = make(**options)
            self._keep("hello", 0, self._service.hello())
        except Exception as error:
            self._keep("error", 0, _describe(error))

    @property
    def pid(self) -> int:
        """Number of this process."""
        return os.getpid()

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Queue a request."""
        self._queue.append(Message(dict(fields), dict(arrays or {})))

    def flush(self) -> None:
        """Answer the queued requests."""
        queue, self._queue = self._queue, []
        for request in queue:
            if self._service is None:
                return
            number = request.fields["id"]
            try:
                self._keep("result", number, *self._service.answer(request.fields["body"], request.arrays))
            except Exception as error:
                self._keep("error", number, _describe(error))

    def receive(self) -> list[Message]:
        """Answers since the last call, oldest first."""
        found, self._answers = self._answers, []
        return found

    def memory_bytes(self) -> int:
        """Unknown: it shares this process."""
        return 0

    def over_limit(self) -> str:
        """No limit holds."""
        return ""

    def last_output(self) -> str:
        """Its output is that of this process."""
        return ""

    def ask_to_end(self) -> None:
        """Close the service."""
        service, self._service = self._service, None
        if service is not None:
            with contextlib.suppress(Exception):  # it may have failed before
                service.close()

    def has_ended(self) -> bool:
        """Whether the service is closed, or was never made."""
        return self._service is None

    def kill(self) -> None:
        """Close the service."""
        self.ask_to_end()

    def _keep(
        self, kind: str, number: int, body: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        # Copies: a service may go on writing into an array that it has returned.
        own = {name: array.copy() for name, array in (arrays or {}).items()}
        self._answers.append(Message({"kind": kind, "id": number, "body": dict(body)}, own))


class InProcessEngine:
    """Makes services in this process.

    Args:
        make: makes a service from the options of a `WorkerSpec`, in the place of the spec's own file.
    """

    def __init__(self, make: Callable[..., Service]) -> None:
        self._make = make

    def start(self, spec: WorkerSpec) -> InProcessHandle:
        """Make a service."""
        return InProcessHandle(self._make, spec.options)

    def wait(self, timeout_s: float) -> None:
        """Return: answers are there as soon as requests are flushed."""


def _describe(error: Exception) -> dict[str, Any]:
    for_user = bool(getattr(error, "for_user", False))
    kind, trace = type(error).__name__, traceback.format_exc()
    return {"type": kind, "message": error_text(error), "traceback": trace, "for_user": for_user}
