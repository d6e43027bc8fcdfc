"""The opening of a report: the outcome in a sentence, and what was trained on what, when and where."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import yaml

from mmrl.report.folder import RunFolder
from mmrl.report.report_tables import SCORE_GROUPS, duration, headline, headline_name, part_tables, score_tables

Cell = Mapping[str, str]
GENERIC = ("vlm", "masked", "agent", "robot_grpo", "preference")
"""Recipes that run many objectives, whose names say more."""
MOST_NAMED = 4
"""Changes that a sentence names."""
SOURCES = {
    "model": (("model", "path"), ("model", "build"), ("policy", "path")),
    "data": (
        ("data", "path"),
        ("environment", "factory"),
        ("sim", "factory"),
        ("demonstrations", "path"),
        ("images", "path"),
    ),
}
"""Keys of the configuration that name the model and the data; the first one that is set is shown."""


def outcome(runs: Sequence[RunFolder]) -> list[str]:
    """Sentences on how training changed each held-out split, and on what became worse."""
    run = runs[-1]
    measure, tables = headline_name(run), headline(runs)
    ends = [
        (table["split"], f"{measure} ({table['protocols'][0]})", [row["cells"][0] for row in table["rows"][-2:]])
        for table in tables
    ]
    if not ends:
        ends = [_scores_ends(table) for table in score_tables(runs)]
    several = len(ends) > 1
    sentences = [_sentence(run, split if several else "", name, cells) for split, name, cells in ends]
    if better := _named(_other_protocols(runs, "good")[::-1]):
        also = " as well" if any(" raised " in sentence for sentence in sentences) else ""
        sentences.append(f"Better{also}: {better}.")
    worse, groups = _worse(runs)
    if worse:
        sentences.append(f"Worse: {_named(worse)}.")
    elif groups:
        sentences.append(f"None of the {groups} groups of tasks became clearly worse.")
    return [sentence for sentence in sentences if sentence]


def short_outcome(runs: Sequence[RunFolder]) -> str:
    """Before and after of the first split, for the title of the page's tab."""
    for table in headline(runs):
        cells = [row["cells"][0] for row in table["rows"][-2:]]
        if all(cells):
            values = [cell["value"] for cell in cells]
            return f"{headline_name(runs[-1])} {' → '.join([*(_bare(value) for value in values[:-1]), values[-1]])}"
    return ""


def facts(run: RunFolder) -> list[tuple[str, str]]:
    """Model, data, steps, time, date, machine, versions and command, as far as the run folder contains them."""
    settings, result = settings_of(run), run.result
    rows = [
        (name, next((str(at) for place in places if (at := setting(settings, *place))), ""))
        for name, places in SOURCES.items()
    ]
    splits = ", ".join(run.splits)
    rows.append(("held out", splits))
    steps = result.get("steps") or (run.metrics[-1]["step"] if run.metrics else None)
    rows.append(("steps", "" if steps is None else f"{steps:,}"))
    rows.append(("time", duration(result["seconds"]) if result.get("seconds") else ""))
    rows.append(("date", _date(run)))
    processes = result.get("processes", 1)
    machine = [result.get("host"), result.get("device"), f"{processes:g} processes" if processes > 1 else None]
    rows.append(("machine", ", ".join(filter(None, machine))))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())))
    if settings and run.metrics:
        again = shlex.join(["mmrl", "train", str(run.folder / "config.yaml"), f"output_dir={run.folder}-again"])
        rows.append(("to repeat", again))
    return [(name, text) for name, text in rows if text]


