"""Load functions given as `module:function` or `path/to/file.py:function`.

Workers load this file, also by its path in the interpreter of a service: it runs on Python 3.8 with the standard
library alone.
"""

from __future__ import annotations

import ctypes.util
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType


class LoadError(Exception):
    """A function that cannot be loaded or takes different arguments; the message states the cause and the functions."""

    for_user = True
    """See `mmrl.workers.serve.Service`."""


SUITE = ("mmrl", "diffusion", "robotics")
GIVEN = "given"
"""Prefix for names of objects of the program that started the run; see `mmrl.workers.given`."""
GIVEN_ELSEWHERE = (
    "an object of the Python program that started this run, which is not available: run that program again, with "
    "resume=True to continue. For a process of another interpreter, use path/to/file.py:name"
)
ROOT = Path(__file__).resolve().parents[2]
"""Folder of the suite's packages. Simulators with their own Python load their factories by path."""
RESTRICTED = "MMRL_RESTRICTED"
"""Environment variable of a process that uses a file from elsewhere, and of its child processes: a JSON list of the
functions outside the suite that may be loaded. See `mmrl.trust`."""


def names_function(spec: str) -> bool:
    """Whether a name is `module:function`, and not a Gymnasium id, which may also begin with `module:`."""
    place, _, name = spec.rpartition(":")
    return bool(place) and name.isidentifier()


RENDERERS = (("egl", "EGL"), ("osmesa", "OSMesa"))
"""Values of `MUJOCO_GL` that need no screen, and the libraries they need, fastest first."""
GUESSED = "MMRL_GUESSED_RENDERER"
"""Environment variable with an untested choice, which `robotics.sim.backends` may still change."""


def choose_renderer() -> None:
    """Set `MUJOCO_GL` if it is unset and there is no screen: MuJoCo would choose a window library and fail.

    It is read when mujoco is imported, so every process that loads a user's environment calls this before.
    """
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform != "linux" or screen or os.environ.get("MUJOCO_GL"):
        return
    for name, library in RENDERERS:
        if ctypes.util.find_library(library):
            os.environ["MUJOCO_GL"] = os.environ[GUESSED] = name
            return


def find_function(spec: str, *, what: str = "function") -> Callable[..., Any]:
    """Load a function by name, from an installed module, the working directory or a file; it may render with MuJoCo."""
    choose_renderer()
    place, separator, name = spec.rpartition(":")
    if not separator or not place or not name:
        raise LoadError(f"{what} is {spec!r}; expected module:function or path/to/file.py:function")
    if place == GIVEN:
        # By name: this file may be loaded by its path, and a process that got such objects has that module.
        given: Any = sys.modules.get("mmrl.workers.given")
        if given is None:
            raise LoadError(f"{what} is {spec}, {GIVEN_ELSEWHERE}")
        found: Callable[..., Any] = given.find(name, what)
        return found
    check_allowed(spec, what)
    module = _load_file(place, what) if place.endswith(".py") else _load_module(place, what)
    # Dots in the name reach into classes.
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if function is None:
        raise LoadError(f"{what}: {place} has no {name!r}; {_list_functions(module, name)}")
    if not callable(function):
        raise LoadError(f"{what}: {spec} is a {type(function).__name__}, not a function")
    # Twice: a module of the suite may import a function from elsewhere under its own name.
    check_allowed(spec, what, str(getattr(function, "__module__", "")))
    return function


def check_allowed(spec: str, what: str, home: str | None = None) -> None:
    """Reject code that was not allowed, by its name before the import and by its defining module afterwards."""
    listed = os.environ.get(RESTRICTED)
    if listed is None or spec in ("gymnasium:make", *json.loads(listed)):
        return
    place = spec.rpartition(":")[0]
    file = Path(place).expanduser().resolve()
    own_file = place.endswith(".py") and any(ROOT / name in file.parents for name in SUITE)
    if home is None:
        known = own_file or (not place.endswith(".py") and place.partition(".")[0] in SUITE)
    else:  # a module of the suite imports functions of others
        known = home.partition(".")[0] in SUITE or (own_file and home == _module_name(file))
    if not known:
        raise LoadError(
            f"{what}: {spec} is code outside the suite, which a file from elsewhere cannot load; add --allow {spec}"
        )


def _module_name(file: Path) -> str:
    """A unique name, so that two files called rewards.py do not hide each other or an installed module."""
    return f"mmrl_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"


def check_arguments(place: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error for arguments that a function does not take, or is missing, before it runs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise LoadError(f"{place}: {error}; it takes {', '.join(signature.parameters)}") from None


def append_path(folder: str) -> None:
    """Let user code import neighbouring files; appended at the end so that it cannot hide an installed package."""
    if folder not in sys.path:
        sys.path.append(folder)


def _list_functions(module: ModuleType, name: str) -> str:
    names = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_"))
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}its functions are: {', '.join(names) or 'none'}"


def _load_file(place: str, what: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        folder = file.parent
        found = sorted(entry.name for entry in folder.glob("*.py")) if folder.is_dir() else []
        raise LoadError(f"{what}: file not found: {file}; Python files there: {', '.join(found) or 'none'}")
    name = _module_name(file)
    # Imported once, as modules are; a second import would make a second class of everything.
    if name in sys.modules:
        return sys.modules[name]
    append_path(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise LoadError(f"{what}: {file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # A module that failed half-way must not be found by the next import.
        del sys.modules[name]
        raise LoadError(f"{what}: {file} fails on import: {type(error).__name__}: {error}") from error
    return module


def _moved(place: str) -> str:
    """New name of a module of the suite that has been renamed; empty for any other."""
    if place.partition(".")[0] not in SUITE:
        return ""
    table = Path(__file__).resolve().with_name("moved.json")
    return str(json.loads(table.read_text(encoding="utf-8")).get(place, ""))


def _load_module(place: str, what: str) -> ModuleType:
    # In front would let a folder of the user hide an installed package.
    cwd = str(Path.cwd())
    append_path(cwd)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # The missing module is another one that this module imports.
        if error.name is None or not place.startswith(error.name):
            raise LoadError(f"{what}: importing {place} fails: {error}") from error
        if moved := _moved(place):
            raise LoadError(f"{what}: the module {place} was renamed to {moved}") from None
        raise LoadError(
            f"{what}: module {place!r} not found (no {error.name!r} in {cwd} or installed); for a file, use "
            "path/to/file.py:function"
        ) from None
    except Exception as error:
        raise LoadError(f"{what}: {place} fails on import: {type(error).__name__}: {error}") from error
