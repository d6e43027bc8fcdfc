"""Shuts itself in, then becomes the given program.

    python -I -S sandbox_enter.py '{"mode": "namespaces", "folder": "/tmp/x", ...}' program argument ...

Run by path with the standard library alone. Every step that fails ends it with code 71 and one line on standard error
before the program has begun: a promise is never silently missing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from mmrl.workers import sandbox_files as files
    from mmrl.workers import sandbox_filter as calls

FAILED = 71
CLONE_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
"""User, mount, process, network, IPC and host name."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 1, 4, 24, 47
LAST_CAPABILITY = 63
HELPERS = 3
"""Processes of the namespace beside the program: this one as it was, the first one, and one to spare."""


def _load(name: str) -> ModuleType:
    path = os.path.join(os.path.dirname(os.path.realpath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    calls, files = _load("sandbox_filter"), _load("sandbox_files")


def main(settings: Mapping[str, Any], command: list[str]) -> NoReturn:
    """Shut this process in and run the command."""
    if settings["report_to"] >= 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if settings["mode"] == "namespaces":
        _enter_namespaces(settings)
    elif settings["report_to"] >= 0:
        _go_on_as_child()
    os.chdir(settings["folder"])
    _limit(settings)
    _drop_capabilities()
    calls.new_privileges_off()
    alone = settings["mode"] == "landlock"
    version = files.landlock_version()
    if alone and version < files.LANDLOCK_NEEDED:
        raise OSError(0, f"Landlock has version {version}; {files.LANDLOCK_NEEDED} is needed (Linux 6.2)")
    if version:
        extra = [] if alone else ["/proc"]
        files.allow_only(settings["folder"], [*settings["readable"], *extra])
    calls.forbid_calls(own_namespaces=not alone, forks=settings["forks"])
    if settings["report_to"] >= 0:
        os.write(settings["report_to"], b"entered")
        os.close(settings["report_to"])
    os.execv(command[0], command)


def _enter_namespaces(settings: Mapping[str, Any]) -> None:
    """Go on as a child in namespaces of its own; this process waits and ends as the child ends."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NAMESPACES) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"namespaces cannot be made: {os.strerror(number)}")
    for name, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
    reading, writing = os.pipe()
    first = os.fork()
    if first:
        os.close(writing)
        _end_like(reading, first)
    os.close(reading)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    files.private_mounts(settings["folder"], settings["folder_bytes"])
    program = os.fork()
    if program:
        _wait_as_first(program, writing)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _go_on_as_child() -> None:
    """Go on as a child, whose group, with all that it starts, this process ends when nobody waits any more."""
    program = os.fork()
    if program == 0:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(0, signal.SIGKILL))
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _end_with(os.waitpid(program, 0)[1])


def _wait_as_first(program: int, writing: int) -> NoReturn:
    """The first process of a namespace: reaps what others leave; with it everything ends."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            os.write(writing, str(status).encode())
            os._exit(0)


def _end_like(reading: int, first: int) -> NoReturn:
    """Outside of the namespace: end as the program ended."""
    text = os.read(reading, 64)
    os.waitpid(first, 0)
    _end_with(int(text) if text else FAILED << 8)


def _end_with(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def _limit(settings: Mapping[str, Any]) -> None:
    pairs = [
        (resource.RLIMIT_AS, settings["memory_bytes"]),
        (resource.RLIMIT_FSIZE, settings["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, settings["open_files"]),
        (resource.RLIMIT_MEMLOCK, 0),
    ]
    for kind, value in pairs:
        _lower(kind, value, value)
    # The first limit is a signal that says which limit it was, the second one cannot be caught.
    _lower(resource.RLIMIT_CPU, settings["cpu_s"], settings["cpu_s"] + 1)
    if settings["forks"]:
        own = settings["mode"] == "namespaces" and _kernel() >= (5, 14)  # from then on counted in the namespace
        most = settings["processes"] + (HELPERS if own else _threads_of_user())
        _lower(resource.RLIMIT_NPROC, most, most)


def _lower(kind: int, soft: int, hard: int) -> None:
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(char for char in minor if char.isdigit()) or 0)


def _threads_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat("/proc/" + name).st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def _drop_capabilities() -> None:
    """Nothing that root may do is left to the program, not even in a user namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)
    for capability in range(LAST_CAPABILITY):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if os.geteuid() == 0 and libc.prctl(23, 21, 0, 0, 0) == 1:  # PR_CAPBSET_READ of CAP_SYS_ADMIN
        raise OSError(0, "the rights of root cannot be given up; run as another user")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]), sys.argv[2:])
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(FAILED)
