"""Find Chromium, or explain what to install."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from mmrl.errors import UserError

EXECUTABLE_VARIABLE = "MMRL_CHROMIUM"
"""Environment variable that names the browser's program."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
MAC_PROGRAMS = (
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
INSTALL_BROWSER = (
    "sudo apt-get install -y --no-install-recommends chromium fonts-dejavu-core fonts-liberation "
    f"(or install Chrome, or set {EXECUTABLE_VARIABLE} to the browser's program)"
)
INSTALL_PACKAGE = "pip install 'mmrl-suite[gui]'"


def find_chromium(executable: str = "") -> str | None:
    """The program of a Chromium, Chrome or Edge; None where there is none."""
    named = executable or os.environ.get(EXECUTABLE_VARIABLE, "")
    if named:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            origin = "the option `executable`" if executable else EXECUTABLE_VARIABLE
            raise UserError(f"{origin} names {named!r}, which is no program that can be run; {INSTALL_BROWSER}")
        return found
    on_path = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return on_path or next((path for path in MAC_PROGRAMS if Path(path).is_file()), None)


def require_chromium(executable: str = "") -> str:
    """The browser's program; raises UserError where it or playwright is missing."""
    if importlib.util.find_spec("playwright") is None:
        raise UserError(f"screens from a browser need playwright, which is not installed: {INSTALL_PACKAGE}")
    found = find_chromium(executable)
    if found is None:
        raise UserError(f"screens from a browser need Chromium, and there is none on the PATH: {INSTALL_BROWSER}")
    return found
