"""What went wrong in environments: each reason is logged once, with its traceback in a file, and counted."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from pathlib import Path

from mmrl.workers.failures import WorkerFailure

log = logging.getLogger(__name__)
MAX_FILES = 100
"""Tracebacks kept of a run; reasons beyond that are still counted and logged."""


class FailureLog:
    """Reasons that differ only in numbers are one."""

    def __init__(self, name: str, folder: Path | None = None) -> None:
        self.name, self.folder = name, folder
        self.counts: Counter[str] = Counter()
        """By reason, how often it came."""

    def note(self, failure: WorkerFailure) -> None:
        """Count a failure; log it where its reason is new, or when it came for the 10th, 100th, ... time."""
        reason = re.sub(r"\d+", "#", f"{failure.kind}: {failure.reason}")
        self.counts[reason] += 1
        count = self.counts[reason]
        if count == 1:
            kept = self._write(reason, failure)
            where = f"; what it said is in {kept}" if kept is not None else ""
            log.warning("the environment %s %s: %s%s", self.name, failure.kind, failure.reason, where)
        elif re.fullmatch("10+", str(count)):
            log.warning("the environment %s: %d times so far: %s", self.name, count, reason)

    def summary(self) -> None:
        """Log how often each reason came that came more than once."""
        for reason, count in self.counts.most_common():
            if count > 1:
                log.warning("the environment %s: %d times in all: %s", self.name, count, reason)

    def _write(self, reason: str, failure: WorkerFailure) -> Path | None:
        if self.folder is None or len(self.counts) > MAX_FILES:
            return None
        digest = hashlib.sha256(reason.encode()).hexdigest()[:8]
        path = self.folder / f"environment-{failure.kind}-{digest}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{self.name} {failure.kind}: {failure.reason}\n\n{failure.evidence}\n", errors="replace")
        except OSError as error:
            log.warning("the environment's traceback cannot be written to %s: %s", path, error)
            return None
        return path
