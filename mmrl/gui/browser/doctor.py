"""The browser checks of `mmrl doctor`."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from mmrl.errors import UserError
from mmrl.findings import Finding, install_command, one_line
from mmrl.gui.browser.browser import INSTALL_BROWSER, find_chromium

AREA = "browser"
ONLY = "(only mmrl.gui needs it)"


def check_browser(find: Callable[[], str | None] = find_chromium) -> list[Finding]:
    """Check the browser that `find` returns, playwright, the fonts and MiniWoB++; only `--version` is run."""
    return [
        _check_program(find),
        _check_package("playwright", "gui"),
        _check_fonts(),
        _check_package("miniwob", "miniwob"),
    ]


def _check_program(find: Callable[[], str | None]) -> Finding:
    try:
        program = find()
    except UserError as error:
        return Finding(AREA, "program", "warn", "not usable", str(error))
    if program is None:
        return Finding(AREA, "program", "note", "no Chromium, Chrome or Edge", f"{INSTALL_BROWSER} {ONLY}")
    try:
        asked = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(AREA, "program", "warn", f"{program}: {one_line(error)}", INSTALL_BROWSER)
    return Finding(AREA, "program", "ok", f"{' '.join(asked.stdout.split())} ({program})")


def _check_package(name: str, extra: str) -> Finding:
    # find_spec as well: playwright can be there without metadata, as in some system packages
    try:
        return Finding(AREA, name, "ok", version(name))
    except PackageNotFoundError:
        if importlib.util.find_spec(name) is not None:
            return Finding(AREA, name, "ok", "unknown version")
    return Finding(AREA, name, "note", "missing", f"{install_command(extra)} {ONLY}")


def _check_fonts() -> Finding:
    lister = shutil.which("fc-list")
    if lister is None:
        return Finding(AREA, "fonts", "ok", "not checked: fc-list is not installed")
    asked = subprocess.run([lister, ":", "family"], capture_output=True, text=True, timeout=30, check=False)
    families = {line.split(",")[0].strip() for line in asked.stdout.splitlines() if line.strip()}
    if not families:
        advice = f"sudo apt-get install fonts-dejavu-core fonts-liberation {ONLY}"
        return Finding(AREA, "fonts", "note", "none: pages would be rendered without text", advice)
    return Finding(AREA, "fonts", "ok", f"{len(families)} families")
