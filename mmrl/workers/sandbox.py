"""Runs code that nobody has read (programs and tool calls of a model) in bubblewrap.

A strict process has

- no network, not even to this machine;
- one writable folder, in memory, which is its working, temporary and home folder and is gone afterwards;
- bounded memory, CPU time, file size and number of processes;
- none of this process's environment variables, no sight of other processes and no signals to them;
- nothing that outlives it.

bubblewrap makes the namespaces and mounts, libseccomp the filter of system calls, `setrlimit` the limits. Each promise
is tested by an attempt to break it. Where a tool is missing or the kernel refuses, `require_strict` says what to do.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import UserError

SCRIPT = Path(__file__).resolve().with_name("sandbox_enter.py")
ENTERED = b"entered"
MIB = 1 << 20
PROBE_SECONDS = 30.0
PREFIX, ABANDONED_SECONDS = "mmrl_strict_", 86400.0
OPEN_FILES = 256
GIVEN = "/run/given"
"""Path at which a strict process finds the files that its folder starts with."""
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
    """MiB of address space of each process; `run_code` holds all of them together to it."""
    cpu_s: float = 30
    """Seconds of CPU time of each process."""
    file_mb: float = 64
    """MiB of all its files together."""
    processes: int = 16
    """Processes and threads. Linux does not limit them for root: there no process can be started, and threads are only
    counted while `run_code` waits."""


def strict_command(limits: Limits, folder: str, readable: Sequence[str], report_to: int = -1) -> list[str]:
    """Return the command to which the program and its arguments are appended."""
    memory, files, cpu = int(limits.memory_mb * MIB), int(limits.file_mb * MIB), max(1, int(limits.cpu_s))
    bounds = {
        "RLIMIT_AS": (memory, memory),
        "RLIMIT_FSIZE": (files, files),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_NOFILE": (OPEN_FILES, OPEN_FILES),
        "RLIMIT_MEMLOCK": (0, 0),
        "RLIMIT_CPU": (cpu, cpu + 1),  # the first is a signal that names the limit, the second kills
    }
    if not _is_root():  # before Linux 5.14 all of the user's processes count, not only those of the namespace
        bounds["RLIMIT_NPROC"] = (limits.processes + _threads_of_user(),) * 2
    settings = {"given": GIVEN, "limits": bounds, "forks": not _is_root(), "report_to": report_to}
    paths = [*READABLE, *_python_paths(), str(SCRIPT), *readable]
    names = {Path(name) for path in paths for name in (path, os.path.realpath(path)) if name != "/"}
    shown = [str(path) for path in sorted(names) if names.isdisjoint(path.parents)]
    return [
        *(shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--new-session"),
        *(["--die-with-parent"] if report_to >= 0 else []),
        *(part for path in shown for part in ("--ro-bind-try", path, path)),
        *(
            "--dev",
            "/dev",
            "--remount-ro",
            "/dev",
            "--proc",
            "/proc",
            "--remount-ro",
            "/proc",
            "--ro-bind",
            folder,
            GIVEN,
        ),
        *("--size", str(files), "--tmpfs", folder, "--remount-ro", "/", "--chdir", folder),
        *(sys.executable, "-I", "-S", str(SCRIPT), json.dumps(settings)),
    ]


def strict_environment(folder: str) -> dict[str, str]:
    """Return all environment variables of a strict process."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"), folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(names, "1"),
    }


def new_folder() -> str:
    """Make the folder whose files a strict process starts with."""
    return os.path.realpath(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}_"))


def remove_folder(folder: str) -> None:
    """Remove the folder of a strict process that has ended."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove folders that killed programs left behind, a day later: another container may share the place."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*_*"):
        owner = folder.name.removeprefix(PREFIX).partition("_")[0]
        try:
            old = time.time() - folder.stat().st_mtime > ABANDONED_SECONDS
        except OSError:  # somebody else removes it
            continue
        if old and owner.isdigit() and not Path("/proc", owner).exists():
            remove_folder(str(folder))


@functools.cache
def require_strict() -> None:
    """Refuse if strict processes cannot run, with a remedy."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"sandbox: strict needs Linux; this is {sys.platform}. Run it in a Linux container or machine")
    remove_abandoned()
    reason = why_not()
    if reason is not None:
        raise UserError(
            f"sandbox: strict cannot keep its promises here ({reason}). Install what is missing (apt install "
            "bubblewrap libseccomp2, or dnf install bubblewrap libseccomp) and allow user namespaces (sysctl "
            "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, or for a container "
            "--security-opt seccomp=unconfined). Otherwise set sandbox: none, and give it no code that a model wrote"
        )


def why_not() -> str | None:
    """Run a program that does nothing; return why it did not run, None where it did."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    folder = new_folder()
    command = [*strict_command(Limits(), folder, ()), sys.executable, "-I", "-S", "-c", "print('ready')"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=strict_environment(folder),
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        remove_folder(folder)
    if done.returncode == 0 and done.stdout == "ready\n":
        return None
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
