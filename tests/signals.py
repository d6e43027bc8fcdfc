"""Signals as from a terminal, even if the tests were started with some ignored (`nohup`, a job with `&`)."""

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

HEEDED = (signal.SIGINT, signal.SIGHUP)


def start_program(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a program that Ctrl-C and a closed terminal reach."""
    return subprocess.Popen(command, preexec_fn=_heed, text=True, **options)


@contextlib.contextmanager
def interrupts_heeded() -> Iterator[None]:
    """This process takes SIGINT as Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _heed() -> None:
    for number in HEEDED:
        signal.signal(number, signal.SIG_DFL)
