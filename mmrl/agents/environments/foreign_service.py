"""The worker's side of `EnvPool` in another interpreter, which has its own packages instead of this one's.

Only the folder of `mmrl` is made known there: its neighbours in site-packages could hide that interpreter's packages.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (3, 11)


class UnusablePythonError(Exception):
    """An interpreter in which no environment can run."""

    for_user = True
    """See `mmrl.workers.serve.Service`."""


def make(**options: Any) -> Any:
    """Make the service; options as of `mmrl.agents.environments.environment_service.make`."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        raise UnusablePythonError(f"environment.python: {sys.executable} is Python {version}; 3.11 or newer is needed")
    if importlib.util.find_spec("numpy") is None:
        raise UnusablePythonError(f"environment.python: {sys.executable} has no numpy; install it there")
    # Even if that interpreter has its own copy: both sides of the pipe must be of one version.
    if "mmrl" not in sys.modules:
        init = ROOT / "__init__.py"
        spec = importlib.util.spec_from_file_location("mmrl", init, submodule_search_locations=[str(ROOT)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules["mmrl"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["mmrl"])
    return importlib.import_module("mmrl.agents.environments.environment_service").make(**options)
