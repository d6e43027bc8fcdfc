"""Results in a run folder: whether the run has started, and moving them aside when it starts again."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from mmrl.files import remove_drafts
from mmrl.runs.jsonlines import read_jsonl

EARLIER = "earlier"
MOVED = (
    "samples",
    "outcomes",
    "videos",
    "failures",
    "tensorboard",
    "report.html",
    "result.json",
    "evaluations.jsonl",
    "metrics.jsonl",
)
"""Files that a new run adds to or replaces; the two that mark a started run come last. `episodes` stays: its
rows count for the weights that they were made with."""
_STEP = re.compile(r"step-(\d+)")


def has_begun(run_dir: Path) -> bool:
    """Whether a run has written results or checkpoints to a folder; `mmrl evaluate` alone is no run."""
    if (run_dir / "metrics.jsonl").exists() or any((run_dir / "checkpoints").glob("step-*")):
        return True
    return any(row.get("tag") != "evaluate" for row in read_jsonl(run_dir / "evaluations.jsonl"))


def remove_partial(run_dir: Path) -> None:
    """Delete the files that a killed process had not finished; every one is written under such a name first."""
    remove_drafts(run_dir)
    for path in run_dir.rglob("*.partial"):  # of earlier releases
        path.unlink(missing_ok=True)


def set_aside(run_dir: Path) -> Path | None:
    """Move a run's results into a separate folder, because the run starts again."""
    found = [run_dir / name for name in MOVED if (run_dir / name).exists()]
    if not found:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = run_dir / EARLIER / stamp
    while folder.exists():
        stamp += "x"
        folder = run_dir / EARLIER / stamp
    folder.mkdir(parents=True)
    for path in found:
        path.rename(folder / path.name)
    return folder


def forget_after(run_dir: Path, step: int) -> None:
    """Remove samples, outcomes and videos of later steps, which a run that resumes at a step makes again."""
    for path in (path for kind in ("samples", "outcomes", "videos") for path in run_dir.glob(f"{kind}/step-*")):
        found = _STEP.match(path.name)
        if found is None or int(found[1]) <= step:
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()
