"""`report.html` of a run: one file with all measurements, which needs no network and opens anywhere."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmrl.config import as_override, escaped
from mmrl.files import write_atomically
from mmrl.hub.packaged import described
from mmrl.report.curves import constants, curves
from mmrl.report.folder import RunFolder, estimate, plain, read_run
from mmrl.report.gallery import before_after, clouds_of, image_grid, sample_gallery, videos_of
from mmrl.report.report_tables import (
    DIVERSITY_LOSS,
    JUDGED,
    SCORE_GROUPS,
    derived_numbers,
    duration,
    headline,
    headline_name,
    part_tables,
    score_tables,
)
from mmrl.runs.ledger import ANSWERS
from mmrl.runs.metrics import DIVERSITY, label, measured
from mmrl.runs.records import WARNINGS_FILE, iterate_jsonl, read_warnings

Cell = Mapping[str, str]
GENERIC = ("vlm", "masked", "agent", "robot_grpo", "preference")
"""Recipes that run many objectives; the objective's name is more informative."""
MOST_WARNINGS = 12
"""Maximum number of warnings shown on the page."""
MOST_NAMED = 4
"""Maximum number of changes listed in a sentence."""
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
"""Configuration keys of the model and the data; the first one that is set is shown."""


def outcome(runs: Sequence[RunFolder]) -> list[str]:
    """Sentences on how training changed each evaluated split and what became worse."""
    run = runs[-1]
    measure, tables = headline_name(run), headline(runs)
    ends = [
        (table["split"], f"{measure} ({table['protocols'][0]})", [row["cells"][0] for row in table["rows"][-2:]])
        for table in tables
    ]
    if not ends:
        ends = [_scores_ends(table) for table in score_tables(runs)]
    several = len(ends) > 1
    sentences = [_sentence(run, _where(run, split, name, several), cells) for split, name, cells in ends]
    sentences.append(_unmeasured(run))
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
    settings, result = run.settings, run.result
    rows = [
        (name, next((str(at) for place in places if (at := setting(settings, *place))), ""))
        for name, places in SOURCES.items()
    ]
    rows = [(name, described(text) if name == "model" else text) for name, text in rows]
    if kind := result.get("model_kind"):
        rows.insert(1, ("kind of model", kind))
    rows.append(("held out", ", ".join(split for split in run.splits if split not in run.seen)))
    rows.append(("evaluated training tasks", ", ".join(run.seen)))
    steps = result.get("steps") or (run.metrics[-1]["step"] if run.metrics else None)
    rows.append(("steps", "" if steps is None else f"{steps:,}"))
    rows.append(("time", duration(result["seconds"]) if result.get("seconds") else ""))
    rows.append(("date", _date(run)))
    processes = result.get("processes", 1)
    machine = [result.get("host"), result.get("device"), f"{processes:g} processes" if processes > 1 else None]
    rows.append(("machine", ", ".join(filter(None, machine))))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in result.get("versions", {}).items())))
    if answers := sum(1 for _ in iterate_jsonl(run.folder / ANSWERS)):
        rows.append(("answers", f"{answers:,} with prompts and scores in {ANSWERS}, written by mmrl evaluate"))
    if settings and run.metrics:
        folder = as_override("output_dir", escaped(f"{run.folder}-again"))
        again = shlex.join(["mmrl", "train", str(run.folder / "config.yaml"), folder])
        rows.append(("command to repeat", again))
    return [(name, text) for name, text in rows if text]


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


def _where(run: RunFolder, split: str, name: str, several: bool) -> str:
    """A measure and the tasks that it was measured on."""
    if split in run.seen:
        return f"{name} on training tasks" + (f" ({split})" if several else "")
    return f"held-out {name}" + (f" on {split}" if several else "")


def _sentence(run: RunFolder, where: str, ends: Sequence[Cell | None]) -> str:
    """Before, after, change and its interval; only the last value if there is no earlier one."""
    last = ends[-1]
    if last is None:
        return ""
    before = ends[0] if len(ends) > 1 else None
    if before is None or "change" not in last:
        # a single value of a run that trained: the untrained model's, or the trained one's
        when = "" if run.only_evaluated else " after training" if run.evaluations[-1]["step"] else " before training"
        return f"{where[0].upper()}{where[1:]}{when}: {last['value']} {_spread(last['interval'])}".strip() + "."
    who = method(run) or "training"
    who = f"{who[0].upper()}{who[1:]}" if run.result else f"So far {who}"
    verb = {"good": "raised", "bad": "lowered"}.get(last["tone"])
    unit = " points" if last["value"].endswith("%") else ""
    change = f"({last['change']}{unit}{_change(last['change_interval'])})"
    moved = f"from {_bare(before['value'])} to {last['value']}"
    if verb is None:
        return f"{who} did not clearly change {where}: {moved} {change}."
    return f"{who} {verb} {where} {moved} {change}."


