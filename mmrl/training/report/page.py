"""`report.html` of a run: one file that shows what was measured, needs no network and opens anywhere."""

from __future__ import annotations

import base64
import fnmatch
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.training.record.run_warnings import read_warnings
from mmrl.training.record.statistics import SHARES, difference_interval
from mmrl.training.record.stopwatch import STAGES, STAGES_BETWEEN
from mmrl.training.record.tracking import describe_metric, read_evaluations, read_metrics
from mmrl.training.report.charts import interval_chart, line_chart, panel_chart, stacked_chart
from mmrl.training.report.derived import derived_numbers
from mmrl.training.report.gallery import before_after, sample_gallery
from mmrl.training.report.image_grid import image_grid
from mmrl.training.report.videos import videos_of

__all__ = ["read_metrics", "write_report"]


def write_report(run_dir: Path, before: Path | None = None, chain: Sequence[Path] = ()) -> Path:
    """Write `report.html` into a run folder from whatever the folder holds.

    Args:
        run_dir: The run folder.
        before: One run that came before, such as the supervised warm start; short for a chain of one.
        chain: Runs that came before, the first one first; the headline and the side-by-side start with them.

    Returns:
        The report: one file without external resources.
    """
    earlier = [*chain, *([] if before is None else [before])]
    runs = [_read_run(Path(folder)) for folder in (*earlier, run_dir)]
    run = runs[-1]
    content = {
        "title": run.title,
        "subtitle": _subtitle(run),
        "formula": run.result.get("objective_formula"),
        "notices": _notices(run),
        "headline": _headline(runs),
        "headline_name": _headline_name(run),
        "scores": _score_tables(runs),
        "numbers": derived_numbers(run.metrics, run.result),
        "charts": _charts(run),
        "videos": videos_of(run.folder),
        "grid": image_grid([(run.name, run.folder) for run in runs]),
        "comparison": before_after([(run.name, run.folder) for run in runs]),
        "rollouts": sample_gallery(run.folder),
        "files": [(name, run.text(name)) for name in ("config.yaml", "result.json") if run.text(name)],
    }
    path = run.folder / "report.html"
    write_atomically(path, _render(content))
    return path


@dataclass(frozen=True)
class _Run:
    """What a run folder holds; missing parts are empty."""

    folder: Path
    result: dict[str, Any]
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def title(self) -> str:
        parts = [self.name, self.result.get("recipe"), self.result.get("objective")]
        return " · ".join(dict.fromkeys(str(part) for part in parts if part))

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _read_run(folder: Path) -> _Run:
    run = _Run(folder, {}, read_metrics(folder), _training_evaluations(folder))
    try:
        result = json.loads(run.text("result.json") or "{}")
    except ValueError:
        result = {}
    return _Run(folder, result if isinstance(result, dict) else {}, run.metrics, run.evaluations)


def _training_evaluations(folder: Path) -> list[dict[str, Any]]:
    # `mmrl evaluate` appends to the same file later, possibly at an older step: not a point of the curve
    return [record for record in read_evaluations(folder) if record.get("tag") != "evaluate"]


def _subtitle(run: _Run) -> str:
    parts = [str(run.folder)]
    if run.metrics:
        parts.append(f"{run.metrics[-1]['step']:,} steps logged")
    if run.result.get("status"):
        parts.append(f"status: {run.result['status']}")
    return " · ".join(parts)


def _notices(run: _Run) -> list[str]:
    notices = []
    if not run.result:
        notices.append("There is no result.json: the run has not finished, the numbers are those so far.")
    if not run.metrics:
        notices.append("There is no step in metrics.jsonl yet.")
    notices += [f"Warning: {message}." for message in read_warnings(run.folder)]
    failures = run.folder / "failures"
    saved = len(list(failures.glob("*.pt"))) if failures.is_dir() else 0
    if saved:
        notices.append(f"{saved} failed optimiser step(s) were saved in {failures}.")
    if any("reward/mean" in record for record in run.metrics):  # supervised runs optimise no reward
        notices += [notice for split in _splits(run) if (notice := _hacking_notice(run, split))]
    return notices


def _hacking_notice(run: _Run, split: str) -> str | None:
    records = [record for record in run.evaluations if record.get("split", "") == split]
    first, last = records[0], records[-1]
    names = _measured([first], JUDGED)
    risen = [name for name in names if name.startswith("score/") and last.get(name, math.nan) > first[name]]
    fallen = [name for name in names if name.startswith("heldout/") and _is_below(last, first, name)]
    spread, before = last.get(DIVERSITY, math.nan), first.get(DIVERSITY, math.nan)
    narrow = spread < (1 - DIVERSITY_LOSS) * before
    if not risen or not (fallen or narrow):
        return None
    losses = [f"the held-out reward {_move(first, last, name)}" for name in fallen]
    losses += [f"diversity fell by {100 * (1 - spread / before):.0f} %"] if narrow else []
    gains = " and ".join(_move(first, last, name) for name in risen)
    return (
        f"Possible reward hacking on {split}: the optimised {gains}, while {' and '.join(losses)}. Look at the images."
    )


