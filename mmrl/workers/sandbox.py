"""Processes for code that nobody has read: what a model wrote, as a tool call or as a program for an answer.

Promises of a strict process, each kept by what Linux offers without root, and tested by an attempt to break it:

- no network, not even to this machine;
- writes only in a folder of its own, which is also its working, temporary and home folder and goes with it;
- bounded memory, CPU time, file size and number of processes;
- none of this process's environment variables, and no sight of other processes, nor signals to them;
- nothing of it outlives it.

It runs in namespaces of its own, with a seccomp filter and, where the kernel has it, Landlock. Where namespaces cannot
be made (in many containers), Landlock and a stricter filter keep the same promises; where neither works, bubblewrap
does if it is installed. Where nothing works, `require_strict` says what is missing, and nothing runs.
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
ROOT_MAP = ("0", "0")


@dataclass(frozen=True)
class Limits:
    """What a strict process may use."""

    memory_mb: float = 1024
    """MiB of address space of each process; a whole tree may hold as much, where somebody watches it."""
    cpu_s: float = 30
    """Seconds of CPU time of each process."""
    file_mb: float = 64
    """MiB of one file; with namespaces also of all files together."""
    processes: int = 16
    """Processes and threads. Linux does not limit them for root: there no process can be started, and threads are only
    counted while `run_code` waits."""


def strict_command(mode: str, limits: Limits, folder: str, readable: Sequence[str], report_to: int = -1) -> list[str]:
    """Say how a program is started strictly; program and arguments follow."""
    settings = {
        "mode": mode,
        "folder": folder,
        "readable": [*_python_folders(), *readable],
        "memory_bytes": int(limits.memory_mb * MIB),
        "cpu_s": max(1, int(limits.cpu_s)),
        "file_bytes": int(limits.file_mb * MIB),
        "folder_bytes": int(limits.file_mb * MIB),
        "processes": limits.processes,
        "open_files": OPEN_FILES,
        "forks": not _is_root(),
        "report_to": report_to,
    }
    enter = [sys.executable, "-I", "-S", str(SCRIPT), json.dumps(settings)]
    if mode != "bubblewrap":
        return enter
    return [*_bubblewrap(folder), *(["--die-with-parent"] if report_to >= 0 else []), *enter]


def strict_environment(folder: str) -> dict[str, str]:
    """All that a strict process gets to know of environment variables."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "MPLCONFIGDIR"), folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        **dict.fromkeys(names, "1"),
    }


def new_folder() -> str:
    """Make the folder of a strict process."""
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
def require_strict() -> str:
    """Find out how strict processes can be run here."""
    if not sys.platform.startswith("linux"):
        raise UserError(f"sandbox: strict needs Linux; this is {sys.platform}. Run it in a Linux container or machine")
    remove_abandoned()
    reasons = {}
    for mode in MODES:
        reason = _try(mode)
        if reason is None:
            return mode
        reasons[mode] = reason
    listed = "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items())
    raise UserError(
        f"sandbox: strict cannot keep its promises here ({listed}). Any of these helps: allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0, or for a container "
        "--security-opt seccomp=unconfined), a kernel with Landlock from 6.2 on (lsm=landlock,...), or an installed "
        "bubblewrap. Otherwise set sandbox: none, and give it no code that a model wrote"
    )


def _try(mode: str) -> str | None:
    """Run a program that does nothing; returns why it did not run."""
    if mode == "bubblewrap" and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    folder = new_folder()
    try:
        command = [
            *strict_command(mode, Limits(), folder, ()),
            sys.executable,
            "-I",
            "-S",
            "-c",
            "print('ready')",
        ]
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


def _python_folders() -> list[str]:
    """Where this interpreter and what is installed in it lie."""
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()]
    paths = [*folders, os.path.abspath(sys.executable), os.path.realpath(sys.executable)]
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)} - {"/"})


def _is_root() -> bool:
    """Whether Linux spares this process the limit of processes; root of a container's own users is not spared."""
    if os.geteuid() != 0:
        return False
    try:
        first = Path("/proc/self/uid_map").read_text().split()
    except OSError:
        return True
    return tuple(first[:2]) == ROOT_MAP


def _bubblewrap(folder: str) -> list[str]:
    program = shutil.which("bwrap") or "bwrap"
    shown = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--bind", folder, folder, "--chdir", folder]
    return [program, "--unshare-all", "--cap-drop", "ALL", *shown]


MODES = ("namespaces", "landlock", "bubblewrap")
"""How a strict process is shut in, the best first."""
