"""One process at a time in a run folder: a lock that names its owner, and that a crash does not leave closed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from mmrl.errors import UserError
from mmrl.files import write_atomically

LOGGER = logging.getLogger("mmrl")
LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class Owner:
    """A process, told from every other one that has or had its number."""

    host: str
    """Name of the machine."""
    pid: int
    """Number of the process."""
    started: str
    """When the process began, as its system counts; empty where the system does not tell."""
    boot: str
    """The system's start and the process's namespace: numbers of processes are comparable where these agree."""
    since: str
    """When the lock was taken, for messages."""

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _start_of(pid), _boot(), time.strftime("%Y-%m-%d %H:%M:%S"))

    @property
    def state(self) -> str:
        """alive, dead, or unknown where it cannot be told from here."""
        if self.host != socket.gethostname():
            return "unknown"
        if self.boot != _boot():
            return "dead" if self.boot.partition(" ")[0] != _boot().partition(" ")[0] else "unknown"
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return "dead"
        except PermissionError:
            pass  # another user's process
        return "alive" if _start_of(self.pid) == self.started else "dead"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (since {self.since})"


class RunLock:
    """Keeps a run folder for this process.

    The lock of a process that has ended on this machine is taken over. One of another machine is refused, since nobody
    here can tell whether its process still runs.

        with RunLock(Path("runs/mine")):
            ...
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LOCK_FILE
        self._made = False

    def acquire(self) -> None:
        """Take the lock."""
        try:
            self._made = not self.run_dir.exists()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(self.run_dir):
                self._take()
        except OSError as error:
            raise UserError(f"output_dir {self.run_dir} cannot be written: {error}") from error

    def release(self) -> None:
        """Give the lock back, and the folder with it where nothing else came to be in it."""
        with contextlib.suppress(OSError, UserError):
            owner = read_owner(self.run_dir)
            if owner is not None and owner.pid == os.getpid():
                self.path.unlink()
        if self._made:
            with contextlib.suppress(OSError):  # a run has begun there
                self.run_dir.rmdir()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _take(self) -> None:
        owner = read_owner(self.run_dir)
        state = "dead" if owner is None else owner.state
        if state == "alive":
            raise UserError(
                f"{self.run_dir} is in use by {owner}; wait for it, stop it, or choose another output_dir=..."
            )
        if state == "unknown":
            raise UserError(
                f"{self.run_dir} is in use by {owner}, and from this machine nobody can tell whether that process "
                f"still runs; if it has ended, remove the lock: rm {self.path}"
            )
        if owner is not None:
            LOGGER.warning("%s: took over the lock of %s, which has ended", self.run_dir, owner)
        write_atomically(self.path, json.dumps(asdict(Owner.current()), indent=1) + "\n")


def read_owner(run_dir: Path) -> Owner | None:
    """Whose lock lies in a run folder; None without one."""
    path = run_dir / LOCK_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Owner(**{name: kind(found[name]) for name, kind in _FIELDS.items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UserError(f"{path} cannot be read ({reason}); if no process uses the folder: rm {path}") from error


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold off other processes of this machine while a lock is looked at and taken."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no flock
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _start_of(pid: int) -> str:
    """Clock ticks from the system's start to the process's; empty where the system does not tell."""
    try:
        # the name in brackets may hold spaces and brackets
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _boot() -> str:
    parts = []
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        try:
            parts.append(read().strip())
        except OSError:
            parts.append("-")
    return " ".join(parts)


_FIELDS = {"host": str, "pid": int, "started": str, "boot": str, "since": str}