def _is_below(last: Mapping[str, Any], first: Mapping[str, Any], name: str) -> bool:
    value, low, _ = _estimate(first, name)
    return last.get(name, math.nan) < (value if math.isnan(low) else low)


def _move(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> str:
    verb = "rose" if last[name] > first[name] else "fell"
    return f"{_label(name)} {verb} from {_plain(first[name])} to {_plain(last[name])}"


def _headline(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    tables = []
    for split in _splits(runs[-1]):
        points = _points(runs, split)
        protocols = _measured([record for _, record in points], SHARES)
        if protocols:
            rows = _headline_rows(points, protocols)
            tables.append({"split": split, "protocols": [_label(name) for name in protocols], "rows": rows})
    return tables


def _headline_name(run: _Run) -> str:
    """Metric of the headline: accuracy or success."""
    names = _measured(run.evaluations, SHARES)
    return names[0].partition("/")[0] if names else SHARES[0].partition("/")[0]


def _score_tables(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    tables = []
    for split in _splits(runs[-1]):
        points = _points(runs, split)
        names = _measured([record for _, record in points], (*JUDGED, *UNJUDGED))
        if not any(name.startswith(JUDGED) for name in names):
            continue
        columns = [{"label": label, "step": record["step"], "count": _count(record)} for label, record in points]
        groups = [
            {"heading": heading, "rows": [_score_row(points, name) for name in names if name.startswith(prefixes)]}
            for heading, prefixes in SCORE_GROUPS
        ]
        tables.append({"split": split, "columns": columns, "groups": [group for group in groups if group["rows"]]})
    return tables


def _score_row(points: Sequence[tuple[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    cells = []
    previous: Mapping[str, Any] = {}
    for _, record in points:
        cell = _score_cell(_estimate(record, name), _estimate(previous, name))
        if cell is not None and name == DIVERSITY and record[name] < (1 - DIVERSITY_LOSS) * previous.get(name, 0.0):
            cell["tone"] = "bad"
        cells.append(cell)
        previous = record
    label = name if name.startswith(UNJUDGED) else _label(name)
    return {"label": label, "definition": describe_metric(name) or "", "cells": cells}


def _score_cell(estimate: tuple[float, float, float], earlier: tuple[float, float, float]) -> dict[str, str] | None:
    value, low, high = estimate
    if math.isnan(value):
        return None
    cell = {"value": _plain(value), "interval": "" if math.isnan(low) else f"[{_plain(low)}, {_plain(high)}]"}
    if math.isnan(earlier[0]):
        return cell
    change, least, most = difference_interval(estimate, earlier)
    cell["change"] = _plain(change, "+")
    cell["change_interval"] = "" if math.isnan(least) else f"[{_plain(least, '+')}, {_plain(most, '+')}]"
    cell["tone"] = "good" if least > 0 else "bad" if most < 0 else ""
    return cell


def _splits(run: _Run) -> list[str]:
    return list(dict.fromkeys(record.get("split", "") for record in run.evaluations))


def _points(runs: Sequence[_Run], split: str) -> list[tuple[str, dict[str, Any]]]:
    return [point for run in runs for point in _ends(run, split, several=len(runs) > 1)]


def _measured(records: Sequence[Mapping[str, Any]], prefixes: tuple[str, ...]) -> list[str]:
    names = dict.fromkeys(name for record in records for name in record if name.startswith(prefixes))
    return [name for name in names if not name.endswith(("/low", "/high"))]


def _label(name: str) -> str:
    return name.partition("/")[2]


def _plain(value: float, sign: str = "") -> str:
    return f"{value:{sign}.3f}" if value == 0 or abs(value) >= 0.0005 else f"{value:{sign}.1e}"


def _ends(run: _Run, split: str, several: bool) -> list[tuple[str, dict[str, Any]]]:
    records = [record for record in run.evaluations if record.get("split", "") == split]
    if not records:
        return []
    ends = [("before", records[0]), ("after", records[-1])] if len(records) > 1 else [("at", records[0])]
    training = run.name if several else "training"
    return [(f"{when} {training}", record) for when, record in ends]


def _headline_rows(points: Sequence[tuple[str, dict[str, Any]]], protocols: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    previous: Mapping[str, Any] = {}
    for label, record in points:
        cells = [_cell(record, previous, name) for name in protocols]
        rows.append({"label": label, "step": record["step"], "count": _count(record), "cells": cells})
        previous = record
    return rows


def _count(record: Mapping[str, Any]) -> str:
    return f"{record['n']:.0f}" if math.isfinite(record.get("n", math.nan)) else "–"


def _cell(record: Mapping[str, Any], previous: Mapping[str, Any], name: str) -> dict[str, str] | None:
    value, low, high = _estimate(record, name)
    if math.isnan(value):
        return None
    cell = {
        "value": f"{100 * value:.1f} %",
        "interval": "" if math.isnan(low) else f"[{100 * low:.1f}, {100 * high:.1f}]",
    }
    earlier = _estimate(previous, name)
    if math.isnan(earlier[0]):
        return cell
    change, least, most = (100 * x for x in difference_interval((value, low, high), earlier))
    cell["change"] = f"{change:+.1f}"
    cell["change_interval"] = "" if math.isnan(least) else f"[{least:+.1f}, {most:+.1f}]"
    cell["tone"] = "good" if least > 0 else "bad" if most < 0 else ""
    return cell


def _estimate(record: Mapping[str, Any], name: str) -> tuple[float, float, float]:
    value, low, high = (float(record.get(key, math.nan)) for key in (name, f"{name}/low", f"{name}/high"))
    return value, low, high


def _charts(run: _Run) -> list[dict[str, Any]]:
    names = {name for record in run.metrics for name, value in record.items() if _is_number(value)}
    names -= {"step", "time", *UNCHARTED}
    times = {name for name in names if name.startswith("time/") and _is_telling(run, name)} - {"time/step"}
    names = {name for name in names if not name.startswith("time/")}
    charts = _accuracy_charts(run) + _score_charts(run)
    exact = {pattern for _, patterns, _ in CHARTS for pattern in patterns if "*" not in pattern}
    for title, patterns, log_scale in CHARTS:
        chosen = [name for name in _chosen(names, patterns, exact) if _is_telling(run, name)]
        if chosen:
            image = line_chart(_series(run, chosen), log_scale=log_scale)
            charts.append(_figure(title, chosen, image))
        names -= set(_chosen(names, patterns, exact))
    for family in sorted({name.split("/")[0] for name in names}):
        chosen = [name for name in sorted(names) if name.split("/")[0] == family and _is_telling(run, name)]
        if chosen:
            charts.append(_figure(family, chosen, line_chart(_series(run, chosen))))
    return charts + _time_charts(run, times)


def _time_charts(run: _Run, names: set[str]) -> list[dict[str, Any]]:
    stages = [name for stage in (*STAGES, *STAGES_BETWEEN) if (name := f"time/{stage}") in names]
    parts = sorted(names - set(stages))
    if len(run.metrics) < 2:
        return []
    charts = [_figure("Seconds by stage", stages, stacked_chart(_series(run, stages)))] if stages else []
    if parts:
        charts.append(_figure("Seconds of parts of stages", parts, line_chart(_series(run, parts))))
    return charts


def _accuracy_charts(run: _Run) -> list[dict[str, Any]]:
    charts = []
    for split in _splits(run):
        records = [record for record in run.evaluations if record.get("split", "") == split]
        protocols = _measured(records, SHARES)
        if len(records) < 2 or not protocols:
            continue
        steps = [record["step"] for record in records]
        series = {
            _label(name): (steps, *zip(*(_estimate(record, name) for record in records), strict=True))
            for name in protocols
        }
        title = f"{protocols[0].partition('/')[0].capitalize()} on {split}"
        charts.append(_figure(title, protocols, interval_chart(series)))  # type: ignore[arg-type]
    return charts


def _score_charts(run: _Run) -> list[dict[str, Any]]:
    charts = []
    for split in _splits(run):
        records = [record for record in run.evaluations if record.get("split", "") == split]
        scores, others = (_measured(records, prefixes) for prefixes in (JUDGED, UNJUDGED))
        costs = {axis: positions for axis in COSTS if len(set(positions := _cost(records, axis))) > 1} if scores else {}
        for axis, positions in costs.items():
            charts.append(
                _panels(f"Scores and held-out rewards on {split} by {axis}", scores, records, positions, axis)
            )
        if len(records) > 1:
            steps = [record["step"] for record in records]
            charts += (
                [_panels(f"Scores and held-out rewards on {split}", scores, records, steps)]
                if scores and not costs
                else []
            )
            charts += [_panels(f"Diversity and distance on {split}", others, records, steps)] if others else []
    return charts


def _cost(records: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    parts = COSTS[axis]
    costs = [sum(weight * float(record.get(name, math.nan)) for name, weight in parts.items()) for record in records]
    return costs if all(map(math.isfinite, costs)) else []


def _panels(
    title: str,
    names: Sequence[str],
    records: Sequence[Mapping[str, Any]],
    positions: Sequence[float],
    axis: str = "step",
) -> dict[str, Any]:
    series = {
        _panel_label(name): (positions, *zip(*(_estimate(record, name) for record in records), strict=True))
        for name in names
    }
    image = panel_chart(series, axis)  # type: ignore[arg-type]
    return {**_figure(title, names, image), "caption": AXIS_CAPTIONS.get(axis, "")}


def _panel_label(name: str) -> str:
    family = FAMILIES.get(name.partition("/")[0])
    return f"{_label(name)} ({family})" if family else name


def _chosen(names: set[str], patterns: Sequence[str], exact: set[str]) -> list[str]:
    return [
        name
        for pattern in patterns
        for name in sorted(names)
        if name == pattern or (name not in exact and fnmatch.fnmatchcase(name, pattern))
    ]


def _is_telling(run: _Run, name: str) -> bool:
    values = {record[name] for record in run.metrics if math.isfinite(record.get(name, math.nan))}
    return bool(values - {0.0}) or (bool(values) and name.startswith("reward/"))  # a reward of 0 is news


def _series(run: _Run, names: Sequence[str]) -> dict[str, tuple[list[float], list[float]]]:
    steps = [record["step"] for record in run.metrics]
    shared = names[0].split("/")[0] if len({name.split("/")[0] for name in names}) == 1 else ""
    return {
        name.removeprefix(f"{shared}/"): (steps, [record.get(name, math.nan) for record in run.metrics])
        for name in names
    }


def _figure(title: str, names: Sequence[str], svg: bytes) -> dict[str, Any]:
    return {
        "title": title,
        "image": "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii"),
        "definitions": [(name, describe_metric(name) or "A metric of this recipe.") for name in names],
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _render(content: Mapping[str, Any]) -> str:
    from importlib.resources import files

    from jinja2 import Environment
    from markupsafe import Markup

    here = files("mmrl.training.report")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "report.html.jinja").read_text(encoding="utf-8"))
    style = Markup((here / "report.css").read_text(encoding="utf-8"))  # our own file: nothing to escape
    return template.render(style=style, **content)


UNCHARTED = (
    "samples/total",
    "tokens/total",
    "data/epoch",
    "data/skipped",
    "reward/errors",
    "optim/skipped",
    "checkpoint/failed",
    "cost/forward_rows",
    "cost/train_rows",
)
JUDGED = ("score/", "heldout/")
UNJUDGED = ("diversity/", "distance/")
SCORE_GROUPS = (
    ("optimised", ("score/",)),
    ("not optimised, held out", ("heldout/",)),
    ("what else moved", UNJUDGED),
)
FAMILIES = {"score": "optimised", "heldout": "not optimised"}
DIVERSITY = "diversity/latent"
DIVERSITY_LOSS = 0.3
"""Share of the diversity that may go before the report points at it."""
COSTS: dict[str, dict[str, float]] = {
    "images": {"cost/samples": 1},
    "seconds": {"cost/seconds": 1},
    "model evaluations": {"cost/forward_rows": 1, "cost/train_rows": 3},
}
AXIS_CAPTIONS = {
    "images": "Images drawn for training so far.",
    "seconds": "Seconds of training so far, without evaluation.",
    "model evaluations": (
        "Forward equivalents of the denoiser in training so far: rows without gradient + 3 × rows with gradient, "
        "since a row with gradient costs a forward pass and a backward pass of about two forwards."
    ),
}
CHARTS: tuple[tuple[str, tuple[str, ...], bool], ...] = (
    ("Reward", ("reward/mean", "reward/std"), False),
    ("Reward terms", ("reward/*",), False),
    ("Divergence from the reference and the sampling policy", ("policy/kl_ref", "policy/kl_old"), False),
    ("Entropy", ("policy/entropy",), False),
    ("Loss terms", ("loss/*",), False),
    ("Importance ratio", ("policy/ratio_mean", "policy/ratio_max"), False),
    (
        "Shares",
        (
            "reward/zero_variance_groups",
            "update/zero_advantage_groups",
            "response/finished_fraction",
            "policy/clip_fraction_low",
            "policy/clip_fraction_high",
        ),
        False,
    ),
    ("Response length", ("response/length_mean", "response/length_max"), False),
    ("Gradient norm", ("optim/grad_norm",), True),
    ("Learning rate", ("optim/lr",), False),
    ("PAPO", ("papo/*",), False),
    ("APO", ("apo/*",), False),
    ("Tokens per second", ("tokens/per_second",), False),
    ("Peak memory in megabytes", ("memory/peak_mb",), False),
)
