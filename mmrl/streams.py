"""Standard output and error of a command that has to go on when its log cannot grow."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream that drops what cannot be written, as on a full disk; a closed pipe is still an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failed = False

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        self._keep_going(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Write what is held back, or leave it for later."""
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
    """Let standard output and error drop what cannot be written for as long as the context lasts.

    A run whose log lies on a full disk then goes on and tells its end by its exit code.
    """
    before = sys.stdout, sys.stderr
    lasting = _Lasting(sys.stdout), _Lasting(sys.stderr)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lasting)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in (stream for stream in lasting if stream.failed):
            # what is still held back would fail once more at exit and change the exit code
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
