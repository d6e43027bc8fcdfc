"""Signals that end a run: the first asks for an end at the next step boundary, a second Ctrl-C ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from accelerate import Accelerator

from mmrl.training.processes import all_ranks

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
ECHO_S = 1.0
"""Launchers pass a Ctrl-C on that the terminal has sent to the whole group; one so soon is the same one."""
SHOW_CURSOR = b"\x1b[?25h"


class StopSignals:
    """Turns SIGTERM, SIGHUP and the first Ctrl-C into a request that the loop reads between steps.

    A second Ctrl-C ends the process at once, with exit code 130 and without a traceback; what is on disk stays whole,
    since every file is written under another name first. In an interactive session it raises KeyboardInterrupt. A
    signal that the process ignores, such as SIGHUP under nohup, stays ignored. Outside the main thread, where Python
    handles no signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The first signal; None while there was none."""
        self._first_s = 0.0
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []

    def requested(self, accelerator: Accelerator) -> bool:
        """Whether any process of the run was asked to stop; every process calls it."""
        wanted = not all_ranks(self.signum is None, accelerator)
        if wanted and self.signum is None:
            self.signum = signal.SIGTERM  # another process was asked
        return wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._terminals = [handle for handle in (1, 2) if os.isatty(handle)]
            for signum in SIGNALS:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                    self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous.clear()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._first_s = signum, now
            name = signal.Signals(signum).name
            self._say(f"mmrl: {name}: stopping when this step is done, with a checkpoint; Ctrl-C stops at once\n")
        elif signum == signal.SIGINT and now - self._first_s > ECHO_S:
            self._end()
        if signum == signal.SIGHUP:
            self._leave_terminals()

    def _say(self, text: str) -> None:
        """Write without Python's buffers, which the interrupted code may be writing to."""
        if os.environ.get("RANK", "0") == "0":
            with contextlib.suppress(OSError):
                os.write(2, text.encode())

    def _leave_terminals(self) -> None:
        """Handle a closed terminal, to which writes would fail."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for handle in self._terminals:
            os.dup2(nowhere, handle)
        os.close(nowhere)

    def _end(self) -> None:
        if hasattr(sys, "ps1"):
            raise KeyboardInterrupt
        if 1 in self._terminals:  # a progress bar hides the cursor
            with contextlib.suppress(OSError):
                os.write(1, SHOW_CURSOR)
        self._say("mmrl: stopped at once\n")
        os._exit(128 + signal.SIGINT)
