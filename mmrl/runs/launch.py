"""Start the processes of a run on one machine like torchrun, end them together, and report which one failed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

POLL_S = 0.1
GRACE_S = 10.0
"""Seconds that the other processes have to end after one of them has failed."""
USER_ERROR = 2
"""Exit code of a user error, which all processes report."""
LAST_WORDS = "MMRL_LAST_WORDS"
"""Environment variable for processes started by `launch`: the file for the last line of their output.

`launch` shows the line of the process that failed first; the other failures are consequences of it.
"""


def launch(arguments: Sequence[str], count: int, run_dir: Path) -> int:
    """Run `mmrl` with the given arguments in several processes that are the ranks of one run.

    Args:
        arguments: of the command line, without --processes.
        count: number of processes.
        run_dir: the run's folder, which says whether there is something to resume.

    Returns:
        0, or the exit code of the process that failed first; 128 + n after signal n.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(max(1, len(os.sched_getaffinity(0)) // count)) if hasattr(os, "sched_getaffinity") else "1"
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
    # torch's own warnings about a lost process, with C++ frames
    shared |= {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    command = [sys.executable, "-m", "mmrl.cli", *arguments]
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="mmrl-") as folder, _forwarded(ranks) as signals:
        words = [Path(folder, str(rank)) for rank in range(count)]
        try:
            for rank in range(count):
                variables = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(subprocess.Popen(command, env=variables | {LAST_WORDS: str(words[rank])}))
            failed = _wait(ranks, words)
        finally:
            for process in ranks:
                process.kill()  # nothing to one that has ended
                process.wait()
        if failed is None:
            return 0
        if signals:  # all have ended as they were asked to, and the first process says so, not the first to end
            failed = _first_failed(ranks, words) or 0
        _say(_read(words[failed]))
        code = ranks[failed].returncode
        # a mistake, and a run that has been stopped, have said all in their own line
        ended = sum(process.returncode != 0 for process in ranks)
        if code < 0 or (ended > 1 and code != USER_ERROR and not signals):
            name = f"process {failed} of {count} on {socket.gethostname()}"
            _say(f"mmrl: {name} {_end_of(code)}; the others were stopped; {_advice(arguments, count, run_dir)}\n")
        return _code(code)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], words: Sequence[Path]) -> int | None:
    """Wait for all processes, those that are left after a failure for a while; returns the first that failed."""
    failed: int | None = None
    since = 0.0
    while [process for process in ranks if process.poll() is None]:  # a list: every process is polled
        if failed is None:
            failed = _first_failed(ranks, words)
            since = time.monotonic()
        elif time.monotonic() - since > GRACE_S:  # one that waits for the failed one would wait for ever
            for process in ranks:
                process.kill()
        time.sleep(POLL_S)
    return _first_failed(ranks, words) if failed is None else failed


def _first_failed(ranks: Sequence[subprocess.Popen[bytes]], words: Sequence[Path]) -> int | None:
    """The process that failed: one that a signal has ended, else the first one that had something to say."""

    def order(rank: int) -> tuple[bool, float]:
        said = words[rank].stat().st_mtime_ns if words[rank].is_file() else float("inf")
        return ranks[rank].returncode > 0, said

    return min((rank for rank, process in enumerate(ranks) if process.returncode), key=order, default=None)


def _end_of(code: int) -> str:
    if code >= 0:
        return f"failed with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    hint = ", perhaps by the system because of a lack of memory (see dmesg)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _advice(arguments: Sequence[str], count: int, run_dir: Path) -> str:
    """The command that continues the run, or starts it again if nothing has been written."""
    begun = (run_dir / "config.yaml").is_file()
    resume = ["--resume"] if begun and "--resume" not in arguments else []
    command = shlex.join(["mmrl", *arguments, "--processes", str(count), *resume])
    return f"{'continue' if begun else 'start again'} with: {command}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="backslashreplace") if path.is_file() else ""


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _code(code: int) -> int:
    """Exit code; 128 + n after signal n, as a shell says it."""
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on, so that the run stops as one process does; a terminal sends Ctrl-C to all by itself.

    Yields the signals so far.
    """
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for rank in ranks:
            if rank.poll() is None and not (signum == signal.SIGINT and sys.stdin is not None and sys.stdin.isatty()):
                rank.send_signal(signum)

    before = {each: signal.signal(each, forward) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
