"""Checks of `mmrl doctor RUN`: lock, results, checkpoints and base model of a run, and where it can resume."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from mmrl.config import foreign_run
from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.findings import Finding, one_line
from mmrl.hub.building import base_path
from mmrl.runs.checkpoint import Checkpoints
from mmrl.runs.folder import FINISHED, has_begun, owner_of
from mmrl.runs.records import read_jsonl
from mmrl.runs.tracking import read_evaluations, read_metrics

AREA = "run"


def check_run(run_dir: Path) -> list[Finding]:
    """Check a run folder without changing it; the last finding covers resuming."""
    if not (run_dir / "config.yaml").is_file() and not has_begun(run_dir):
        raise UserError(f"{run_dir} is not a run folder: it holds neither config.yaml nor results")
    checks: list[Callable[[Path], list[Finding]]] = [
        _lock,
        _configuration,
        _metrics,
        _evaluations,
        _checkpoints,
        _best,
        _leftovers,
        _base,
        _resume,
    ]
    found = []
    for check in checks:
        name = check.__name__.removeprefix("_")
        try:
            found += check(run_dir)
        except UserError as error:
            found.append(Finding(AREA, name, "fail", "cannot be used", " ".join(str(error).split())))
        except Exception as error:
            found.append(Finding(AREA, name, "warn", one_line(error), "the check itself failed"))
    return found


def _lock(run_dir: Path) -> list[Finding]:
    owner = owner_of(run_dir)
    if owner is None:
        return [Finding(AREA, "lock", "ok", "free")]
    return [Finding(AREA, "lock", "warn", f"in use by {owner}", "what follows changes while that run goes on")]


def _configuration(run_dir: Path) -> list[Finding]:
    if not (run_dir / "config.yaml").is_file():
        advice = "resume with the file that the run was started with"
        return [Finding(AREA, "config.yaml", "warn", "missing", advice)]
    with foreign_run(run_dir / "config.yaml") as (entry, config):
        return [Finding(AREA, "config.yaml", "ok", f"recipe {entry.name}, {config.trainer.steps} steps")]


def _metrics(run_dir: Path) -> list[Finding]:
    steps = [int(row["step"]) for row in read_metrics(run_dir)]
    found = _lines(run_dir / "metrics.jsonl")
    if not steps:
        return [*found, Finding(AREA, "metrics.jsonl", "note", "no step")]
    missing = sorted(set(range(1, steps[-1] + 1)) - set(steps))
    twice = len(read_jsonl(run_dir / "metrics.jsonl")) - len(steps)
    if missing or twice:
        text = f"steps {steps[0]} to {steps[-1]}, {len(missing)} missing, {twice} written twice"
        advice = f"the first missing one is {missing[0]}" if missing else "the last line of a step counts"
        return [*found, Finding(AREA, "metrics.jsonl", "warn", text, advice)]
    return [*found, Finding(AREA, "metrics.jsonl", "ok", f"steps 1 to {steps[-1]}")]


def _evaluations(run_dir: Path) -> list[Finding]:
    rows = read_evaluations(run_dir)
    steps = sorted({row["step"] for row in rows})
    text = f"{len(rows)} rows, steps {steps[0]} to {steps[-1]}" if rows else "none"
    return [*_lines(run_dir / "evaluations.jsonl"), Finding(AREA, "evaluations.jsonl", "ok" if rows else "note", text)]


def _lines(path: Path) -> list[Finding]:
    """A finding if some lines are not records."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    count = sum(bool(line.strip()) for line in text.split("\n")) - len(read_jsonl(path))
    if not count:
        return []
    torn = count == 1 and not text.endswith("\n")
    advice = "" if torn else "a resume keeps a copy of the file and drops them"
    return [Finding(AREA, path.name, "note" if torn else "warn", f"{count} lines cannot be read", advice)]


def _checkpoints(run_dir: Path) -> list[Finding]:
    checkpoints = Checkpoints(run_dir / "checkpoints")
    found = []
    for step in checkpoints.steps():
        path = checkpoints.path(step)
        damage = checkpoints.damage(path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        if damage is None:
            found.append(Finding(AREA, path.name, "ok", f"whole, {size:.1f} MB"))
        else:
            found.append(Finding(AREA, path.name, "fail", damage, "see `resume` below"))
    return found or [Finding(AREA, "checkpoints", "note", "none")]


def _best(run_dir: Path) -> list[Finding]:
    file = run_dir / "checkpoints/best.json"
    if not file.is_file():
        return []
    best = Checkpoints(run_dir / "checkpoints").best()
    if best is None:
        return [Finding(AREA, "best.json", "warn", "names a checkpoint that is not there", "the newest one counts")]
    return [Finding(AREA, "best.json", "ok", f"step {best['step']}, {best['metric']} {best['value']:.4g}")]


def _leftovers(run_dir: Path) -> list[Finding]:
    found = []
    for pattern, kind in ((".partial-*", "cut off by a kill; a resume removes them"), ("damaged-*", "set aside")):
        count = len(list((run_dir / "checkpoints").glob(pattern)))
        if count:
            found.append(Finding(AREA, "checkpoints", "note", f"{count} {kind}"))
    for folder in sorted((run_dir / "earlier").glob("*")):
        found.append(Finding(AREA, "earlier results", "note", str(folder)))
    return found


def _base(run_dir: Path) -> list[Finding]:
    """Whether the model that the newest checkpoint's adapter builds on is there."""
    steps = Checkpoints(run_dir / "checkpoints").steps()
    file = Checkpoints(run_dir / "checkpoints").path(steps[-1]) / "model/base.json" if steps else None
    if file is None or not file.is_file():
        return []
    entries = read_json_object(file)
    path = base_path(entries, file.parent)
    if "relative" in entries and not Path(path).is_dir():
        advice = f"put it back to {path}, or where it lay from the run: {entries['relative']}"
        return [Finding(AREA, "base model", "fail", f"{path} is missing", advice)]
    return [Finding(AREA, "base model", "ok", path)]


def _resume(run_dir: Path) -> list[Finding]:
    checkpoints = Checkpoints(run_dir / "checkpoints")
    steps = checkpoints.steps()
    whole = [step for step in steps if checkpoints.damage(checkpoints.path(step)) is None]
    command = f"mmrl train {shlex.quote(str(run_dir / 'config.yaml'))} output_dir={shlex.quote(str(run_dir))} --resume"
    result = run_dir / "result.json"
    if result.is_file() and read_json_object(result).get("status") in FINISHED:
        return [Finding(AREA, "resume", "ok", "the run is finished", f"to go on: {command} trainer.steps=<more>")]
    if not steps:
        return [Finding(AREA, "resume", "ok", "no checkpoint: the run starts again from the beginning", command)]
    if not whole:
        advice = "start again in another output_dir"
        return [Finding(AREA, "resume", "fail", "no checkpoint is whole", advice)]
    if whole[-1] != steps[-1]:
        text = f"continues from step {whole[-1]}, the newest whole one"
        return [Finding(AREA, "resume", "warn", text, f"{command} --from-last-good")]
    return [Finding(AREA, "resume", "ok", f"continues from step {whole[-1]}", command)]
