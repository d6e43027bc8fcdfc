"""Files from elsewhere cannot run code without permission.

Configurations inside runs, ledgers, experiments and saved policies can name functions, environments and programs. What
the suite's own configurations name may run, and so may files that this user's own runs wrote, whose digests are kept
in a file of the user's state folder. Everything else is listed and refused until it is allowed by name, with `--allow`
or in the environment variable `MMRL_ALLOW`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import CONFIGS
from mmrl.workers.loading import RESTRICTED, SUITE

ALLOW = "MMRL_ALLOW"
"""Environment variable with allowed names, separated by semicolons, for programs that do not use the command line."""
NAME = re.compile(r"[^\s:]+(?: [^:]*)?\.py:[A-Za-z_][\w.]*|[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*(?::[A-Za-z_]\w*)?")
"""`path/to/file.py:function`, `module:function`, `module:Recipe:Config`, and Gymnasium's `module:Name-v0`."""
ENVIRONMENT = re.compile(r"\$\{\s*(oc\.env\s*:\s*\w+)")
PROGRAMS = ("python", "executable", "address")
"""Options that name a program to start, or a cluster or server to connect to."""


def named_code(content: Any) -> dict[str, str]:
    """Code outside the suite's own configurations that nested content refers to, with the first place of each name."""
    found: dict[str, str] = {}
    for name, place in _named(content, ""):
        found.setdefault(name, place)
    return found


def _named(content: Any, place: str) -> Iterator[tuple[str, str]]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            where = f"{place}.{key}" if place else str(key)
            if key in PROGRAMS and isinstance(value, str) and value:
                yield value, where
            yield from _named(key, where)
            yield from _named(value, where)
    elif isinstance(content, str):
        for name in ENVIRONMENT.findall(content):
            yield name.replace(" ", ""), place
        if NAME.fullmatch(content.strip()) and content not in _shipped_names():
            yield content.strip(), place
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        for index, value in enumerate(content):
            yield from _named(value, f"{place}.{index}" if place else str(index))


@functools.cache
def _shipped_names() -> Collection[str]:
    """Functions of the suite that its own configurations name, and the environments that Gymnasium knows by id."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(CONFIGS.rglob("*.yaml"))]
    names = {name for text in texts for name in re.findall(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*", text)}
    return {"gymnasium:make", *(name for name in names if name.partition(".")[0] in SUITE)}


def check_foreign(content: Any, text: str, place: str, allow: Collection[str] = ()) -> Collection[str] | None:
    """Raise an error if a file refers to code that is neither known nor allowed, before any of it is imported.

    Args:
        content: of the file, nested.
        text: of the file; one that `remember` has seen is this user's own.
        place: how messages name the file.
        allow: names that the user gave.

    Returns:
        The names that may run; None if the file is this user's own.

    Raises:
        UserError: with every name that would run and the place that names it.
    """
    found = named_code(content)
    if found and is_known(text):
        return None
    allowed = {*allow, *filter(None, os.environ.get(ALLOW, "").split(";"))}
    if refused := {name: where for name, where in found.items() if name not in allowed}:
        listed = "; ".join(f"{name} ({where})" for name, where in refused.items())
        options = " ".join(f"--allow {_quoted(name)}" for name in refused)
        raise UserError(
            f"{place} was not written by one of your runs and refers to code that would run here: {listed}. Read "
            f"that code; if you trust it, add {options}, or set {ALLOW}"
        )
    return found.keys()


def _quoted(name: str) -> str:
    return f"'{name}'" if re.search(r"[^\w./:@%+=-]", name) else name


@contextlib.contextmanager
def restricted(names: Collection[str] | None) -> Iterator[None]:
    """Only allow functions of the suite and these to be loaded, also in processes started meanwhile; None = any."""
    if names is None:
        yield
        return
    before = os.environ.get(RESTRICTED)
    os.environ[RESTRICTED] = json.dumps(sorted(names))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(RESTRICTED, None)
        else:
            os.environ[RESTRICTED] = before


def remember(content: Any, text: str) -> None:
    """Record that a run of this user wrote a file that refers to code; if that fails, `--allow` is needed."""
    if not named_code(content) or is_known(text):
        return
    file = _known_file()
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with file.open("a", encoding="ascii") as handle:
            handle.write(_digest(text) + "\n")


def is_known(text: str) -> bool:
    """Whether a run of this user wrote a file with this text."""
    try:
        return _digest(text) in _known_file().read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return False


def _known_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "mmrl" / "written-here"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
