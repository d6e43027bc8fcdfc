"""Use checkpoints of runs as initial models, and describe exported models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import expanded
from mmrl.runs.checkpoint import Checkpoints

LOGGER = logging.getLogger("mmrl")
ABOUT_FILE = "export.json"


@dataclass(frozen=True)
class Exported:
    """Facts about a model folder that a recipe wrote, for its card."""

    call: str
    """Function that loads the folder, followed by `(options)` if it needs any."""
    load: str
    """Python that loads the model from `folder`."""
    use: str = ""
    """Python that uses the loaded model."""
    library: str = "mmrl-suite"
    """Library that loads it, by its name on the hub."""
    task: str = ""
    """Task of the model by its name on the hub (`pipeline_tag`)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Additional facts by name, such as cameras and actions of a robot."""
    limits: Sequence[str] = ()
    """Sentences about situations in which the model should not be trusted."""


def is_run(folder: Path) -> bool:
    """Whether a folder is a run folder with checkpoints."""
    return (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file()


def model_folder(path: str) -> str:
    """For a run folder, the model of its best (else newest) checkpoint; any other path is returned unchanged."""
    folder = expanded(path)
    if not is_run(folder):
        return path
    chosen = chosen_checkpoint(folder) / "model"
    LOGGER.info("%s is a run folder; using its model %s", path, chosen)
    return str(chosen)


def foreign_model(path: str, what: str) -> str:
    """Folder (with `~` expanded) or hub id of a model that no recipe trains; raises UserError for a run folder."""
    folder = expanded(path)
    if is_run(folder):
        raise UserError(f"{path} is a run folder, but {what} is needed here, which no recipe trains")
    return str(folder) if folder.exists() else path


def chosen_checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """A run's best (else newest) checkpoint, or the one of a step, verified to be intact."""
    checkpoints = Checkpoints(run_dir / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{run_dir} has no checkpoint to evaluate or export")
    if step is not None and step not in steps:
        raise UserError(f"{run_dir} has no checkpoint of step {step}; available: {', '.join(map(str, steps))}")
    best = checkpoints.best() if step is None else None
    folder = checkpoints.path(best["step"] if best else steps[-1] if step is None else step)
    checkpoints.check(folder)
    return folder
