"""The watched folders: runs, folders of runs, the queue of a comparison, and all of them as text for a terminal."""

from __future__ import annotations

import math
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mmrl.cli.watch.runs import WatchedRun, interval_text, json_object
from mmrl.comparison.plans import MARKER, sweep_label
from mmrl.errors import UserError
from mmrl.runs.metrics import label, measured
from mmrl.runs.statistics import HEADLINES, SHARES

SIGNS_OF_A_RUN = {"metrics.jsonl", "evaluations.jsonl", "config.yaml", "run.lock", MARKER}
DEEPEST = 4
"""Maximum depth of a run below a watched folder, such as a comparison's `sweep/ARM/VALUE/seed-1`."""
READ_S = 0.6
"""Maximum seconds of reading before a reply; the rest is read before the next one."""


class WatchedFolders:
    """The runs of the given folders, searched on each refresh because a comparison adds runs over time."""

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise UserError(f"folder not found: {folder}; `mmrl watch` takes folders of runs or of comparisons")
        self.folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self.runs: dict[str, WatchedRun] = {}
        self.behind = False
        """Whether long files have not been read completely yet."""

    def refresh(self, seconds: float = READ_S) -> None:
        """Find the runs and read what they have written since the last refresh."""
        found = {_name(place, self.folders): place for folder in self.folders for place in _runs_below(folder)}
        known = self.runs
        self.runs = {name: known.get(name) or WatchedRun(place, name) for name, place in found.items()}
        deadline = time.monotonic() + seconds
        ended = [run.refresh(deadline) for run in self.runs.values()]
        self.behind = not all(ended)

    def comparisons(self) -> list[dict[str, Any]]:
        """Queue and current results of each folder of `mmrl compare`."""
        contents = [(folder, json_object(folder / "comparison.json")) for folder in self.folders]
        return [self._comparison_or_problem(folder, content) for folder, content in contents if content]

    def _comparison_or_problem(self, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._comparison(folder, content)
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # a file that was edited
            problem = f"{folder.name}: comparison.json cannot be read ({type(error).__name__}: {error})"
            nothing: dict[str, Any] = {"queue": [], "arms": [], "counts": Counter()}
            return {"name": problem, "metric": "", "difference": "difference", **nothing}

    def _comparison(self, folder: Path, content: dict[str, Any]) -> dict[str, Any]:
        names = {run.folder.relative_to(folder).as_posix(): run for run in self._below(folder)}
        planned = list(dict.fromkeys([*(key for key in names if "/" not in key), *planned_runs(content)]))
        queue = []
        for key in [*planned, *(key for key in names if key not in planned)]:
            state, reason = names[key].state() if key in names else ("waiting", "")
            run = names[key].name if key in names else None
            queue.append({"label": key, "state": state, "reason": reason, "run": run})
        return {
            "name": str(content.get("name", folder.name)),
            "metric": str(content.get("metric", "")),
            "difference": "difference, points" if _is_share(content) else "difference",
            "counts": Counter(entry["state"] for entry in queue),
            "queue": queue,
            "arms": list(_arms(content)),
        }

    def _below(self, folder: Path) -> list[WatchedRun]:
        return [run for run in self.runs.values() if run.folder.is_relative_to(folder)]


def planned_runs(comparison: dict[str, Any]) -> Iterator[str]:
    """Labels of the runs that a comparison.json lists, in the order in which they start."""
    sweep, arms = comparison.get("sweep") or {}, comparison.get("arms") or {}
    values = [(arm, row["value"]) for arm, entry in sweep.get("arms", {}).items() for row in entry["rows"]]
    yield from (sweep_label(arm, value, seed) for seed in sweep.get("seeds", ()) for arm, value in values)
    # an arm may read the runs of another, so the folder in its command identifies them, not its name
    places = [
        re.search(r"output_dir=.*/(runs/[^/]+)/seed-", _last_output(arm.get("command", ""))) for arm in arms.values()
    ]
    folders = dict.fromkeys(place[1] for place in places if place)
    yield from (f"{folder}/seed-{seed}" for seed in comparison.get("seeds", ()) for folder in folders)


def _last_output(command: str) -> str:
    try:
        words = shlex.split(command)
    except ValueError:
        return ""
    return next((word for word in reversed(words) if word.startswith("output_dir=")), "")


def _arms(comparison: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Mean of each arm so far, and its difference from the baseline."""
    share = _is_share(comparison)
    differences = comparison.get("differences") or {}
    for arm, entry in (comparison.get("arms") or {}).items():
        yield {
            "arm": arm,
            "n": entry.get("n", 0),
            "mean": interval_text(_estimate(entry), share),
            "difference": interval_text(_estimate(differences.get(arm) or {}), share, "+"),
            "chosen": ", ".join(f"{key}={value}" for key, value in (entry.get("chosen") or {}).items()),
        }


def _estimate(entry: dict[str, Any]) -> list[Any]:
    return [entry.get(key) for key in ("mean", "low", "high")]


def _is_share(comparison: dict[str, Any]) -> bool:
    return str(comparison.get("metric", "")).startswith(SHARES)


def _runs_below(folder: Path) -> list[Path]:
    """Run folders below a folder, or itself; the content of a run is not looked through."""
    found = []
    for place, names, files in os.walk(folder):
        if SIGNS_OF_A_RUN & set(files) and "comparison.json" not in files:
            found.append(Path(place))
            names.clear()
        elif len(Path(place).relative_to(folder).parts) >= DEEPEST:
            names.clear()
        # a model that a comparison made is no run, and runs of other settings were moved aside
        names[:] = sorted(name for name in names if not name.startswith(".") and ".replaced-" not in name)
    return found or ([] if (folder / "comparison.json").exists() else [folder])


def _name(place: Path, folders: Sequence[Path]) -> str:
    """A run's name: its path from the given folder's name on, or from the first parent that tells folders apart."""
    folder = next(folder for folder in folders if place.is_relative_to(folder))
    ends = (folder.parts[-depth:] for depth in range(1, len(folder.parts) + 1))
    first = next(end for end in ends if sum(other.parts[-len(end) :] == end for other in folders) == 1)
    return "/".join([*first, *place.relative_to(folder).parts])


BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
EVERY_S = 2.0
CURVES = ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm", "response/length_mean")
MOST_RUNS = 8
"""Maximum number of runs with curves; of a comparison, the running ones and those that ended last."""


def follow(folders: WatchedFolders) -> None:
    """Show the runs until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            folders.refresh()
            live.update(Text("\n".join(lines(folders))), refresh=True)
            if not folders.behind:
                time.sleep(EVERY_S)


def lines(folders: WatchedFolders) -> Iterator[str]:
    """Lines that `mmrl watch --text` prints."""
    for comparison in folders.comparisons():
        yield from _comparison_lines(comparison)
    statuses = [(run, run.status()) for run in folders.runs.values()]
    statuses.sort(key=lambda pair: (pair[1]["state"] == "running", pair[1]["updated"] or 0), reverse=True)
    for run, status in statuses[:MOST_RUNS]:
        yield from _run_lines(run, status)
    if len(statuses) > MOST_RUNS:
        yield f"and {len(statuses) - MOST_RUNS} more runs"


def _comparison_lines(comparison: dict[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{number} {state}" for state, number in comparison["counts"].items())
    yield f"{comparison['name']}: {counts}"
    for arm in comparison["arms"]:
        if arm["n"]:
            mean = f"{comparison['metric']} {arm['mean']}, {arm['n']} seeds"
            yield f"  {arm['arm']}: {mean}; {comparison['difference']} {arm['difference']}"
    for entry in comparison["queue"]:
        if entry["state"] == "failed":
            yield f"  ! {entry['label']}: {entry['reason']}"
    yield ""


def _run_lines(run: WatchedRun, status: dict[str, Any]) -> Iterator[str]:
    yield " · ".join(filter(None, (run.name, status["state"], *progress(status))))
    if status["reason"]:
        yield f"  ! {status['reason']}"
    if status["headline"]:
        yield "  " + "   ".join(f"{title} {value}" for title, value in status["headline"])
    for name in measured(run.evaluations, HEADLINES)[:1]:
        rows = [row for row in run.evaluations if isinstance(row.get(name), int | float)]
        for split in dict.fromkeys(str(row.get("split", "")) for row in rows):
            found = [row[name] for row in rows if str(row.get("split", "")) == split]
            yield _curve_line(f"{label(name)} on {split}", found)
    for name in CURVES:
        if name in run.metrics.names():
            yield _curve_line(name, run.metrics.thinned(name, WIDTH)["mean"])
    for note in status["notes"]:
        yield f"  ! {note}"
    yield ""


def progress(status: dict[str, Any]) -> Iterator[str]:
    """Step, time left and age of the newest numbers."""
    if status["steps"]:
        yield f"step {status['step']} of {status['steps']}"
    if status["left_s"] is not None:
        yield f"{duration(status['left_s'])} left"
    if status["updated"]:
        yield f"updated {duration(max(0.0, time.time() - status['updated']))} ago"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, whichever is short."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def sparkline(values: Sequence[float]) -> str:
    """A row of bars, the lowest value the shortest."""
    low, high = min(values), max(values)
    span = high - low or math.inf
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in values)


def _curve_line(name: str, values: Sequence[float]) -> str:
    if not values:
        return f"  {name:<22}"
    return (
        f"  {name:<22} {sparkline(values[-WIDTH:]):<{WIDTH}} {values[-1]:.4g}  ({min(values):.4g} to {max(values):.4g})"
    )
