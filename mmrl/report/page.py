"""`report.html` of a run: one file with all measurements, which needs no network and opens anywhere."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.report.curves import constants, curves
from mmrl.report.folder import RunFolder, estimate, plain, read_run
from mmrl.report.gallery import before_after, image_grid, sample_gallery, videos_of
from mmrl.report.report_tables import (
    DIVERSITY_LOSS,
    JUDGED,
    derived_numbers,
    headline,
    headline_name,
    part_tables,
    score_tables,
)
from mmrl.report.summary import facts, outcome, short_outcome
from mmrl.runs.metrics import DIVERSITY, label, measured
from mmrl.runs.records import read_warnings


def write_report(
    run_dir: Path, before: Path | None = None, chain: Sequence[Path] = (), output: Path | None = None
) -> Path:
    """Write `report.html` into a run folder, or the file `output`, from the files in the folder."""
    earlier = [*chain, *([] if before is None else [before])]
    runs = [read_run(Path(folder)) for folder in (*earlier, run_dir)]
    run = runs[-1]
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
        "parts": part_tables(runs),
        "scores": score_tables(runs),
        "numbers": derived_numbers(run.metrics, run.result),
        "charts": curves(run),
        "constants": constants(run),
        "videos": videos_of(run.folder),
        "grid": image_grid([(run.name, run.folder) for run in runs]),
        "comparison": before_after([(run.name, run.folder) for run in runs]),
        "rollouts": sample_gallery(run.folder),
        "files": [(name, run.text(name)) for name in ("config.yaml", "result.json") if run.text(name)],
    }
    content["contents"] = [(anchor, title) for anchor, title, key in _sections(content) if content[key]]
    path = output or run.folder / "report.html"
    write_atomically(path, _render(content))
    return path


def _sections(content: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Anchor, title and content of the page's sections in their order."""
    return [
        ("accuracy", f"Held-out {content['headline_name']}", "headline"),
        ("parts", f"Held-out {content['headline_name']} by data column", "parts"),
        ("scores", "Held-out scores", "scores"),
        ("numbers", "Numbers of the run", "numbers"),
        ("curves", "Curves", "charts"),
        ("videos", "Episodes", "videos"),
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
    if run.only_evaluated:
        return ["Nothing was trained here: these are evaluations of the model that the configuration names."]
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
    losses += [f"diversity fell by {100 * (1 - spread / before):.0f} %"] if narrow else []
    gains = " and ".join(_move(first, last, name) for name in risen)
    return (
        f"Possible reward hacking on {split}: the optimised {gains}, while {' and '.join(losses)}. Look at the images."
    )


def _move(first: Mapping[str, Any], last: Mapping[str, Any], name: str) -> str:
    verb = "rose" if last[name] > first[name] else "fell"
    return f"{label(name)} {verb} from {plain(first[name])} to {plain(last[name])}"


def _render(content: Mapping[str, Any]) -> str:
    from importlib.resources import files

    from jinja2 import Environment
    from markupsafe import Markup

    here = files("mmrl.report")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string((here / "report.html.jinja").read_text(encoding="utf-8"))
    # our own files: nothing to escape
    style, script = (Markup((here / name).read_text(encoding="utf-8")) for name in ("report.css", "report.js"))
    text = f"\n{script}\n"  # exactly the text between the tags, which the page's policy names by its digest
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return template.render(style=style, script=script, digest=digest, **content)
