"""Starts the processes of a run on one machine, as torchrun does, and ends them together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

POLL_S = 0.1
GRACE_S = 10.0
"""Seconds that the other processes have to end after one has failed."""


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `mmrl` with the arguments in several processes that are the ranks of one run.

    Returns:
        0, or the exit code of the process that failed first.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count)) if hasattr(os, "sched_getaffinity") else "1"
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    command = [sys.executable, "-m", "mmrl.cli", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    with _forwarded(ranks):
        for rank in range(count):
            variables = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=variables))
        return _wait(ranks)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    failed: int | None = None
    since = 0.0
    while [rank for rank in ranks if rank.poll() is None]:  # a list: every process is polled
        if failed is None:
            failed = next((_code(rank) for rank in ranks if rank.returncode), None)
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:  # one that waits for the failed one would wait for ever
            for rank in ranks:
                rank.kill()
        time.sleep(POLL_S)
    return failed or next((_code(rank) for rank in ranks if rank.returncode), 0)


def _code(rank: subprocess.Popen[bytes]) -> int:
    """Exit code; 128 + n after signal n, as a shell says it."""
    code = rank.returncode
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Pass signals on, so that the run stops as one process does; a terminal sends Ctrl-C to all by itself."""

    def forward(signum: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None and not (signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()):
                rank.send_signal(signum)

    before = {each: signal.signal(each, forward) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
