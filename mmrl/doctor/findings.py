"""What a check of `mmrl doctor` returns."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "mmrl-suite"
PROJECT_DIR = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    area: str
    """Group of lines it belongs to."""
    name: str
    """What was looked at."""
    state: str
    """ok, note (optional part absent), warn (works with a limitation) or fail (`mmrl train` cannot work)."""
    found: str
    """Version, amount or condition."""
    advice: str = ""
    """What to do; empty when nothing needs doing."""


def install_command(extra: str) -> str:
    """How to install an extra: from the checkout when the suite runs from one, by name otherwise."""
    source = PROJECT_DIR if (PROJECT_DIR / "pyproject.toml").is_file() else DISTRIBUTION
    editable = "" if source == DISTRIBUTION else "--editable "
    suffix = f"[{extra}]" if extra else ""
    return f"pip install {editable}'{source}{suffix}'"


def one_line(error: Exception) -> str:
    """Kind and message of an error, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def release(text: str) -> tuple[int, ...]:
    """First four numbers of a version, for comparison; local and pre-release parts are left out."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return tuple([*numbers, 0, 0, 0, 0][:4])
