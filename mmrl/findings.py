"""Findings of `mmrl doctor`: a line of its table, for the checks of every package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "mmrl-suite"
PROJECT_DIR = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    area: str
    """Group of lines that it belongs to."""
    name: str
    """Subject of the check."""
    state: str
    """ok, note (optional part absent), warn (works with a limitation) or fail (`mmrl train` cannot work)."""
    found: str
    """Version, amount or condition."""
    advice: str = ""
    """Remedy; empty if none is needed."""


def install_command(extra: str) -> str:
    """Command that installs an extra: from the checkout when the suite runs from one, by name otherwise."""
    source = PROJECT_DIR if (PROJECT_DIR / "pyproject.toml").is_file() else DISTRIBUTION
    editable = "" if source == DISTRIBUTION else "--editable "
    suffix = f"[{extra}]" if extra else ""
    return f"pip install {editable}'{source}{suffix}'"


def one_line(error: Exception) -> str:
    """Kind and message of an error, short enough for a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
