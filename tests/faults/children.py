"""Forked children: a run in a separate process without importing torch again, killed, timed and cleaned up."""

import contextlib
import ctypes
import importlib
import mmap
import os
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Child", "Ending", "Nursery", "import_modules", "write_loaded_modules"]

PR_SET_CHILD_SUBREAPER = 36
STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals after which a run saves and ends by itself."""
LINGER_SECONDS = 15.0
"""How long a process may outlive the child that started it; workers notice their closed pipe well before."""
NOTE_BYTES = 64


@dataclass(frozen=True)
class Ending:
    """Outcome of a child."""

    code: int | None
    """Exit code; None where a signal ended it."""
    signal: int
    """The signal that ended it; 0 without one."""
    hung: bool
    """Whether it was ended because its time was up."""
    seconds: float
    stage: str
    """Stage that it last recorded."""
    output: str
    """Everything that it printed."""

    @property
    def killed(self) -> bool:
        """Whether a planned signal ended it, or made it end by itself."""
        stopped = self.code in {128 + signum for signum in STOPS}
        return (stopped or self.signal in (signal.SIGKILL, *STOPS)) and not self.hung

    def last_line(self) -> str:
        """The last line that it printed."""
        return next(iter(self.output.strip().splitlines()[::-1]), "")


class Child:
    """The child's own side: it notes where it is and may ask to be killed.

    Args:
        shared: memory that the parent reads.
        requests: pipe on which a kill is asked for.
    """

    def __init__(self, shared: mmap.mmap, requests: int) -> None:
        self._shared = shared
        self._requests = requests

    def note(self, stage: str) -> None:
        """Report the stage of the run."""
        self._shared[:NOTE_BYTES] = stage.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    def die(self, delay_s: float = 0.0, signum: int = signal.SIGKILL) -> None:
        """Get a signal, at once or a moment later while the work goes on."""
        if delay_s <= 0:
            os.kill(os.getpid(), signum)
        else:
            os.write(self._requests, struct.pack("di", delay_s, signum))


@dataclass
class Nursery:
    """Starts children one at a time, adopts the processes that they leave behind and counts those that do not end by
    themselves.
    """

    left_behind: list[str] = field(default_factory=list)
    """Command lines of processes that outlived their child for too long."""
    _adopted: dict[int, float] = field(default_factory=dict)
    _others: set[int] = field(default_factory=set)
    """Children that this process had before."""

    def __post_init__(self) -> None:
        self._others = set(_children())
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(
        self,
        action: Callable[[Child], int],
        limit_s: float,
        kill_after_s: float | None = None,
        signum: int = signal.SIGKILL,
    ) -> Ending:
        """Run an action in a forked child and wait for its end.

        Args:
            action: returns the exit code.
            limit_s: after which it counts as hanging.
            kill_after_s: when the parent sends the signal.
            signum: the signal.
        """
        shared, (reads, writes), (hears, says) = mmap.mmap(-1, NOTE_BYTES), os.pipe(), os.pipe()
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os.close(reads)
            os.close(hears)
            _become_child(action, Child(shared, writes), says)
        os.close(writes)
        os.close(says)
        output = _Output(hears)
        kill_at = None if kill_after_s is None else started + kill_after_s
        hung = _await(pid, reads, output, started + limit_s, kill_at, signum)
        _, status = os.waitpid(pid, 0)
        seconds = time.monotonic() - started
        os.close(reads)
        stage = shared[:NOTE_BYTES].rstrip(b"\0").decode()
        shared.close()
        self.look_after_orphans()
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        return Ending(code, ended_by, hung, seconds, stage, output.close())

    def look_after_orphans(self) -> None:
        """Reap the processes that lost their parent; end and record those that have run for too long."""
        now = time.monotonic()
        for pid in self._orphans():
            since = self._adopted.setdefault(pid, now)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    continue
            if now - since > LINGER_SECONDS:
                self.left_behind.append(_command_line(pid))
                os.kill(pid, signal.SIGKILL)

    def _orphans(self) -> list[int]:
        return [pid for pid in _children() if pid not in self._others]

    def close(self) -> None:
        """Wait until every orphan has ended, or is noted as left behind."""
        while self._orphans():
            self.look_after_orphans()
            time.sleep(0.1)


def write_loaded_modules(path: Path) -> None:
    """In a child: record its loaded modules."""
    path.write_text("\n".join(name for name in list(sys.modules) if name != "__main__"))


def import_modules(path: Path) -> None:
    """In the parent: import the modules that a child recorded, so that the next child has them."""
    for name in path.read_text().split():
        with contextlib.suppress(Exception):  # what only looks like a module
            importlib.import_module(name)


class _Output:
    """Output of a child, through a pipe, so that no limit on its files truncates it.

    Args:
        descriptor: reading end.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._said = descriptor, bytearray()

    def take(self) -> bool:
        """Read available output; return whether more may follow."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.descriptor, 1 << 16):
                self._said += data
            return False
        return True

    def close(self) -> str:
        """All output so far; processes that the child started may continue to write and are not waited for."""
        self.take()
        os.close(self.descriptor)
        return self._said.decode(errors="replace")


def _become_child(action: Callable[[Child], int], child: Child, output: int) -> None:
    """Never returns: the fork shares nothing with its parent but what it was handed."""
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs behind
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        code = action(child)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _await(pid: int, requests: int, output: _Output, deadline: float, kill_at: float | None, signum: int) -> bool:
    """Wait for the end of a child, killing it when planned; return whether it reached its time limit."""
    with _pidfd(pid) as ended:
        waiting = [ended, requests, output.descriptor]
        while True:
            until = deadline if kill_at is None else min(deadline, kill_at)
            ready, _, _ = select.select(waiting, [], [], max(0.0, until - time.monotonic()))
            if ended in ready:
                return False
            if output.descriptor in ready and not output.take():
                waiting.remove(output.descriptor)
            if requests in ready:
                asked = os.read(requests, struct.calcsize("di"))
                if asked:
                    delay_s, signum = struct.unpack("di", asked)
                    kill_at = time.monotonic() + delay_s
                else:
                    waiting.remove(requests)
            elif time.monotonic() >= until:
                if kill_at is None or deadline < kill_at:
                    os.kill(pid, signal.SIGKILL)
                    os.killpg(pid, signal.SIGKILL)
                    return True
                os.kill(pid, signum)
                kill_at = None


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _children() -> list[int]:
    """Direct children of this process, adopted ones included."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return str(pid)
