"""Separate Python environments for packages whose requirements conflict with this one's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mmrl.errors import RunError, UserError
from mmrl.files import expanded

TAIL_CHARACTERS = 2000


def environment_folder(kind: str, name: str, folder: str | Path | None = None) -> Path:
    """Folder of an environment: the given one, or `name` below MMRL_<kind>, or below <kind> in the user's cache."""
    if folder is not None:
        return Path(folder).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(f"MMRL_{kind.upper()}") or cache / "mmrl" / kind).expanduser().absolute() / name


def local_model(path: str) -> Path:
    """The folder given by `model.path`: one here, else one that `mmrl setup` made under that name."""
    here, made = expanded(path), environment_folder("models", path)
    return made if path and "/" not in path and not here.exists() and made.is_dir() else here


def python_in(folder: Path) -> Path:
    """Interpreter of a virtual environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(name: str, place: Path, steps: Sequence[str], python: str | None, report: Callable[[str], object]) -> Path:
    """Create a virtual environment and run pip in it; an existing one is brought up to date.

    Args:
        name: of the environment, for messages.
        place: its folder.
        steps: arguments of pip, one call each.
        python: interpreter to make it with; this one when None.
        report: called with a line for each step.

    Returns:
        The environment's interpreter.

    Raises:
        UserError: the folder holds something else.
        RunError: a step failed.
    """
    if place.is_dir() and any(place.iterdir()) and not (place / "pyvenv.cfg").is_file():
        raise UserError(f"{place} contains something other than a virtual environment; choose another folder")
    report(f"{name}: virtual environment in {place}")
    run_apart([python or sys.executable, "-m", "venv", str(place)])
    for step in steps:
        report(f"{name}: pip {step}")
        run_apart([str(python_in(place)), "-m", "pip", *step.split(), "--quiet"])
    return python_in(place)


def run_apart(command: Sequence[str]) -> str:
    """Run a program that must not see this Python's modules; returns its output or raises RunError."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(list(command), capture_output=True, text=True, errors="replace", env=variables, check=False)
    if done.returncode:
        tail = (done.stderr or done.stdout).strip()[-TAIL_CHARACTERS:]
        raise RunError(f"`{' '.join(command)}` ended with code {done.returncode}:\n{tail}")
    return done.stdout
