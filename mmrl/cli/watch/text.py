"""The runs as text for a terminal: how far each is, its newest numbers, and its curves as rows of bars."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mmrl.cli.watch.folders import WatchedFolders
from mmrl.cli.watch.runs import WatchedRun
from mmrl.runs.metrics import label, measured
from mmrl.runs.statistics import HEADLINES

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
EVERY_S = 2.0
CURVES = ("reward/mean", "policy/entropy", "policy/kl_ref", "optim/grad_norm", "response/length_mean")
MOST_RUNS = 8
"""Runs with curves; of a comparison, those that run or ended last."""


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
