"""A process and its descendants according to Linux's /proc; nothing is found on other systems.

Both ends load this file, a worker by its path: it runs on Python 3.8 with the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import signal

TAG = "MMRL_WORKER"
"""Environment variable that marks every process started by a worker, even after the worker has ended."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PR_SET_CHILD_SUBREAPER = 36
ROUNDS = 20
"""Number of searches for processes that were started while others were being stopped."""


def adopt_orphans() -> None:
    """Make this process adopt orphans of its descendants, so that `descendants` also finds them."""
    # Not in the standard library: prctl through libc.
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (AttributeError, OSError):  # not Linux
        return


def descendants(pid: int) -> list[int]:
    """Ids of the running descendants of a process, parents first."""
    return _below(pid, _parents())


def tree(pid: int) -> list[int]:
    """Ids of a process and its running descendants, parents first; only the process itself without /proc.

    Looks at these processes only, so that it can be asked often on a machine with thousands of others.
    """
    found = [pid]
    for each in found:  # grows while it is walked
        found.extend(_children(each))
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process and all its descendants; shared pages are counted for each of them. 0 if unknown."""
    # Shared pages count for each process: a limit is meant to be safe, not exact.
    total = 0
    for each in tree(pid):
        try:
            with open(f"/proc/{each}/statm") as file:
                total += PAGE_BYTES * int(file.read().split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
    return total


def threads(pid: int) -> int:
    """Number of threads of a process and all its descendants."""
    total = 0
    for each in tree(pid):
        try:
            # Two links are . and ..; every thread has a folder.
            total += os.stat(f"/proc/{each}/task").st_nlink - 2
        except OSError:  # it has just ended
            continue
    return total


def end_descendants(pid: int) -> None:
    """Kill all descendants of a process; they are stopped first so that nothing is started meanwhile."""
    found: set[int] = set()
    for _ in range(ROUNDS):
        new = set(descendants(pid)) - found
        if not new:
            break
        for each in new:
            _send(each, signal.SIGSTOP)
        found = found.union(new)
    # Only after all are stopped: killing a parent lets its children go to another one.
    for each in found:
        _send(each, signal.SIGKILL)


def end_tagged(token: str) -> None:
    """Kill the processes whose environment has the token under `TAG`, except this one."""
    # The environment is inherited, even by processes that have left their group and lost their parent.
    mark = (TAG + "=" + token).encode()
    for _ in range(ROUNDS):
        found = [pid for pid in _numbers() if pid != os.getpid() and mark in _environment(pid)]
        if not found:
            return
        for pid in found:
            end_descendants(pid)
            _send(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        # A child belongs to the thread that started it.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found.extend(map(int, file.read().split()))
    except OSError:  # it has just ended, or the kernel does not say
        return found
    return found


def _below(pid: int, parents: dict[int, int]) -> list[int]:
    # One pass over all processes: /proc has no list of children on kernels built without it.
    children: dict[int, list[int]] = {}
    for each, parent in parents.items():
        children.setdefault(parent, []).append(each)
    found = list(children.get(pid, []))
    for each in found:  # grows while it is walked
        found.extend(children.get(each, []))
    return found


def _parents() -> dict[int, int]:
    """Parents of all processes that have not ended."""
    found = {}
    for pid in _numbers():
        try:
            # The name of a process may hold spaces and brackets, so the fields are those behind the last bracket.
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):  # it has just ended
            continue
        # Zombies hold nothing, and are gone once their parent looks.
        if state not in (b"Z", b"X"):
            found[pid] = int(parent)
    return found


def _numbers() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # ended, or of another user
        return []


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return
