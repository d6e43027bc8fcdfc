"""A run's result as a folder that the model's own library loads, whole and without this suite."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded, follow_umask
from mmrl.runs.checkpoint import Checkpoints

LOGGER = logging.getLogger("mmrl")
ABOUT_FILE = "export.json"


def export_run(entry: Any, config: Any, run_dir: Path, output: Path, step: int | None = None) -> str:
    """Write the model of a run's best (else newest) checkpoint as one ordinary folder, adapters merged."""
    checkpoint = chosen_checkpoint(run_dir, step)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} exists; choose another --output, or delete it")
    partial = output.with_name(f".partial-{output.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        call = entry.load_recipe_class().export(config, checkpoint, partial)
        about = {"recipe": entry.name, "step": int(checkpoint.name.removeprefix("step-")), "load": call}
        (partial / ABOUT_FILE).write_text(json.dumps(about | _prompt_format(config), indent=2) + "\n", encoding="utf-8")
        follow_umask(partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if not call.endswith(")"):
        return f"{call}({str(output)!r})"
    function, _, options = call.partition("(")
    return f"{function}({str(output)!r}, {options}"


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run with checkpoints."""
    return (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file()


def model_folder(path: str) -> str:
    """The model of a run's best, else newest, checkpoint where a path is the folder of a run; else the path itself."""
    folder = expanded(path)
    if not is_run(folder):
        return path
    chosen = chosen_checkpoint(folder) / "model"
    LOGGER.info("%s is a run; its model is %s", path, chosen)
    return str(chosen)


def foreign_model(path: str, what: str) -> str:
    """Folder, `~` expanded, or hub id of a model that no recipe trains; raises UserError for the folder of a run."""
    folder = expanded(path)
    if is_run(folder):
        raise UserError(f"{path} is the folder of a run, but no recipe trains {what}, which is needed here")
    return str(folder) if folder.exists() else path


def chosen_checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """A run's best checkpoint, else its newest one, or that of a step, checked to be whole."""
    checkpoints = Checkpoints(run_dir / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run_dir} has no checkpoint to evaluate or export")
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} has no checkpoint of step {step}; there are: {', '.join(map(str, steps))}")
    best = checkpoints.best() if step is None else None
    folder = checkpoints.path(best["step"] if best else steps[-1] if step is None else step)
    checkpoints.check(folder)
    return folder


def _prompt_format(config: Any) -> dict[str, str]:
    """Prompt format of training, which later questions have to follow."""
    data = getattr(config, "data", None)
    found = {name: getattr(data, name, None) for name in ("system_prompt", "format_prompt")}
    return {name: value for name, value in found.items() if value}
