"""Output streams that survive a full disk, and reports of crashes."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream that drops output it cannot write, as on a full disk; a closed pipe is still an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        self._keep_going(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write buffered text, or leave it for later."""
        self._keep_going(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _keep_going(self, attempt: Any) -> None:
        try:
            attempt()
        except BrokenPipeError:
            raise
        except OSError:
            self.failed = True


@contextlib.contextmanager
def lasting_streams() -> Iterator[None]:
    """Let standard output and error drop output that cannot be written while the context lasts.

    A run whose log is on a full disk then continues and reports its end by its exit code.
    """
    before = sys.stdout, sys.stderr
    lasting = _Lasting(sys.stdout), _Lasting(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lasting)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in (stream for stream in lasting if stream.failed):
            # buffered text would fail again at exit and change the exit code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


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