def settings_of(run: RunFolder) -> dict[str, Any]:
    """The resolved configuration of a run; empty if it cannot be read."""
    try:
        found = yaml.safe_load(run.text("config.yaml"))
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def setting(settings: Mapping[str, Any], *place: str) -> Any:
    """A setting by its path, or None."""
    value: Any = settings
    for name in place:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _date(run: RunFolder) -> str:
    time = run.metrics[-1].get("time") if run.metrics else None
    if not isinstance(time, int | float) or not 0 < time < 1e11:
        return ""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _sentence(run: RunFolder, split: str, name: str, ends: Sequence[Cell | None]) -> str:
    """Before, after, change and its interval; only the last value if there is no earlier one."""
    last = ends[-1]
    if last is None:
        return ""
    before = ends[0] if len(ends) > 1 else None
    where = f"held-out {name} on {split}" if split else f"held-out {name}"
    if before is None or "change" not in last:
        return f"{where[0].upper()}{where[1:]}: {last['value']} {_spread(last['interval'])}".strip() + "."
    who = method(run) if run.result else f"So far {method(run)}"
    verb = {"good": "raised", "bad": "lowered"}.get(last["tone"])
    unit = " points" if last["value"].endswith(" %") else ""
    change = f"({last['change']}{unit}{_change(last['change_interval'])})"
    moved = f"from {_bare(before['value'])} to {last['value']}"
    if verb is None:
        return f"{who} did not clearly change {where}: {moved} {change}."
    return f"{who} {verb} {where} {moved} {change}."


def method(run: RunFolder) -> str:
    """The recipe's name, or its objective's where the recipe is a general one."""
    recipe, objective = run.result.get("recipe", ""), run.result.get("objective", "")
    name = objective if objective and (recipe in GENERIC or not recipe) else recipe
    if not name:
        return "training"
    citation = str(run.result.get("objective_formula", "")).partition("\n")[0].partition(":")[2]
    spelled = re.search(rf"\b{re.escape(name).replace('_', '[-_ ]')}\b", citation, re.IGNORECASE)
    if spelled:  # as the paper writes it
        return spelled[0]
    return name.upper() if name.isalpha() and len(name) <= 6 else name.capitalize() if name.isalpha() else name


def _scores_ends(table: Mapping[str, Any]) -> tuple[str, str, list[Cell | None]]:
    """Both ends of the first score of a split."""
    row = table["groups"][0]["rows"][0]
    return table["split"], f"score {row['label']}", row["cells"][-2:]


def _other_protocols(runs: Sequence[RunFolder], tone: str) -> list[tuple[float, str]]:
    """Clear changes of a tone among the protocols after the first, the lowest first."""
    found = []
    for table in headline(runs):
        cells = zip(table["protocols"][1:], table["rows"][-1]["cells"][1:], strict=True)
        found += [(float(cell["change"]), name) for name, cell in cells if cell and cell.get("tone") == tone]
    return sorted(found)


def _worse(runs: Sequence[RunFolder]) -> tuple[list[tuple[float, str]], int]:
    """Groups of tasks and scores whose change is below 0 with its whole interval, and how many groups there are."""
    lost = _other_protocols(runs, "bad")
    count = 0
    judged = {heading for heading, _ in SCORE_GROUPS[:-1]} | {"other scores"}
    for table in [*part_tables(runs), *score_tables(runs)]:
        for group in table["groups"]:
            column = group["heading"].removeprefix("by ")
            part = column != group["heading"]
            count += part * len(group["rows"])
            for row in group["rows"] if part or column in judged else ():
                cell = row["cells"][-1] or {}
                if cell.get("tone") == "bad":
                    lost.append((float(cell["change"]), f"{column} = {row['label']}" if part else row["label"]))
    return sorted(lost), count


def _named(changes: Sequence[tuple[float, str]]) -> str:
    shown = ", ".join(f"{name} ({change:+g})" for change, name in changes[:MOST_NAMED])
    return f"{shown} and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else shown


def _bare(value: str) -> str:
    return value.removesuffix(" %")


def _spread(interval: str) -> str:
    return f"(95 % interval {interval.strip('[]').replace(', ', ' to ')})" if interval else ""


def _change(interval: str) -> str:
    return f", 95 % interval {interval.strip('[]').replace(', ', ' to ')}" if interval else ""
