"""What becomes of an exception that nothing expected: its traceback in a file, one line for the user."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

LONGEST_MESSAGE = 300


def describe_crash(error: Exception, arguments: Sequence[str], run_dir: Path | None) -> str:
    """Write the traceback of an unexpected exception to a file."""
    command = shlex.join(["mmrl", *arguments])
    text = f"{command}\n\n{''.join(traceback.format_exception(error))}"
    name = f"mmrl-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    folders = [folder for folder in (run_dir, Path.cwd()) if folder is not None and folder.is_dir()]
    place = _write([*folders, Path(tempfile.gettempdir())], name, text)
    where = "the traceback could not be written anywhere" if place is None else f"traceback in {place}"
    return f"{type(error).__name__}: {_message(error)}; {where}"


def _message(error: Exception) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:  # the exception of a user's own code may fail on this too
        text = ""
    return f"{text[:LONGEST_MESSAGE]}..." if len(text) > LONGEST_MESSAGE else text or "no message"


def _write(folders: Sequence[Path], name: str, text: str) -> Path | None:
    for folder in folders:
        file = folder / name
        try:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError:  # a full or read-only disk
            continue
        return file
    return None
