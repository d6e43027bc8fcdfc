"""The process in which a reward function may raise, hang or crash without harm to the training."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from mmrl.errors import UserError
from mmrl.rewards.calling import Batch, Failure, call, signature_of
from mmrl.rewards.loading import load_function

__all__ = ["main"]


def main(descriptor: int, parent: int) -> None:
    """Answer requests until the other end closes.

    Requests are ("load", spec, what), ("batch", spec, options, batch) with one reply, and
    ("rows", spec, options, batch) with one reply a row, sent as soon as the row is done.

    Args:
        descriptor: Open socket to the pool.
        parent: Process id of the pool.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = Connection(descriptor)
    functions: dict[str, Callable[..., Any]] = {}
    while True:
        try:
            kind, spec, *rest = connection.recv()
        except (EOFError, OSError):
            return
        if kind == "load":
            connection.send(_load(functions, spec, rest[0]))
        else:
            _run(connection, functions[spec], rest[0], rest[1], by_row=kind == "rows")


def _end_with(parent: int) -> None:
    """End this process when the pool's process is gone, even while a reward function hangs."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def _load(functions: dict[str, Callable[..., Any]], spec: str, what: str) -> Any:
    try:
        functions[spec] = load_function(spec, what=what)
    except UserError as error:
        return error
    except (Exception, SystemExit) as error:
        return UserError(f"{what}: {spec} cannot be loaded: {type(error).__name__}: {error}")
    return signature_of(functions[spec])


def _run(
    connection: Connection, function: Callable[..., Any], options: dict[str, Any], batch: Batch, *, by_row: bool
) -> None:
    if not by_row:
        connection.send(call(function, batch, options))
        return
    for row in range(len(batch)):
        outcome = call(function, batch.select([row]), options)
        connection.send(outcome if isinstance(outcome, Failure) else outcome[0])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
