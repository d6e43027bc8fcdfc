"""Files that a configuration can build when they are missing: data sets, pipelines, encoders."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded

log = logging.getLogger("mmrl")


def build_if_missing(config: Any, what: str = "data") -> None:
    """Call a configuration's `build` function where its `path` is missing; other processes wait for it."""
    path = expanded(config.path)
    if config.build is None or path.exists():
        return
    from mmrl.rewards.loading import load_function

    function = load_function(config.build, what=f"{what}.build")
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            log.info("building %s with %s", path, config.build)
            _call_build(function, path, config, what)
    if not path.exists():
        raise UserError(f"{what}.build {config.build!r} returned without writing {path}")


def _call_build(function: Callable[..., Any], path: Path, config: Any, what: str) -> None:
    try:
        function(str(path), **dict(config.build_options))
    except (TypeError, ValueError, KeyError, ImportError, OSError) as error:  # options or paths that do not fit
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{what}.build {config.build!r} with {what}.build_options failed: {reason}") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Let one of several processes build while the others wait; the end of a process frees its lock."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
