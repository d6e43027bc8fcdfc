"""Random signals over every recipe and stage: each run is ended, resumed to its end, and compared bit for bit."""

import json
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrl.cli import main
from mmrl.recipes import RECIPES
from tests.charts import draw_no_charts
from tests.faults.children import STOPS, Child, Ending, Nursery, import_modules, write_loaded_modules
from tests.faults.sameness import differences
from tests.faults.stages import FILE_STAGES, STAGES, Kill, Watch
from tests.faults.tiny import write_run

__all__ = ["KillCampaign"]

RUN_LIMIT_S = 120.0
MAX_IN_A_ROW = 12
"""Kills of one run before it may finish."""
CHARTS_EVERY = 10
"""One in so many runs draws the charts of its report, which take longer than the run."""
DELAYS_S = (0.0, 0.0005, 0.002, 0.01, 0.03)
"""How long after an operation begins it is cut off."""


@dataclass
class Subject:
    """A recipe with its uninterrupted run."""

    folder: Path
    config: Path
    counts: dict[str, int]
    """Arrivals at each stage."""
    seconds: float

    @property
    def reference(self) -> Path:
        return self.folder / "whole"

    @property
    def parts(self) -> list[str]:
        """Stages of the parts of the run folder that it writes."""
        return [f"files:{part}" for part in (*FILE_STAGES, "other") if self.counts.get(f"files:{part}")]


@dataclass
class KillCampaign:
    """Kills of the runs of some recipes.

    Args:
        folder: scratch folder; emptied where a run ends as it should.
        seed: of places and times.
        recipes: names in `RECIPES`.
    """

    folder: Path
    seed: int
    recipes: Sequence[str] = tuple(RECIPES)
    kills: Counter[str] = field(default_factory=Counter)
    """Counts by "recipe stage"."""
    signals: Counter[str] = field(default_factory=Counter)
    """Counts by signal."""
    runs: Counter[str] = field(default_factory=Counter)
    """Runs that were killed at least once, by recipe."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.nursery = Nursery()
        self._subjects: dict[str, Subject] = {}

    def run(self, count: int, say: Callable[[str], None], until: float = float("inf")) -> None:
        """Kill so many times in all, the recipes in turn.

        Args:
            count: kills.
            say: takes a line at each fault.
            until: time.monotonic() at which no further run is begun.
        """
        started, number = time.monotonic(), 0
        while self.kills.total() < count and time.monotonic() < until:
            recipe = self.recipes[number % len(self.recipes)]
            before = len(self.faults)
            self.torment(recipe, number)
            for fault in self.faults[before:]:
                say(f"FAULT {json.dumps(fault)}")
            number += 1
        self.nursery.close()
        self.seconds += time.monotonic() - started

    def torment(self, recipe: str, number: int) -> None:
        """Kill a run of a recipe several times, resume it to its end and compare it with the reference."""
        subject = self.subject(recipe)
        rng = random.Random(f"{self.seed}-{recipe}-{number}")
        victim = subject.folder / f"killed-{number}"
        history: list[dict[str, Any]] = []
        wanted = rng.randint(1, MAX_IN_A_ROW)
        ending = None
        while ending is None or ending.killed:
            kill = _plan(rng, subject) if len(history) < wanted else None
            ending = self._go_on(subject.config, victim, kill, draws=number % CHARTS_EVERY == 0)
            if ending.killed:
                assert kill is not None
                self.kills[f"{recipe} {kill.stage}"] += 1
                self.signals[signal.Signals(kill.signum).name] += 1
                history.append({**asdict(kill), "at": ending.stage})
        self.runs[recipe] += bool(history)
        self._judge(subject, victim, history, ending)

    def subject(self, recipe: str) -> Subject:
        """A recipe's uninterrupted run: the second one, after every module that a run needs has been imported."""
        if recipe in self._subjects:
            return self._subjects[recipe]
        folder = self.folder / recipe
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = write_run(recipe, folder)
        self._whole(config, folder / "first", folder)
        import_modules(folder / "modules.txt")
        ending = self._whole(config, folder / "whole", folder)
        counts = json.loads((folder / "counts.json").read_text())
        self._subjects[recipe] = Subject(folder, config, counts, ending.seconds)
        return self._subjects[recipe]

    def _whole(self, config: Path, run_dir: Path, folder: Path) -> Ending:
        def go(child: Child) -> int:
            watch = Watch(child, run_dir)
            watch.install()
            draw_no_charts()
            code = main(["train", str(config), f"output_dir={run_dir}"])
            (folder / "counts.json").write_text(json.dumps(watch.counts))
            write_loaded_modules(folder / "modules.txt")
            return code

        ending = self.nursery.run(go, RUN_LIMIT_S)
        if ending.code != 0:
            raise RuntimeError(f"the uninterrupted run of {config} failed:\n{ending.output}")
        return ending

    def _go_on(self, config: Path, victim: Path, kill: Kill | None, draws: bool) -> Ending:
        """Start the run as a user would: with --resume if there is a checkpoint, otherwise from the beginning."""
        timed = kill.delay_s if kill is not None and kill.stage == "any" else None
        for words in (["--resume"], []) if victim.exists() else ([],):

            def go(child: Child, words: list[str] = words) -> int:
                Watch(child, victim, kill).install()
                if not draws:
                    draw_no_charts()
                return main(["train", str(config), f"output_dir={victim}", *words])

            ending = self.nursery.run(
                go, RUN_LIMIT_S, kill_after_s=timed, signum=kill.signum if kill else signal.SIGKILL
            )
            if not (ending.code == 2 and "nothing to resume" in ending.output):
                break
        return ending

    def _judge(self, subject: Subject, victim: Path, history: list[dict[str, Any]], ending: Ending) -> None:
        found = [] if ending.code == 0 else [f"exit {ending.code}, signal {ending.signal}: {ending.output[-2000:]}"]
        found = found or differences(subject.reference, victim)
        if not found:
            shutil.rmtree(victim)
            return
        self.faults.append({"recipe": subject.folder.name, "folder": str(victim), "kills": history, "found": found[:8]})


def _plan(rng: random.Random, subject: Subject) -> Kill:
    """Half of the kills hit operations on files, mostly of checkpoints, a quarter stages, a quarter any time."""
    kind = rng.choices(("files", "stage", "any"), (2, 1, 1))[0]
    signum = rng.choices((signal.SIGKILL, *STOPS), (2, 1, 1))[0]
    if kind == "any":
        return Kill("any", delay_s=rng.uniform(0.0, subject.seconds), signum=signum)
    if kind == "stage":
        stage = rng.choice([name for name in STAGES if subject.counts.get(name) or name == "resume"])
    else:
        parts = subject.parts
        stage = rng.choices(parts, [len(parts) if part == "files:checkpoints" else 1 for part in parts])[0]
    place = rng.randint(1, max(1, subject.counts.get(stage, 1)))
    if rng.random() < 0.5:  # a resumed run has fewer places left
        place = rng.randint(1, place)
    torn = kind == "files" and signum == signal.SIGKILL and rng.random() < 0.3
    return Kill(stage, place, 0.0 if torn else rng.choice(DELAYS_S), torn, signum)
