"""A run folder: the lock that keeps a second process out, and its results, moved aside when the run starts again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import shutil
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from mmrl.config import as_override, escaped
from mmrl.errors import UserError
from mmrl.files import output_folder, read_text
from mmrl.runs.records import STEP_NAME, read_jsonl

EARLIER = "earlier"
MOVED = (
    "samples",
    "outcomes",
    "videos",
    "failures",
    "tensorboard",
    "report.html",
    "result.json",
    "answers.jsonl",
    "warnings.jsonl",
    "replay/dataset",
    "replay/index.bin",
    "evaluations.jsonl",
    "metrics.jsonl",
)
"""Files that a new run appends to or replaces; the two that mark a started run come last. `episodes` is kept: its rows
belong to the weights that produced them. So is the rest of `replay`: prior data, which does not depend on the run."""
LOGGER = logging.getLogger("mmrl")
DONE, NOTHING_LEARNED = FINISHED = ("done", "nothing_learned")
"""Values of `status` in result.json for a run that has reached its last step, with and without an optimiser step."""
LOCK_FILE = "run.lock"


def has_begun(run_dir: Path) -> bool:
    """Whether a run has written results or checkpoints to a folder; `mmrl evaluate` alone does not count."""
    if (run_dir / "metrics.jsonl").exists() or any((run_dir / "checkpoints").glob("step-*")):
        return True
    # an evaluation alone adds rows with the tag "evaluate"
    return any(row.get("tag") != "evaluate" for row in read_jsonl(run_dir / "evaluations.jsonl"))


def resume_command(run_dir: Path) -> str:
    """Command that continues a run."""
    folder = as_override("output_dir", escaped(str(run_dir)))
    return shlex.join(["mmrl", "train", str(run_dir / "config.yaml"), folder, "--resume"])


def set_aside(run_dir: Path) -> Path | None:
    """Move a run's results to a separate folder because the run starts again."""
    found = [run_dir / name for name in MOVED if (run_dir / name).exists()]
    if not found:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = run_dir / EARLIER / stamp
    # two runs within a second
    while folder.exists():
        stamp += "x"
        folder = run_dir / EARLIER / stamp
    folder.mkdir(parents=True)
    for path in found:
        target = folder / path.relative_to(run_dir)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return folder


def forget_after(run_dir: Path, step: int) -> None:
    """Remove samples, outcomes and videos of later steps, which a resumed run writes again."""
    for path in (path for kind in ("samples", "outcomes", "videos") for path in run_dir.glob(f"{kind}/step-*")):
        found = STEP_NAME.match(path.name)
        # names that are not of a step stay
        if found is None or int(found[1]) <= step:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class RunLock:
    """Reserves a run folder for this process.

        with RunLock(Path("runs/mine")):
            ...

    The file contains the owner for messages; only the operating system's lock on it counts, which ends with the
    process.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.path = run_dir / LOCK_FILE
        self._made = False
        self._handle = -1

    def acquire(self) -> None:
        """Take the lock."""
        output_folder(self.run_dir, "output_dir")
        try:
            self._made = not self.run_dir.exists()
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            # the system's lock: it is released when a process ends in any way
            if not take_lock(self._handle):
                os.close(self._handle)
                raise UserError(
                    f"{self.run_dir} is in use by {_owner(self.path)}; wait for it, stop it, or choose another "
                    "output_dir=..."
                )
            if os.fstat(self._handle).st_nlink == 0:  # the owner before removed it while this process opened it
                os.close(self._handle)
                self.acquire()
                return
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            # for messages only, so it may be torn
            os.truncate(self._handle, 0)
            os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()} (since {since})\n".encode())
        except OSError as error:
            raise UserError(f"output_dir {self.run_dir} cannot be written: {error}") from error

    def release(self) -> None:
        """Release the lock, and remove the folder if this lock created it and it is empty."""
        if self._handle >= 0:
            # removed before the lock is released, or a waiting process would lock a file that is about to go
            self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1
        if self._made:
            with contextlib.suppress(OSError):  # a run has begun there
                # fails if the folder holds anything, which is what is wanted
                self.run_dir.rmdir()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def owner_of(run_dir: Path) -> str | None:
    """Describe the running process that uses a run folder; None if there is none."""
    path = run_dir / LOCK_FILE
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would wait for its writer
    except OSError:
        return None
    try:
        return None if take_lock(handle) else _owner(path)
    finally:
        os.close(handle)


def take_lock(handle: int) -> bool:
    """Take the operating system's lock on an open file or folder; False if another process holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        LOGGER.warning("this file system does not support locks; make sure that no two runs share a folder")
    return True


def _owner(path: Path) -> str:
    try:
        return read_text(path, errors="replace").strip() or "another process"
    except (OSError, UserError):  # gone by now, or no file
        return "another process"
