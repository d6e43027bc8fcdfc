"""Settings of environments in subprocesses: which, how they are started, and timeouts."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.fields import bounded
from mmrl.workers.engine import WorkerSpec
from robotics.sim.backends import PROBED, Backend, find_backend

SERVICE = Path(__file__).resolve().with_name("env_service.py")


@dataclass(frozen=True)
class SubprocessSettings:
    """The environment, its Python, and timeouts."""

    factory: str
    """`gymnasium:make`, `module:function` or `file.py:function`; returns a gymnasium.Env or an env_service.RowEnv."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory; JSON."""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of gym_adapter.GymRow, where the factory returns a gymnasium.Env."""
    workers: int = bounded(2, at_least=1)
    """Processes, one episode each at a time."""
    python: str | None = None
    """Interpreter of the environment; this one, with its module paths, when None."""
    images: bool = True
    """Whether observations carry an image."""
    renderer: str | None = None
    """egl, osmesa, glfw or cgl; the first that works when None."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables on top of this process's."""
    end_at_success: bool = True
    """Whether success ends an episode where the environment itself continues."""
    start_timeout_s: float = bounded(180.0, above=0)
    """Seconds for imports and construction."""
    reset_timeout_s: float = bounded(120.0, above=0)
    """Seconds for beginning an episode, which may load another scene."""
    call_timeout_s: float = bounded(120.0, above=0)
    """Seconds for a chunk of actions."""
    heartbeat_timeout_s: float = bounded(30.0, above=0)
    """Seconds without a heartbeat, missed only while code holds the GIL or the process is stopped."""
    memory_mb: float | None = bounded(None, above=0)
    """MiB that a process and its children may hold while it works; beyond that its episode fails and a fresh process
    takes over. None = any."""
    reset_retries: int = bounded(2, at_least=0)
    """Further attempts at an episode that did not begin."""
    max_restarts: int = bounded(20, at_least=1)
    """Restarts of workers without a completed episode in between, after which the run stops."""

    def validate(self) -> None:
        """Check that the environment's options are JSON; raises UserError."""
        for name in ("kwargs", "adapter"):
            try:
                json.dumps(getattr(self, name), allow_nan=False)
            except (TypeError, ValueError) as error:
                raise UserError(f"{name} of an environment must be JSON: {error}") from None


def choose_renderer(settings: SubprocessSettings) -> Backend | None:
    """Find a renderer that works here; a foreign Python's own mujoco uses the same OpenGL libraries."""
    if settings.renderer is None and importlib.util.find_spec("mujoco") is None:
        return None
    found = find_backend(settings.renderer)
    if found is None and settings.renderer is not None:
        raise UserError(f"the renderer {settings.renderer!r} does not draw on this machine; leave it out to try others")
    return found


def worker_spec(settings: SubprocessSettings, renderer: Backend | None) -> WorkerSpec:
    """Command, environment variables and timeouts of a worker."""
    options = {
        "factory": settings.factory,
        "kwargs": dict(settings.kwargs),
        "adapter": dict(settings.adapter),
        "images": settings.images,
        "end_at_success": settings.end_at_success,
    }
    return WorkerSpec(
        f"{SERVICE}:make",
        options,
        purpose=f"the environment {settings.factory}",
        python=settings.python,
        environment={**_variables(renderer), **settings.environment},
        start_timeout_s=settings.start_timeout_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        memory_bytes=None if settings.memory_mb is None else int(settings.memory_mb * (1 << 20)),
    )


def _variables(renderer: Backend | None) -> dict[str, str]:
    # Threads that wait for each other's cores cost more than they bring with a process a row.
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    variables = {name: os.environ.get(name, "1") for name in threads}
    if renderer is not None:
        variables |= {"MUJOCO_GL": renderer.name, PROBED: f"{renderer.name}|{renderer.device}"}
        if renderer.name in ("egl", "osmesa"):
            variables["PYOPENGL_PLATFORM"] = renderer.name
    return variables
