"""Run unreviewed code (programs and tool calls of a model) in bubblewrap.

A strict process has

- no network, not even to this machine;
- one writable folder, in memory, which is its working, temporary and home folder and goes with its namespace: nothing
  that it writes is on a disk or has to be removed;
- bounded memory, CPU time, size and number of files, processes and threads;
- none of this process's environment variables, no sight of other processes and no signals to them;
- nothing that outlives it.

bubblewrap makes the namespaces and mounts, libseccomp the filter of system calls, `setrlimit` the limits; the process
that waits watches the rest (`over_limit`). Each promise is tested by an attempt to break it. Where a tool is missing or
the kernel refuses, `require_strict` says what to do.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import UserError
from mmrl.workers import family

SCRIPT = Path(__file__).resolve().with_name("sandbox_enter.py")
ENTERED = b"entered"
MIB = 1 << 20
PROBE_SECONDS = 30.0
OPEN_FILES = 256
FOLDER = "/mmrl_strict"
"""Folder of a strict process, as seen from inside."""
HELPERS = 3
"""Number of processes around the program that create and keep its namespaces."""
READABLE = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/sys/devices/system"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/etc/fonts", "/etc/mime.types", "/etc/locale.alias"),
)
"""Programs, libraries and their configuration; no home, no data, no secrets of services."""


@dataclass(frozen=True)
class Limits:
    """Limits of a strict process."""

    memory_mb: float = 1024
    """Address space of each process in MiB; `run_code` applies this limit to all processes together."""
    cpu_s: float = 30
    """CPU time of each process in seconds."""
    file_mb: float = 64
    """Total size of its files in MiB."""
    processes: int = 16
    """Number of processes and threads. Linux does not limit them for root; as root, no process can be started, and
    threads are counted while waiting for a reply."""
    files: int = 10_000
    """Number of files and folders, which use kernel memory not covered by other limits; counted in the same way."""


def strict_command(
    limits: Limits, readable: Sequence[str], files: Mapping[str, int] | None = None, report_to: int = -1
) -> list[str]:
    """Return the command to which the program and its arguments are appended.

    Args:
        limits: of the program.
        readable: files and folders that it sees besides Python and system libraries.
        files: descriptors by name, whose contents its folder starts with.
        report_to: descriptor on which it reports that it has entered; -1 for none.
    """
    memory, bytes_of_files, cpu = int(limits.memory_mb * MIB), int(limits.file_mb * MIB), max(1, int(limits.cpu_s))
    # Soft and hard limits, by their names in the resource module.
    bounds = {
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_FSIZE": (bytes_of_files, bytes_of_files),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_CPU": (cpu, cpu + 1),  # the first is a signal that names the limit, the second kills
    }
    if not _is_root():  # before Linux 5.14 all of the user's processes count, not only those of the namespace
        bounds["RLIMIT_NPROC"] = (limits.processes + _threads_of_user(),) * 2
    settings = {"limits": bounds, "forks": not _is_root(), "report_to": report_to}
    paths = [*READABLE, *_python_paths(), str(SCRIPT), *readable]
    names = {Path(name) for path in paths for name in (path, os.path.realpath(path)) if name != "/"}
    # Without paths inside others: bubblewrap would bind them twice.
    shown = [str(path) for path in sorted(names) if names.isdisjoint(path.parents)]
    return [
        # No network, no other processes, no rights; a new session takes the terminal away.
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--new-session"),
        *(["--die-with-parent"] if report_to >= 0 else []),
        # Read-only, and -try: not every system has every path.
        *(part for path in shown for part in ("--ro-bind-try", path, path)),
        # The program sees its own processes only.
        *("--dev", "/dev", "--remount-ro", "/dev", "--proc", "/proc", "--remount-ro", "/proc"),
        # In memory and of limited size: its files count against the limit and go with the namespace.
        *("--size", str(bytes_of_files), "--tmpfs", FOLDER),
        *(part for name, fd in (files or {}).items() for part in ("--file", str(fd), f"{FOLDER}/{name}")),
        *("--remount-ro", "/", "--chdir", FOLDER),
        *(sys.executable, "-I", "-S", str(SCRIPT), json.dumps(settings)),
    ]


def strict_environment() -> dict[str, str]:
    """Return all environment variables of a strict process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        # Programs that want a home or a cache get the one folder that can be written.
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"), FOLDER),
        "PYTHONDONTWRITEBYTECODE": "1",
        # One thread each, since threads count against the limit of processes.
        **dict.fromkeys(names, "1"),
    }


def over_limit(pid: int, limits: Limits) -> tuple[str, str] | None:
    """Name and description of an exceeded limit of a strict process, among those that `setrlimit` does not enforce."""
    # Less the processes that bubblewrap adds.
    threads, files = family.threads(pid) - HELPERS, _files(pid)
    if threads > limits.processes:
        return "processes", f"it ran {threads} processes and threads; at most {limits.processes} are allowed"
    if files > limits.files:
        return "files", f"it had {files} files and folders; at most {limits.files} are allowed"
    return None


def _files(pid: int) -> int:
    """Files and folders in the folder of a strict process; 0 if it cannot be read."""
    # From the innermost process: those around it are outside of the namespace.
    for each in reversed(family.tree(pid)):
        try:
            found = os.statvfs(f"/proc/{each}/root{FOLDER}")
        except OSError:  # outside, or it has just ended
            continue
        return found.f_files - found.f_ffree
    return 0


# Once a process: trying it starts a program.
@functools.cache
def require_strict() -> None:
    """Raise an error with a remedy if strict processes cannot run."""
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"sandbox: strict requires Linux; this is {sys.platform}. Run it in a Linux container or on a Linux machine"
        )
    reason = why_not()
    if reason is not None:
        raise UserError(
            f"sandbox: strict cannot guarantee isolation on this machine ({reason}). Install what is missing (apt "
            "install bubblewrap libseccomp2, or dnf install bubblewrap libseccomp) and allow user namespaces "
            "(sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, or for "
            "a container --security-opt seccomp=unconfined). Otherwise set sandbox: none, and do not run "
            "model-written code with it"
        )


def why_not() -> str | None:
    """Run a program that does nothing; return the reason if it did not run, or None if it did."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    # A whole strict process, since each of its parts may be missing or forbidden.
    command = [*strict_command(Limits(), ()), sys.executable, "-I", "-S", "-c", "print('ready')"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=strict_environment(),
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0 and done.stdout == "ready\n":
        return None
    # The last line of a failure names its cause.
    return (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1][:200]


def _python_paths() -> list[str]:
    """Paths of this interpreter and its installed packages."""
    return [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages(), os.path.abspath(sys.executable)]


def _is_root() -> bool:
    """Whether Linux exempts this process from the limit of processes; a container's own root is not exempt."""
    if os.geteuid() != 0:
        return False
    try:
        return Path("/proc/self/uid_map").read_text().split()[:2] == ["0", "0"]
    except OSError:
        return True


def _threads_of_user() -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count
