"""Runs that follow one another, such as a warm start and what comes after it: each is finished once and then kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.config import load_run
from mmrl.errors import UserError
from mmrl.runs.folder import has_begun
from mmrl.training.run import train


def finish_run(config: Path, run_dir: Path, overrides: Sequence[str] = ()) -> Path:
    """Train a configuration, continue it where it was interrupted, or leave it where it is done."""
    entry, options = load_run(config, [*overrides, f"output_dir={run_dir}"])
    if read_result(run_dir).get("status") == "done":
        return run_dir
    return train(entry, options, resume=has_begun(run_dir))


def read_result(run_dir: Path) -> dict[str, Any]:
    """Content of a run's result.json; empty where there is none."""
    path = run_dir / "result.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete it and resume the run to have it again") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}; delete it and resume the run to have it again")
    return found


def last_model(run_dir: Path) -> Path:
    """Folder of the model in a run's newest checkpoint."""
    return max(run_dir.glob("checkpoints/step-*")) / "model"
