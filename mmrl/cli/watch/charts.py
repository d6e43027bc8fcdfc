"""Curves of one or several runs as numbers for the page: evaluations first, then the report's subjects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mmrl.cli.watch.runs import WatchedRun
from mmrl.cli.watch.tail import short
from mmrl.report.curves import CHARTS, LOGARITHMIC, UNCHARTED, UNITS, by_kind, subjects
from mmrl.runs.metrics import label, measured
from mmrl.runs.statistics import HEADLINES, SHARES
from mmrl.runs.tracking import describe_metric

POINTS = 300
MOST_PROTOCOLS = 3
"""Evaluation metrics of one split that are drawn."""


def charts(runs: Sequence[WatchedRun], points: int = POINTS) -> list[dict[str, Any]]:
    """Every chart with its unit and series, except charts that are zero in all runs."""
    drawn = _evaluation_charts(runs)
    names = list(dict.fromkeys(name for run in runs for name in run.metrics.names() if name != "time"))
    names = [name for name in names if not name.startswith((*UNCHARTED, "warnings/"))]
    for title, chosen in subjects(names):
        found = _metric_charts(title, chosen, runs, points)
        drawn += found if title in CHARTS else [{**chart, "more": True} for chart in found]
    return drawn


def differences(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """Options in which the runs differ, with the value of each run."""
    settings = [run.settings() for run in runs]
    options = dict.fromkeys(name for found in settings for name in found)
    return [
        {"option": option, "values": values}
        for option in options
        if option != "output_dir" and len(set(values := [found.get(option, "–") for found in settings])) > 1
    ]


def _evaluation_charts(runs: Sequence[WatchedRun]) -> list[dict[str, Any]]:
    """One chart per split for a single run; one chart per split and metric for several runs."""
    found = []
    for split in dict.fromkeys(str(row.get("split", "")) for run in runs for row in run.evaluations):
        rows = {run.name: [row for row in run.evaluations if row.get("split", "") == split] for run in runs}
        names = measured([row for own in rows.values() for row in own], HEADLINES)[:MOST_PROTOCOLS]
        for chosen in [names] if len(runs) == 1 and names else [[name] for name in names]:
            series = [
                {"run": run, "label": label(name), **_estimates(own, name)}
                for run, own in rows.items()
                for name in chosen
                if any(name in row for row in own)
            ]
            family, protocol = (
                chosen[0].partition("/")[0].capitalize(),
                f", {label(chosen[0])}" if len(runs) > 1 else "",
            )
            unit = "%" if all(name.startswith(SHARES) for name in chosen) else ""
            found.append({"title": f"{family} on {split}{protocol}", "unit": unit, "series": series})
    return found


def _estimates(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Values with their intervals at the steps that have a number; of more than the page draws, evenly spaced ones."""
    kept = [row for row in rows if isinstance(row.get(name), int | float)]
    kept = kept[:: -(-len(kept) // POINTS) or 1]
    factor = 100 if name.startswith(SHARES) else 1
    ends = {
        key: short(np.array([row.get(f"{name}/{key}", row[name]) for row in kept], dtype=float) * factor)
        for key in ("low", "high")
        if all(f"{name}/{key}" in row for row in kept)
    }
    return {
        "step": [row["step"] for row in kept],
        "mean": short(np.array([row[name] for row in kept], dtype=float) * factor),
        **ends,
        "interval": True,
    }


def _metric_charts(title: str, names: Sequence[str], runs: Sequence[WatchedRun], points: int) -> list[dict[str, Any]]:
    """One chart for each kind of number among some metrics."""
    kinds, found = by_kind(names, describe_metric), []
    for kind, chosen in kinds.items():
        unit = UNITS.get(kind, "")
        series = [
            {"run": run.name, "label": label(name), **_scaled(run.metrics.thinned(name, points), unit)}
            for run in runs
            for name in chosen
            if name in run.metrics.names()
        ]
        series = [one for one in series if any(one["mean"])]
        if series:
            shown = title if len(kinds) == 1 else f"{title}, {kind}"
            about = {label(name): describe_metric(name) or "" for name in chosen}
            found.append({"title": shown, "unit": unit, "log": title in LOGARITHMIC, "series": series, "about": about})
    return found


def _scaled(curve: dict[str, list[float]], unit: str) -> dict[str, list[float]]:
    if unit != "%":
        return curve
    return {key: values if key == "step" else short(100 * np.array(values)) for key, values in curve.items()}
