"""Ends a run at a chosen stage of the loop or operation on the files of its folder."""

import functools
import importlib
import os
import resource
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.children import Child

__all__ = ["FILE_STAGES", "STAGES", "Kill", "Watch", "fill_disk"]

STAGES = {
    "rollout": "mmrl.training.trainer:Trainer.collect",
    "advantages": "mmrl.training.recipe:Recipe.advantages",
    "update": "mmrl.training.update:Updater.update",
    "evaluate": "mmrl.training.trainer:Trainer.evaluate",
    "checkpoint": "mmrl.training.saving:RunSaver.save",
    "best": "mmrl.training.saving:RunSaver.note_best",
    "resume": "mmrl.training.saving:RunSaver.resume",
    "line": "mmrl.runs.records:JsonLines.append",
    "result": "mmrl.runs.run_log:RunLog.result",
}
"""Methods at whose start a run may be killed."""
FILE_STAGES = ("checkpoints", "samples", "metrics.jsonl", "evaluations.jsonl", "episodes", "videos", "reference")
"""Parts of a run folder in the order of the table; others are summed up as `files`."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "shutil.copyfile"}


@dataclass(frozen=True)
class Kill:
    """Point at which a run ends."""

    stage: str
    """Key of STAGES, `files:<part>`, or `any` for a time."""
    place: int = 1
    """At which arrival there."""
    delay_s: float = 0.0
    """How much later; the run goes on until then. For `any`, since the start."""
    torn: bool = False
    """Whether a file that is about to be written is left half-written."""
    signum: int = signal.SIGKILL
    """SIGKILL, or a signal after which a run is to end by itself."""
    fills_disk: bool = False
    """Whether instead no file can be written from there on."""


class Watch:
    """Counts arrivals in a child and ends it at the planned one.

    Args:
        child: the process.
        run_dir: folder of the run, whose files are watched.
        kill: where to end; None only counts.
    """

    def __init__(self, child: Child, run_dir: Path, kill: Kill | None = None) -> None:
        self.child = child
        self.run_dir = f"{run_dir.resolve()}{os.sep}"
        self.kill = kill
        self.counts: Counter[str] = Counter()
        self._stack = ["start"]
        self._writes_torn = False

    def install(self) -> None:
        """Watch the stages and files of this process from now on."""
        self.child.note("start")
        for name, address in STAGES.items():
            module, _, path = address.partition(":")
            owner, _, method = path.partition(".")
            kind = getattr(importlib.import_module(module), owner)
            setattr(kind, method, self._watched(name, getattr(kind, method)))
        sync = os.fsync
        os.fsync = lambda fd: (self._file_arrival(os.readlink(f"/proc/self/fd/{fd}"), "os.fsync"), sync(fd))[1]
        sys.addaudithook(self._audit)

    def _watched(self, name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            self._stack.append(name)
            self._arrive(name)
            try:
                return method(*args, **options)
            finally:
                self._stack.pop()
                self.child.note(self._stack[-1])

        return call

    def _arrive(self, name: str) -> bool:
        """Record an arrival; return whether the run ends here."""
        self.counts[name] += 1
        self.child.note(name)
        if self.kill is None or self.kill.stage != name or self.counts[name] != self.kill.place:
            return False
        if self.kill.fills_disk:
            fill_disk()
        elif self.kill.torn and name.startswith("files:"):
            return True
        else:
            self.child.die(self.kill.delay_s, self.kill.signum)
        return False

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _mode, flags = args
            if isinstance(path, str | bytes | os.PathLike) and (flags or 0) & WRITING:
                self._file_arrival(os.fsdecode(path), event)
        elif event in OPERATIONS and isinstance(args[0], str | bytes | os.PathLike):
            self._file_arrival(os.fsdecode(args[0]), event)

    def _file_arrival(self, path: str, event: str) -> None:
        if self._writes_torn or not os.path.abspath(path).startswith(self.run_dir):
            return
        part = os.path.abspath(path)[len(self.run_dir) :].partition(os.sep)[0].removesuffix(".partial")
        if self._arrive(f"files:{part if part in FILE_STAGES else 'other'}"):
            self._writes_torn = True
            if event == "open":
                _tear(path)
            self.child.die()


def fill_disk(most_bytes: int = 0) -> None:
    """No file can grow beyond a size, which fails in every writer, native ones too, as a full disk does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _tear(path: str) -> None:
    """Write the file of a writer that was killed before its first flush, or after half of a line."""
    appends = path.endswith(".jsonl")
    with open(path, "ab" if appends else "wb") as file:
        file.write(b'{"step": 3, "rew' if appends else b"{")
