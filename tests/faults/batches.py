"""Many damaged inputs in few processes: a forked child tries a batch, and its parent detects hangs and crashes."""

import contextlib
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrl.cli import main
from mmrl.errors import RunError, UserError
from tests.faults.children import Child, Nursery

__all__ = ["InputCampaign", "Kind", "Verdict", "of_call", "of_command"]

GRACE_S = 5.0
"""A case hangs when it takes so much longer than its limit."""
BATCH = 200
MEMORY_BYTES = 4 << 30
"""Memory that a case may use in addition to that of the process."""
FINE = ("done", "refused", "failed", "skipped")


@dataclass(frozen=True)
class Verdict:
    """Outcome of a case."""

    outcome: str
    """done, refused (exit 2), failed (exit 1 with the reason), skipped (counted, the rest goes on) or fault."""
    note: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of damaged input."""

    name: str
    prepare: Callable[[Path], Any]
    """Makes the sound files, once, in a folder; what it returns goes to every attempt."""
    attempt: Callable[[Any, random.Random, Path], Verdict]
    """Damages something, uses it in an empty folder and says how that ended."""
    share: float = 1.0
    """How many cases of all, relative to the others."""
    limit_s: float = 10.0
    """Time that a case may take of its own accord."""


@dataclass
class InputCampaign:
    """Tries damaged inputs.

    Args:
        folder: scratch folder.
        seed: of all cases.
        kinds: what is damaged.
    """

    folder: Path
    seed: int
    kinds: tuple[Kind, ...]
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Cases by kind and outcome."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nursery = Nursery()

    def run(self, count: int, say: Callable[[str], None], first: int = 0, until: float = math.inf) -> None:
        """Try so many cases in all, shared out among the kinds.

        Args:
            count: cases.
            say: takes a line for each fault and each kind.
            first: number of the first case of each kind.
            until: time.monotonic() at which no further kind is begun.
        """
        started = time.monotonic()
        total = sum(kind.share for kind in self.kinds)
        for kind in self.kinds:
            if time.monotonic() > until:
                break
            self._try_kind(kind, range(first, first + max(1, round(count * kind.share / total))), say)
        self.nursery.close()
        self.seconds += time.monotonic() - started

    def _try_kind(self, kind: Kind, numbers: range, say: Callable[[str], None]) -> None:
        folder = self.folder / kind.name
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "sound").mkdir(parents=True)
        prepared, before = kind.prepare(folder / "sound"), time.monotonic()
        counts = self.counts.setdefault(kind.name, Counter())
        number = numbers.start
        while number < numbers.stop:
            found = self._batch(kind, prepared, range(number, min(number + BATCH, numbers.stop)))
            for row in found:
                counts[row["outcome"]] += 1
                if row["outcome"] not in FINE:
                    self.faults.append({"kind": kind.name, "seed": self.seed, **row})
                    say(f"FAULT {json.dumps(self.faults[-1])}")
            number += len(found)
        say(f"{kind.name}: {dict(counts)} in {time.monotonic() - before:.0f} s")
        shutil.rmtree(folder, ignore_errors=True)

    def _batch(self, kind: Kind, prepared: Any, numbers: range) -> list[dict[str, Any]]:
        """Try some cases in a child; ends early at one that hangs or crashes."""
        results = self.folder / "results.jsonl"
        results.unlink(missing_ok=True)
        place = self.folder / kind.name / "case"

        def attempt_all(child: Child) -> int:
            _limit_memory()
            with results.open("a") as file:
                for number in numbers:
                    row = {"number": number, **asdict(_attempt(kind, prepared, number, self.seed, place))}
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            return 0

        ending = self.nursery.run(attempt_all, limit_s=len(numbers) * (kind.limit_s + GRACE_S))
        found = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        if len(found) < len(numbers):
            hung = ending.signal == signal.SIGALRM or ending.hung
            what = "hang" if hung else f"crash: exit {ending.code}, signal {ending.signal}"
            found.append({"number": numbers[len(found)], "outcome": what, "note": ending.output[-3000:]})
        return found


def of_call(call: Callable[[], Any], *, skips: tuple[type[BaseException], ...] = ()) -> Verdict:
    """Call a function of the suite and judge how it ends.

    Args:
        call: uses the damaged input.
        skips: errors that cost one row and are counted.
    """
    try:
        with _caught_output():
            call()
    except UserError as error:
        return _judged_line("refused", str(error))
    except skips as error:
        return _judged_line("skipped", str(error))
    except RunError as error:
        return _judged_line("failed", str(error))
    except BaseException:
        return Verdict("traceback", traceback.format_exc()[-3000:])
    return Verdict("done")


def of_command(*arguments: object, may_fail: bool = False) -> Verdict:
    """Run a command of `mmrl` and judge its exit code and what it says.

    Args:
        arguments: after the program's name.
        may_fail: whether exit 1 with a reason is an answer.
    """
    try:
        with _caught_output() as errors:
            code = main([str(argument) for argument in arguments])
    except BaseException:
        return Verdict("traceback", traceback.format_exc()[-3000:])
    said = errors.getvalue()
    lines = [line for line in said.splitlines() if not line.startswith("mmrl: warning: ")]
    # that of a user's own reward is shown to its author, as warnings
    if any("Traceback (most recent call last)" in line for line in lines):
        return Verdict("traceback", said[-3000:])
    if code == 0:
        return Verdict("done")
    wanted = {2: "mmrl: error: ", 1: "mmrl: run failed: "}
    if code not in wanted or (code == 1 and not may_fail):
        return Verdict(f"exit {code}", (said + _last_crash())[-3000:])
    if not lines or not lines[-1].startswith(wanted[code]) or (code == 2 and len(lines) != 1):
        return Verdict("more than one line", said[-3000:])
    return _judged_line("refused" if code == 2 else "failed", lines[-1])


def _last_crash() -> str:
    """The traceback that the last resort of the command line wrote in the case's folder."""
    files = sorted(Path().rglob("mmrl-crash-*.txt"), key=lambda path: path.stat().st_mtime)
    return files[-1].read_text(encoding="utf-8", errors="replace") if files else ""


def _judged_line(outcome: str, line: str) -> Verdict:
    return Verdict(outcome, line[:300]) if line.strip() else Verdict("empty message")


def _attempt(kind: Kind, prepared: Any, number: int, seed: int, place: Path) -> Verdict:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    os.chdir(place)  # what a damaged path makes stays in the case's own folder
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, kind.limit_s + GRACE_S)  # its default action ends the process from outside
    try:
        return kind.attempt(prepared, random.Random(f"{seed}-{kind.name}-{number}"), place)
    except BaseException:
        return Verdict("harness", traceback.format_exc()[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@contextlib.contextmanager
def _caught_output() -> Iterator[io.StringIO]:
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        yield errors
