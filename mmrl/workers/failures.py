"""Why a worker gave no answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerFailure:
    """Takes the place of an answer that will not come; the worker has been stopped."""

    kind: str
    """Key of `WORKER_FAILURES`, or a kind of a pool's user."""
    reason: str
    """One line."""
    evidence: str = ""
    """Traceback, or the last lines that the process wrote."""
    for_user: bool = False
    """Whether the service says that the user asked for something impossible."""
    stage: str = "answer"
    """What the worker was doing: start, prepare or answer; send where a request could not be made or sent."""
    exit_code: int | None = None
    """Of a process that ended; the negative number of the signal that ended it."""
    limit_s: float | None = None
    """The time limit that was exceeded."""


def one_line(text: str) -> str:
    """Join the lines of a text and cut it to 500 characters."""
    return " ".join(text.split())[:500]


WORKER_FAILURES: dict[str, str] = {
    "crashed": "The process ended or sent garbage.",
    "hung": "There was no answer, or no heartbeat, within the time limit.",
    "memory": "The process, with what it started, held more memory than allowed.",
    "raised": "The service raised an exception.",
}
