"""Simulator suites in separate Python environments: functions to install a suite and to open it.

    setup_suite("libero")
    with open_suite("libero", {"suite": "libero_spatial"}, workers=4) as sim: ...

These packages need versions of mujoco, robosuite and others that exclude each other and this package's own, so each
gets a virtual environment, by default in the user's cache folder, or in the folder named by MMRL_SUITES.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.errors import RunError, UserError
from mmrl.workers.interpreters import environment_folder, install, python_in
from robotics.sim.episodes import EpisodeSpec
from robotics.sim.subprocess_sim import SubprocessSettings, SubprocessSim

FACTORIES = Path(__file__).resolve().parent / "suites"
RESET_SECONDS = 300.0
"""The first episode after installation compiles robosuite's functions, in all workers at once."""


@dataclass(frozen=True)
class SuiteRecipe:
    """Installation of a suite."""

    steps: tuple[str, ...]  # arguments of pip, one call each
    factory: str  # file that a worker loads
    advice: str


def suite_folder(name: str, folder: str | Path | None = None) -> Path:
    """Folder of a suite's environment."""
    _recipe(name)
    return environment_folder("suites", name, folder)


def suite_python(name: str, folder: str | Path | None = None) -> Path:
    """The interpreter of an installed suite."""
    python = python_in(suite_folder(name, folder))
    if not python.is_file():
        raise UserError(
            f"{name} is not installed in {suite_folder(name, folder)}; install it with `mmrl sim setup {name}`, or "
            "set MMRL_SUITES to the folder that contains it"
        )
    return python


def suite_settings(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int = 2,
    images: bool = True,
    folder: str | Path | None = None,
) -> SubprocessSettings:
    """Settings of a pool of a suite's episodes."""
    python = suite_python(name, folder)
    factory = f"{FACTORIES / _recipe(name).factory}:make"
    return SubprocessSettings(
        factory, dict(options or {}), workers=workers, images=images, python=str(python), reset_timeout_s=RESET_SECONDS
    )


def open_suite(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int = 2,
    images: bool = True,
    folder: str | Path | None = None,
) -> SubprocessSim:
    """Start the workers of an installed suite.

    Args:
        name: libero, metaworld, robosuite or gymnasium_robotics.
        options: what `make` in robotics/sim/suites takes, such as suite, tasks, size, horizon, camera, shadows.
        workers: processes, one episode each at a time.
        images: whether observations carry an image.
        folder: as for `suite_folder`.

    Returns:
        The pool; to be closed.

    Raises:
        UserError: the suite is unknown or not installed, an option is out of range, or assets are missing.
        RunError: it does not start.
    """
    return SubprocessSim(suite_settings(name, options, workers=workers, images=images, folder=folder))


def setup_suite(
    name: str,
    folder: str | Path | None = None,
    *,
    python: str | None = None,
    say: Callable[[str], object] | None = None,
) -> Path:
    """Install a suite into a virtual environment and begin an episode in it.

    Args:
        name: libero, metaworld, robosuite or gymnasium_robotics.
        folder: as for `suite_folder`; what an earlier installation left there is brought up to date.
        python: interpreter to make the environment with; this one when None.
        say: called with a line for each step and for what to do next; prints them when None.

    Returns:
        The environment's interpreter.

    Raises:
        UserError: there is no such suite, or the folder holds something else.
        RunError: a step of the installation, or the check, failed.
    """
    report = say or _say
    recipe, place = _recipe(name), suite_folder(name, folder)
    # The default index serves a torch without CUDA everywhere but on Linux.
    linux = sys.platform.startswith("linux")
    steps = [f"install {step if linux else step.replace(TORCH_INDEX, '')}" for step in recipe.steps]
    found = install(name, place, steps, python, report)
    report(f"{name}: {_check(name, place)}")
    report(f'{name}: {recipe.advice}; robotics.sim.open_suite("{name}", ...) from Python')
    return found


def _check(name: str, place: Path) -> str:
    """Begin an episode; missing assets are no failure of the installation."""
    start = time.monotonic()
    settings = suite_settings(name, workers=1, images=False, folder=place)
    try:
        with SubprocessSim(settings) as pool:
            task, instruction = next(iter(pool.tasks().items()))
            result = pool.reset([EpisodeSpec(task, instruction, 0)])
    except UserError as error:
        return f"installed, but no episode can start yet: {error}"
    if result.failed.any():
        raise RunError(f"{name} is installed in {place}, but the task {task} did not start: {result.reasons[0]}")
    return f"the task {task} started after {time.monotonic() - start:.0f} s"


def _recipe(name: str) -> SuiteRecipe:
    if name not in RECIPES:
        raise UserError(f"unknown suite {name!r}; available: {', '.join(RECIPES)}")
    return RECIPES[name]


def _say(text: str) -> None:
    width = shutil.get_terminal_size().columns
    sys.stdout.write(text[: max(width, 200)] + "\n")


TORCH_INDEX = "--index-url https://download.pytorch.org/whl/cpu"
ROBOSUITE = "numpy==2.4.6 numba==0.68.1 gymnasium==1.4.0 termcolor"

RECIPES = {
    "metaworld": SuiteRecipe(
        # packaging: gymnasium's renderer of mujoco scenes imports it, and nothing in this set asks for it
        steps=("metaworld==3.1.1 mujoco==3.3.0 gymnasium==1.4.0 numpy==2.4.6 packaging",),
        factory="metaworld.py",
        advice=(
            "run `mmrl sim experts metaworld` to try the experts of its 50 tasks; use sim.kind: metaworld in a "
            "configuration"
        ),
    ),
    "gymnasium_robotics": SuiteRecipe(
        steps=("gymnasium-robotics==1.4.2 mujoco==3.3.0 gymnasium==1.4.0 numpy==2.4.6 packaging",),
        factory="gymnasium_robotics.py",
        advice="use sim.kind: gymnasium_robotics in a configuration, with sim.tasks: [FetchPush-v4]",
    ),
    "robosuite": SuiteRecipe(
        steps=(
            f"mujoco==3.8.1 {ROBOSUITE} scipy pillow tqdm opencv-python-headless h5py",
            # Without what it declares for teleoperation (pynput, built from source) and the inverse kinematics of
            # humanoids (mink, qpsolvers).
            "--no-deps robosuite==1.5.2",
        ),
        factory="robosuite.py",
        advice="use sim.kind: robosuite in a configuration, with sim.tasks: [Lift]",
    ),
    "libero": SuiteRecipe(
        steps=(
            # First, so that nothing else brings a torch with CUDA along; it only reads the initial states here.
            f"torch==2.13.0 {TORCH_INDEX}",
            # What robosuite, bddl and LIBERO's environments import; robosuite and bddl declare only a part of it.
            f"mujoco==3.8.1 robosuite==1.4.0 bddl==1.0.1 {ROBOSUITE} future easydict cloudpickle matplotlib",
            # Without what it declares for training policies (robomimic, transformers, wandb, thop and more) and for
            # choosing a GPU (egl-probe, built from source with cmake); its environments import none of these.
            "--no-deps hf-libero==0.1.4",
        ),
        factory="libero.py",
        advice=(
            "set LIBERO_ASSETS to the folder libero/libero/assets of a copy of the repository "
            "Lifelong-Robot-Learning/LIBERO, because the package does not include it; then use sim.kind: libero in "
            "a configuration, as in `mmrl evaluate configs/robotics/libero_spatial_eval.yaml`"
        ),
    ),
}
