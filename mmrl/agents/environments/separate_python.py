"""Virtual environments for packages of environments that conflict with this one's: `mmrl setup browsergym`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import UserError
from mmrl.workers.interpreters import environment_folder, install, python_in, run_apart


@dataclass(frozen=True)
class SeparatePackage:
    """Installation of a package of environments."""

    steps: tuple[str, ...]
    """Arguments of pip, one call each."""
    check: str
    """Python code that imports it."""
    advice: str


SEPARATE = {
    "browsergym": SeparatePackage(
        # it pins playwright 1.44, older than the one that the screens of `mmrl.gui` need
        steps=("install browsergym-core==0.14.3 numpy pillow",),
        check="import browsergym.core",
        advice=(
            "set environment.python: browsergym and environment.factory: "
            "mmrl.gui.browser.browsergym:BrowserGymEnvironment; benchmarks are packages of their own, such as "
            "browsergym-miniwob, to be installed with this Python"
        ),
    ),
}
"""Packages by name."""


def environment_python(name: str) -> str:
    """Path of an interpreter, given as one or as the name of an environment that `mmrl setup` made."""
    if name in SEPARATE:
        made = python_in(environment_folder("environments", name))
        if made.is_file():
            return str(made)
        raise UserError(
            f"environment.python: {name} is not installed in {made.parents[1]}; install it with `mmrl setup {name}`, "
            "or set MMRL_ENVIRONMENTS to the folder that contains it"
        )
    found = shutil.which(str(Path(name).expanduser()))
    if found is None:
        raise UserError(
            f"environment.python is {name!r}, which is neither an interpreter nor one of: {', '.join(SEPARATE)}"
        )
    return found


def setup_separate(name: str, report: Callable[[str], object], folder: str | Path | None = None) -> Path:
    """Install a package into its virtual environment and import it; returns the environment's interpreter."""
    package, place = SEPARATE[name], environment_folder("environments", name, folder)
    python = install(name, place, package.steps, None, report)
    run_apart([str(python), "-c", package.check])
    report(f"{name}: {python} can import it; {package.advice}")
    return python
