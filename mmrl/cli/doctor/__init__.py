"""Checks of `mmrl doctor`: versions, devices, libraries, name clashes, disk, or a run; each problem with a fix.

A check returns findings instead of raising, because it must run in a broken installation.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mmrl.cli.doctor import machine, packages
from mmrl.entries import load_target
from mmrl.findings import Finding, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

__all__ = ["Finding", "check_all", "is_usable", "render", "run", "run_on"]


class Words(NamedTuple):
    """Overall result, for the last line."""

    sound: str
    broken: str
    notes: str


def run(runs_dir: Path, as_json: bool = False) -> int:
    """Check the installation and print the result; 0 when `mmrl train` can work, else 1."""
    return _show(check_all(runs_dir), as_json, INSTALLATION)


def run_on(run_dir: Path, as_json: bool = False) -> int:
    """Check a run folder and print the result; 0 when nothing is damaged, else 1."""
    from mmrl.cli.doctor.run_folder import check_run

    return _show(check_run(run_dir), as_json, RUN)


def _show(findings: Sequence[Finding], as_json: bool, words: Words) -> int:
    usable = is_usable(findings)
    if as_json:
        content = {"usable": usable, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        render(findings, words)
    return 0 if usable else 1


def check_all(runs_dir: Path) -> list[Finding]:
    """Run every check; a check that raises becomes a finding."""
    checks: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("python", packages.check_python),
        ("packages", packages.check_packages),
        ("torch", machine.check_torch),
        ("cpu", machine.check_processor),
        ("torchvision", machine.check_torchvision),
        ("video", machine.check_video),
        ("rendering", machine.check_rendering),
        ("sandbox", machine.check_sandbox),
        ("names", packages.check_names),
        *((area, partial(_check_elsewhere, target)) for area, target in ROOM_CHECKS.items()),
        ("disk", lambda: machine.check_disk(runs_dir)),
    ]
    findings: list[Finding] = []
    for area, check in checks:
        try:
            findings.extend(check())
        except Exception as error:
            findings.append(Finding(area, "check", "warn", one_line(error), "the check itself failed"))
    return findings


def _check_elsewhere(target: str) -> list[Finding]:
    return load_target(target)()  # type: ignore[no-any-return]


def is_usable(findings: Iterable[Finding]) -> bool:
    """Whether nothing that `mmrl train` needs is broken."""
    return all(finding.state != "fail" for finding in findings)


def render(findings: Sequence[Finding], words: Words | None = None) -> None:
    """Print the table, problems first, and what to do; no line is wrapped, so that paths and commands can be copied."""
    ordered = sorted(findings, key=lambda finding: PROBLEMS.index(finding.state) if finding.state in PROBLEMS else 9)
    sys.stdout.write(_table(ordered) + "\n")
    sys.stdout.write(_closing_lines(ordered, words or INSTALLATION) + "\n")


def _closing_lines(findings: Sequence[Finding], words: Words) -> str:
    advice = [f"  {finding.area} {finding.name}: {finding.advice}" for finding in findings if finding.advice]
    counts = {state: sum(finding.state == state for finding in findings) for state in ("fail", "warn", "note")}
    verdict = words.sound if is_usable(findings) else words.broken
    lines = ["", "what to do:", *advice] if advice else []
    noted = f"{counts['note']} {words.notes}"
    return "\n".join([*lines, "", f"{verdict}: {counts['fail']} failures, {counts['warn']} warnings, {noted}"])


def _table(findings: Sequence[Finding]) -> str:
    """Columns of state, area, name and what was found; states in colour on a terminal."""
    rows = [(finding.state, finding.area, finding.name) for finding in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row, finding in zip(rows, findings, strict=True):
        state, *cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        shown = f"\033[{COLOURS[finding.state]}m{state}\033[0m" if sys.stdout.isatty() else state
        lines.append("  ".join([shown, *cells, finding.found]))
    return "\n".join(lines)


ROOM_CHECKS = {"browser": "mmrl.gui.browser.doctor:check_browser"}
"""Checks that rooms bring along: area to `module:function`, imported when the check runs."""
INSTALLATION = Words("ready to train", "something `mmrl train` needs is broken", "optional parts absent")
RUN = Words("the run is sound", "something in the run is damaged", "notes")
COLOURS = {"fail": "1;31", "warn": "33", "note": "34", "ok": "32"}
"""Codes of the states' colours on a terminal."""
PROBLEMS = ("fail", "warn")
"""States that are shown first."""
