"""Load reward functions given as `module:function` or `path/to/file.py:function`, and compute their digests."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import expanded, is_file, own_config, read_sample
from mmrl.workers import given
from mmrl.workers.loading import GIVEN, SUITE, LoadError, append_path, find_function, names_function


def load_function(spec: str, *, what: str = "function") -> Callable[..., Any]:
    """Load a function by name, from an installed module, the working directory or a file."""
    try:
        return find_function(spec, what=what)
    except LoadError as error:
        raise UserError(str(error)) from error.__cause__


def call_function(spec: str, options: Mapping[str, Any], *args: Any, what: str) -> Any:
    """Call a user's function with the options of a configuration; the error lists options that it does not take."""
    function = load_function(spec, what=what)
    try:
        inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        raise UserError(f"{what} {spec!r} does not take the options {dict(options)}: {error}") from error
    return function(*args, **options)


def source_digest(spec: str) -> str:
    """Digest of the file that defines a function, so that results of changed code differ from earlier ones."""
    if spec.startswith(f"{GIVEN}:"):
        return str(given.about_name(spec.partition(":")[2]).get("digest", ""))
    file = _source_file(spec)
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file else ""


def named_digests(content: Any) -> dict[str, str]:
    """Digest of each file and each function of the user's that nested content names, by its place (`a.b.0`).

    Of a function, the file that defines it counts. Folders are not read, and the suite's own functions do not count.
    """
    found = {place: _named_digest(text) for text, place in _texts(content, "")}
    return {place: digest for place, digest in found.items() if digest}


def _texts(content: Any, place: str) -> Iterator[tuple[str, str]]:
    """Texts in nested content with their places."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, str):
        yield content, place
    elif isinstance(content, Mapping):
        parts = content.items()
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = enumerate(content)
    for key, value in parts:
        yield from _texts(value, f"{place}.{key}" if place else str(key))


def _named_digest(text: str) -> str:
    """Digest of the file or function that a text names; empty if it names none."""
    path = own_config(expanded(text))
    # a plain word, such as the name of a method, is no path, even if a file happens to have that name
    if (path.suffix or len(path.parts) > 1) and is_file(path):
        try:
            content = read_sample(path)
        except OSError:  # whoever needs it says so
            return ""
        return hashlib.sha256(content if isinstance(content, bytes) else repr(content).encode()).hexdigest()[:16]
    spec = text.strip()
    one_word = not re.search(r"\s", spec) or ".py:" in spec
    if not (one_word and names_function(spec)) or spec.partition(":")[0].partition(".")[0] in SUITE:
        return ""
    return source_digest(spec)


def function_source(spec: str) -> str:
    """Source code of a function by name, found without executing anything; empty if not found."""
    if spec.startswith(f"{GIVEN}:"):
        return str(given.about_name(spec.partition(":")[2]).get("source", ""))
    file, name = _source_file(spec), spec.rpartition(":")[2]
    try:
        text = file.read_text(encoding="utf-8") if file else ""
        defined = [node for node in ast.parse(text).body if getattr(node, "name", None) == name]
    except (OSError, SyntaxError, ValueError):
        return ""
    return ast.get_source_segment(text, defined[-1]) or "" if defined else ""


def _source_file(spec: str) -> Path | None:
    """The file that defines a function."""
    place = spec.rpartition(":")[0]
    file: str | Path | None = Path(place).expanduser()
    if place and not place.endswith(".py"):
        append_path(str(Path.cwd()))
        try:
            found = importlib.util.find_spec(place)
        except Exception:  # of a package that cannot be imported; loading the function reports it
            found = None
        file = found.origin if found else None
    return Path(file) if file and Path(file).is_file() else None