def _unmeasured(run: RunFolder) -> str:
    """That training went on after the last evaluation, or that there is none; empty otherwise."""
    if run.only_evaluated or not run.metrics:
        return ""
    last, measured_at = run.metrics[-1]["step"], run.evaluations[-1]["step"] if run.evaluations else None
    if measured_at is None:
        return f"There was no evaluation after the {last:,} training steps."
    if measured_at < last:
        since = f"the one at step {measured_at:,}" if measured_at else "the one before training"
        return f"There was no evaluation after {since}; training continued to step {last:,}."
    return ""


def method(run: RunFolder) -> str:
    """The recipe's name, or the objective's name for general recipes; empty if neither is known."""
    recipe, objective = run.recipe, run.objective
    name = objective if objective and (recipe in GENERIC or not recipe) else recipe
    if not name:
        return ""
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
    """Groups of tasks and scores whose change is below 0 with its whole interval, and how many groups have a change."""
    lost = _other_protocols(runs, "bad")
    count = 0
    judged = {heading for heading, _ in SCORE_GROUPS[:-1]} | {"other scores"}
    for table in [*part_tables(runs), *score_tables(runs)]:
        for group in table["groups"]:
            column = group["heading"].removeprefix("by ")
            part = column != group["heading"]
            # after a single evaluation there is no change to judge
            count += part * sum(bool((row["cells"][-1] or {}).get("change")) for row in group["rows"])
            for row in group["rows"] if part or column in judged else ():
                cell = row["cells"][-1] or {}
                if cell.get("tone") == "bad":
                    lost.append((float(cell["change"]), f"{column} = {row['label']}" if part else row["label"]))
    return sorted(lost), count


def _named(changes: Sequence[tuple[float, str]]) -> str:
    shown = ", ".join(f"{name} ({change:+g})" for change, name in changes[:MOST_NAMED])
    return f"{shown} and {len(changes) - MOST_NAMED} more" if len(changes) > MOST_NAMED else shown


def _bare(value: str) -> str:
    return value.removesuffix("%")


def _spread(interval: str) -> str:
    return f"(95% interval {interval.strip('[]').replace(', ', ' to ')})" if interval else ""


def _change(interval: str) -> str:
    return f", 95% interval {interval.strip('[]').replace(', ', ' to ')}" if interval else ""


def write_report(
    run_dir: Path, before: Path | None = None, chain: Sequence[Path] = (), output: Path | None = None
) -> Path:
    """Write `report.html` into a run folder, or the file `output`, from the files in the folder."""
    earlier = [*chain, *([] if before is None else [before])]
    runs = [read_run(Path(folder)) for folder in (*earlier, run_dir)]
    run = runs[-1]
    path = output or run.folder / "report.html"
    content = {
        "title": run.title,
        "tab": " · ".join(filter(None, (run.name, short_outcome(runs)))),
        "subtitle": _subtitle(run),
        "outcome": outcome(runs),
        "facts": facts(run),
        "formula": run.result.get("objective_formula"),
        "notices": _notices(run),
        "headline": headline(runs),
        "headline_name": headline_name(run),
        "verdicts": ("✓ correct", "✗ incorrect") if headline_name(run) == "accuracy" else ("✓ success", "✗ no success"),
        "seen": run.seen,
        "parts": part_tables(runs),
        "scores": score_tables(runs),
        "numbers": derived_numbers(run.metrics, run.result),
        "charts": curves(run),
        "constants": constants(run),
        "videos": videos_of(run.folder),
        "clouds": clouds_of(run.folder, path),
        "grid": image_grid([(run.name, run.folder) for run in runs]),
        "comparison": before_after([(run.name, run.folder) for run in runs]),
        "rollouts": sample_gallery(run.folder),
        "files": [(name, run.text(name)) for name in ("config.yaml", "result.json") if run.text(name)],
    }
    sections = _sections(content)
    content["titles"] = {anchor: title for anchor, title, _ in sections}
    content["contents"] = [(anchor, title) for anchor, title, key in sections if content[key]]
    write_atomically(path, _render(content))
    return path


