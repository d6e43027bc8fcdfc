"""Checks of the interpreter, the dependencies and the import names."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.cli.doctor.machine import release
from mmrl.findings import DISTRIBUTION, PROJECT_DIR, Finding, install_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec

OLDEST_PYTHON = (3, 11)
IMPORT_NAMES = ("mmrl", "diffusion", "robotics")
ROOMS = ("vlm", "diffusion", "robotics")
REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) (?:\[[^]]*\])? \s* (?:>=\s*(?P<floor>[\w.]+))?
        [^;]* (?:;.*extra\s*==\s*['"](?P<extra>\w+)['"])?""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Requirement:
    """One dependency from the package metadata."""

    name: str
    """Distribution name."""
    floor: str
    """Oldest version that is supported; empty when any will do."""
    extra: str
    """Extra that installs it; empty for the base dependencies."""


def check_python() -> list[Finding]:
    """Interpreter and the suite's own version."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info >= OLDEST_PYTHON:
        findings = [Finding("python", "python", "ok", found)]
    else:
        findings = [Finding("python", "python", "fail", found, "install Python 3.11 or newer")]
    try:
        return [*findings, Finding("python", DISTRIBUTION, "ok", version(DISTRIBUTION))]
    except PackageNotFoundError:
        advice = f"run `make setup`, or {install_command('dev')}"
        return [*findings, Finding("python", DISTRIBUTION, "warn", "not installed", advice)]


def check_packages(
    requirements: Sequence[Requirement] | None = None, lookup: Callable[[str], str] = version
) -> list[Finding]:
    """Compare each dependency with the minimum in the package metadata; fail if no room has all it needs."""
    wanted = read_requirements() if requirements is None else requirements
    findings = [_check_requirement(requirement, lookup) for requirement in wanted]
    pairs = list(zip(wanted, findings, strict=True))
    absent = {requirement.extra for requirement, finding in pairs if finding.state == "note"}
    known = {requirement.extra for requirement in wanted} & set(ROOMS)
    if known and known <= absent:
        advice = install_command("vlm")
        findings.append(Finding("packages", "rooms", "fail", "no room has all of its packages", advice))
    return findings


def read_requirements(lines: Iterable[str] | None = None) -> list[Requirement]:
    """Parse the suite's requirement strings."""
    declared = _declared_requirements() if lines is None else lines
    matches = [match for match in map(REQUIREMENT.match, declared) if match]
    parsed = [Requirement(match["name"], match["floor"] or "", match["extra"] or "") for match in matches]
    return [item for item in parsed if item.name != DISTRIBUTION and item.extra not in ("dev", "all")]


def _declared_requirements() -> list[str]:
    try:
        return requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        pass
    pyproject = PROJECT_DIR / "pyproject.toml"
    if not pyproject.is_file():
        return []
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project.get("optional-dependencies", {})
    return [
        *project["dependencies"],
        *(f"{line}; extra == '{extra}'" for extra, lines in extras.items() for line in lines),
    ]


def _check_requirement(requirement: Requirement, lookup: Callable[[str], str]) -> Finding:
    extra = requirement.extra
    label = f"{requirement.name} [{extra}]" if extra else requirement.name
    try:
        found = lookup(requirement.name)
    except PackageNotFoundError:
        state = "note" if extra else "fail"
        return Finding("packages", label, state, "missing", install_command(extra))
    if release(found) < release(requirement.floor):
        advice = f"needs {requirement.floor} or newer: {install_command(extra)}"
        return Finding("packages", label, "warn" if extra else "fail", found, advice)
    return Finding("packages", label, "ok", found)


def check_names(home: Path | None = None, path: Sequence[str] | None = None) -> list[Finding]:
    """Other top-level packages called `mmrl`, `diffusion` or `robotics`."""
    home = (home or PROJECT_DIR).resolve()
    return [_check_name(name, home, path) for name in IMPORT_NAMES]


def _check_name(name: str, home: Path, path: Sequence[str] | None) -> Finding:
    own = home / name
    others = [place for place in _places(name, sys.path if path is None else path) if place != own]
    if not others:
        return Finding("names", name, "ok", str(own))
    elsewhere = ", ".join(map(str, others))
    spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path)
    if _location(spec) in (own, None):
        return Finding("names", name, "ok", f"{own}; another one, not used: {elsewhere}")
    advice = f"`import {name}` takes that one, not {own}: rename or uninstall it, or set PYTHONPATH={home}"
    return Finding("names", name, "warn", f"hidden by {elsewhere}", advice)


def _places(name: str, path: Iterable[str]) -> list[Path]:
    # A folder without __init__.py counts too: as a namespace package it hides an editable install.
    entries = dict.fromkeys(os.path.abspath(entry) for entry in path)
    locations = [_location(PathFinder.find_spec(name, [entry])) for entry in entries]
    return list(dict.fromkeys(place for place in locations if place is not None))


def _location(spec: ModuleSpec | None) -> Path | None:
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    place = folders[0] if folders else spec.origin
    return Path(place).resolve() if place else None
