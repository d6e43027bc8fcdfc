"""Hostile surroundings: a full disk, a folder that cannot be written, few handles, little memory, no /dev/shm, a clock
that goes back. A run ends with one line or continues, and resumes to the same bits once the fault is gone.
"""

import ctypes
import os
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.cli import main
from tests.charts import draw_no_charts
from tests.faults.children import Child, Ending
from tests.faults.kills import RUN_LIMIT_S, KillCampaign, Subject
from tests.faults.sameness import differences
from tests.faults.stages import Kill, Watch, fill_disk
from tests.faults.tiny import STEPS

__all__ = ["SURROUNDINGS", "SurroundingsCampaign"]

CAPABILITY_VERSION = 0x20080522
DAC_CAPABILITIES = 0b110
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 16384, 1 << 18


class _ImpossibleError(Exception):
    """The fault cannot be produced on this machine."""


def _full_disk(rng: random.Random, run_dir: Path) -> None:
    fill_disk(rng.choice((0, 100, 1000, 3000, 10_000, 30_000, 100_000)))


def _fills_up(rng: random.Random, run_dir: Path) -> None:
    """The disk is full from one of the operations on a file on, see `_meet`."""


def _read_only(rng: random.Random, run_dir: Path) -> None:
    """The folder of the run, or the one that it would be made in, belongs to somebody else."""
    if rng.random() < 0.5:
        run_dir.mkdir(parents=True)
    os.chmod(run_dir if run_dir.exists() else run_dir.parent, 0o555)
    if os.geteuid() == 0:
        _obey_permissions()


def _obey_permissions() -> None:
    """Drop the capabilities that let root write anywhere: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(header, sets):
        raise _ImpossibleError
    sets[0] &= ~DAC_CAPABILITIES  # effective; permitted and inheritable follow
    sets[1] &= ~DAC_CAPABILITIES
    if libc.capset(header, sets):
        raise _ImpossibleError


def _few_handles(rng: random.Random, run_dir: Path) -> None:
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + rng.randint(0, 8),) * 2)


def _little_memory(rng: random.Random, run_dir: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + rng.choice((0, 1, 4, 16, 64)) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _no_shared_memory(rng: random.Random, run_dir: Path) -> None:
    """An empty read-only folder instead of /dev/shm."""
    libc = ctypes.CDLL(None, use_errno=True)
    flags = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if libc.unshare(flags) or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None):
        raise _ImpossibleError
    if libc.mount(b"none", b"/dev/shm", b"tmpfs", MS_RDONLY, b"size=0"):
        raise _ImpossibleError


def _clock_set_back(rng: random.Random, run_dir: Path) -> None:
    clock, at = time.time, time.monotonic() + rng.uniform(0.0, 1.0)
    time.time = lambda: clock() - (86_400.0 if time.monotonic() > at else 0.0)


SURROUNDINGS: dict[str, Callable[[random.Random, Path], None]] = {
    "full disk": _full_disk,
    "disk that fills up": _fills_up,
    "read-only folder": _read_only,
    "few file handles": _few_handles,
    "little memory": _little_memory,
    "no /dev/shm": _no_shared_memory,
    "clock set back": _clock_set_back,
}
HARMLESS = ("no /dev/shm", "clock set back")


@dataclass
class SurroundingsCampaign:
    """Runs in hostile surroundings.

    Args:
        kills: campaign whose uninterrupted runs are compared with.
        seed: of the faults' sizes.
    """

    kills: KillCampaign
    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """Runs by fault and how they ended."""
    faults: list[dict[str, Any]] = field(default_factory=list)

    def run(self, count: int, say: Callable[[str], None]) -> None:
        """Meet every fault so many times, the recipes in turn."""
        for name in SURROUNDINGS:
            for number in range(count):
                recipe = self.kills.recipes[number % len(self.kills.recipes)]
                outcome, found = self._meet(name, self.kills.subject(recipe), number)
                self.counts.setdefault(name, Counter())[outcome] += 1
                if found:
                    self.faults.append({"surroundings": name, "recipe": recipe, "number": number, "found": found})
                    say(f"FAULT {self.faults[-1]}")
            say(f"{name}: {dict(self.counts.get(name, {}))}")

    def _meet(self, name: str, subject: Subject, number: int) -> tuple[str, str]:
        run_dir = subject.folder / f"{name.replace(' ', '-').replace('/', '')}-{number}" / "run"
        run_dir.parent.mkdir()
        rng = random.Random(f"{self.seed}-{name}-{number}")

        def go(child: Child, spoilt: bool = True, *words: str) -> int:
            draw_no_charts()
            if spoilt:
                try:
                    SURROUNDINGS[name](rng, run_dir)
                    if name == "disk that fills up":
                        stage = subject.parts[number % len(subject.parts)]
                        Watch(
                            child, run_dir, Kill(stage, rng.randint(1, subject.counts[stage]), fills_disk=True)
                        ).install()
                except _ImpossibleError:
                    return 77
            return main(["train", str(subject.config), f"output_dir={run_dir}", *words])

        ending = self.kills.nursery.run(go, RUN_LIMIT_S)
        if ending.code == 77:
            shutil.rmtree(run_dir.parent)
            return "impossible here", ""
        found = _wrong_end(name, ending)
        for path in (run_dir.parent, run_dir):
            if path.exists():
                path.chmod(0o755)
        if not found and ending.code != 0:
            found = self._repaired(subject, run_dir, go)
        if not found and ending.code == 0:
            found = self._same(subject, run_dir)
        if not found:
            shutil.rmtree(run_dir.parent)
        return f"exit {ending.code}", found

    def _repaired(self, subject: Subject, run_dir: Path, go: Callable[..., int]) -> str:
        """Continue as a user would when the fault is gone."""
        for words in (("--resume",), ()):
            ending = self.kills.nursery.run(lambda child, words=words: go(child, False, *words), RUN_LIMIT_S)
            if ending.code == 0:
                return self._same(subject, run_dir)
            if "nothing to resume" not in ending.output:
                break
        return f"afterwards: exit {ending.code}: {ending.output[-1500:]}"

    def _same(self, subject: Subject, run_dir: Path) -> str:
        name = f"checkpoints/step-{STEPS:06d}"
        found = differences(subject.reference / name, run_dir / name)
        return f"other bits: {found[:4]}" if found else ""


def _wrong_end(name: str, ending: Ending) -> str:
    """Problem with the end of a run; empty if it is as promised."""
    if ending.hung:
        return f"hung: {ending.output[-1500:]}"
    if "Traceback (most recent call last)" in ending.output:
        return f"traceback: {ending.output[-1500:]}"
    allowed = (0,) if name in HARMLESS else (2,) if name == "read-only folder" else (0, 1, 2)
    if ending.code not in allowed:
        return f"exit {ending.code}, signal {ending.signal}: {ending.output[-1500:]}"
    if ending.code and not ending.last_line().startswith("mmrl: "):
        return f"no line says why: {ending.output[-1500:]}"
    return ""