def _sections(content: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Anchor, title and content of the page's sections in their order."""
    name = content["headline_name"]
    # with tasks of the training among them, each table says whose it is
    name, scores = (name.capitalize(), "Scores") if content["seen"] else (f"Held-out {name}", "Held-out scores")
    return [
        ("accuracy", name, "headline"),
        ("parts", f"{name} by data column", "parts"),
        ("scores", scores, "scores"),
        ("numbers", "Run summary", "numbers"),
        ("curves", "Curves", "charts"),
        ("videos", "Episodes", "videos"),
        ("clouds", "Point clouds", "clouds"),
        ("images", "Images", "grid"),
        ("before-after", "Before and after", "comparison"),
        ("rollouts", "Sample rollouts", "rollouts"),
        ("configuration", "Configuration and result", "files"),
    ]


def _subtitle(run: RunFolder) -> str:
    parts = [str(run.folder)]
    if run.metrics:
        parts.append(f"{run.metrics[-1]['step']:,} steps logged")
    if run.result.get("status"):
        parts.append(f"status: {run.result['status'].replace('_', ' ')}")
    return " · ".join(parts)


def _notices(run: RunFolder) -> list[str]:
    warnings = [f"Warning: {message.rstrip('.')}." for message in read_warnings(run.folder)]
    if len(warnings) > MOST_WARNINGS:
        more = f"{len(warnings) - MOST_WARNINGS} more warnings are in {WARNINGS_FILE}."
        warnings = [*warnings[:MOST_WARNINGS], more]
    if run.only_evaluated:
        only = "Nothing was trained in this run: these are evaluations of the model given in the configuration."
        return [only, *warnings]
    notices = []
    if not run.result:
        notices.append("There is no result.json: the run has not finished, and the numbers are preliminary.")
    if not run.metrics:
        notices.append("metrics.jsonl does not contain any steps yet.")
    notices += warnings
    failures = run.folder / "failures"
    saved = len(list(failures.glob("*.pt"))) if failures.is_dir() else 0
    if saved:
        notices.append(f"{saved} failed optimiser step(s) were saved in {failures}.")
    if any("reward/mean" in record for record in run.metrics):  # supervised runs optimise no reward
        notices += [notice for split in run.splits if (notice := _hacking_notice(run, split))]
    return notices


def _hacking_notice(run: RunFolder, split: str) -> str | None:
    records = run.of_split(split)
    first, last = records[0], records[-1]
    names = measured([first], JUDGED)
    risen = [name for name in names if name.startswith("score/") and last.get(name, math.nan) > first[name]]
    fallen = []
    for name in names:
        value, low, _ = estimate(first, name)
        if name.startswith("heldout/") and last.get(name, math.nan) < (value if math.isnan(low) else low):
            fallen.append(name)
    spread, before = last.get(DIVERSITY, math.nan), first.get(DIVERSITY, math.nan)
    narrow = spread < (1 - DIVERSITY_LOSS) * before
    if not risen or not (fallen or narrow):
        return None
    losses = [f"the held-out reward {_move(first, last, name)}" for name in fallen]
    losses += [f"diversity fell by {100 * (1 - spread / before):.0f}%"] if narrow else []
    gains = " and ".join(_move(first, last, name) for name in risen)
    return f"Possible reward hacking on {split}: the optimised {gains}, while {' and '.join(losses)}. Check the images."


def _move(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> str:
    verb = "rose" if last[name] > first[name] else "fell"
    return f"{label(name)} {verb} from {plain(first[name])} to {plain(last[name])}"


def _render(content: Mapping[str, Any]) -> str:
    return _template().render(content)


# compiling it takes longer than filling it in
@functools.cache
def _template() -> Any:
    """Template of the page, which knows the style and the script."""
    from importlib.resources import files

    from jinja2 import Environment
    from markupsafe import Markup

    here = files("mmrl.report")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # our own files: nothing to escape
    style, script = (Markup((here / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    text = f"\n{script}\n"  # exactly the text between the tags, which the page's policy names by its digest
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    shared = {"style": style, "script": script, "digest": digest}
    return environment.from_string((here / "report.html.jinja").read_text(encoding="utf-8"), globals=shared)
