"""A worker process: one service behind two pipes. It is run by path in the Python that the service needs.

    python serve.py path/to/service.py:make '{"service": {"limit": 3}}'

The pool sends requests on standard input and gets one answer for each on standard output, in the same order. While a
request is worked on, a thread sends heartbeats, so that a process that computes differs from one that is stuck. What
the service prints goes to standard error. The process ends when its standard input closes or its parent is gone.

While the service imports modules, the heartbeats say so: that time is not the request's.

This file and those that it loads by path, `wire.py` and `family.py`, run on Python 3.8 with the standard library alone;
numpy is imported where a message has arrays.
"""

from __future__ import annotations

import os
import sys

# The script's own folder leads sys.path; its files must not hide the service's modules of the same name.
if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import faulthandler
import importlib
import importlib.util
import json
import select
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    import numpy as np

    from mmrl.workers import family, wire

BEAT_SECONDS = 0.5
CLOSING_SECONDS = 5.0
"""Time limit in seconds for closing the service after the pool has gone."""
LOADING = {"kind": "beat", "loading": True}
LOADING_SECONDS = 0.1
"""Seconds between two reports that an import has started."""


class Service(Protocol):
    """The work of a worker; a service's file has a function that creates it from keyword arguments.

    An exception becomes a `WorkerFailure` on the other side. If it has a true attribute `for_user`, the user requested
    something impossible, and the message is shown to the user.
    """

    def hello(self) -> Mapping[str, Any]:
        """JSON that is sent to the pool once, before the first reply."""
        ...

    def answer(
        self, fields: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> tuple[Mapping[str, Any], Mapping[str, np.ndarray]]:
        """Process one request, in the main thread."""
        ...

    def close(self) -> None:
        """Free resources."""
        ...


class Channel(Protocol):
    """Destination of replies."""

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a reply."""
        ...


def load_file(path: str | Path, name: str) -> ModuleType:
    """Import a Python file as a module of the given name."""
    spec = importlib.util.spec_from_file_location(name, str(path))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    wire = load_file(Path(__file__).resolve().with_name("wire.py"), "mmrl_wire")
    family = load_file(Path(__file__).resolve().with_name("family.py"), "mmrl_family")


class Pipes:
    """Both directions; the main thread reads, the main thread and the heartbeat write."""

    def __init__(self, watchdog_s: float) -> None:
        # The service keeps descriptors 0 and 1, which from here on lead to nothing and to standard error.
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._busy = True
        self._watchdog_s = watchdog_s
        self._parent = os.getppid()
        self._main = threading.get_ident()
        self._noted = 0.0
        self._loading = wire.pack(LOADING)
        threading.Thread(target=self._beat, daemon=True).start()

    def note_import(self) -> None:
        """Report to the pool that the main thread starts importing."""
        # At most every 0.1 s: a package of many modules would fill the pipe with notes.
        now = time.monotonic()
        if self._busy and threading.get_ident() == self._main and now - self._noted > LOADING_SECONDS:
            self._noted = now
            self._write(self._loading)

    def receive(self) -> wire.Message | None:
        """Wait for a request; returns None if there will be no more."""
        # Blocks: a worker has nothing to do between two requests.
        message = wire.read(self._input)
        self._busy = message is not None
        return message

    def receive_now(self) -> wire.Message:
        """Wait for a message that is already being sent."""
        message = wire.read(self._input)
        if message is None:  # the pool is gone
            _leave()
            raise EOFError
        return message

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a reply, after which heartbeats stop until the next request."""
        data = wire.pack(fields, arrays)
        # First, so that the other thread adds no heartbeat behind the answer.
        self._busy = False
        self._write(data)

    def _write(self, data: bytes) -> None:
        # The lock keeps a heartbeat from landing inside an answer.
        try:
            with self._lock:
                view = memoryview(data)
                while view:
                    # os.write takes what fits into the pipe, so it is repeated.
                    view = view[os.write(self._output, view) :]
        except OSError:
            # The pool is gone; nobody reads this or any later answer.
            _leave()

    def _beat(self) -> None:
        beat, hangup = wire.pack({"kind": "beat"}), select.poll()
        # 0: only hang-ups and errors are reported, which poll does unasked.
        hangup.register(self._input, 0)
        while True:
            # Code that keeps Python's lock stops this loop; a timer outside Python then ends an orphan as well.
            if self._watchdog_s:
                faulthandler.dump_traceback_later(self._watchdog_s, exit=True)
            # A fork of the parent may hold the other end of the pipe open after the parent's death.
            if hangup.poll(int(1000 * BEAT_SECONDS)) or os.getppid() != self._parent:
                # The main thread may be deep in work that nobody waits for.
                time.sleep(0.0 if self._busy else CLOSING_SECONDS)
                _leave()
            if self._busy:
                self._write(self._loading if _imports(self._main) else beat)


class ImportNotes:
    """First module finder: does not find anything, but records that an import begins."""

    def __init__(self, pipes: Pipes) -> None:
        self._pipes = pipes

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Leave the module to the other finders."""
        self._pipes.note_import()


def _imports(thread: int) -> bool:
    """Whether a thread is in the middle of an import."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        # The import machinery's own frames have this file name.
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave() -> None:
    """End this process and its children."""
    family.end_descendants(os.getpid())
    if os.getpgrp() == os.getpid():  # where a strict process cannot look its children up, they are in its group
        os.kill(0, signal.SIGKILL)
    os._exit(0)


def main(service: str, options: Mapping[str, Any]) -> None:
    """Serve requests until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the pool ends this one
    family.adopt_orphans()
    pipes = Pipes(float(options.get("watchdog_s", 0.0)))
    # Imports in the midst of a request (a lazy `import torch`) can take longer than its limit.
    sys.meta_path.insert(0, ImportNotes(pipes))
    # In front: a foreign Python finds the user's files by these.
    sys.path[:0] = [path for path in options.get("paths", []) if path not in sys.path]
    if options.get("given"):
        importlib.import_module("mmrl.workers.given").receive(pipes.receive_now().arrays)
    try:
        file, _, name = service.rpartition(":")
        worker: Service = getattr(load_file(file, "mmrl_service"), name)(**options.get("service", {}))
        hello = dict(worker.hello())
    # Whatever it is, SystemExit of a user's module too, the pool shall learn the reason.
    except BaseException as error:
        pipes.send({"kind": "error", "id": 0, "body": wire.describe_error(error)})
        return
    pipes.send({"kind": "hello", "id": 0, "body": hello})
    while True:
        request = pipes.receive()
        if request is None:
            break
        # An exception is an answer, and the worker goes on.
        answer(pipes, worker, request)
    worker.close()


def answer(pipes: Channel, worker: Service, request: wire.Message) -> None:
    """Process a request and send the reply, or the exception that it raised."""
    number = request.fields["id"]
    try:
        fields, arrays = worker.answer(request.fields["body"], request.arrays)
        pipes.send({"kind": "result", "id": number, "body": dict(fields)}, arrays)
    except BaseException as error:  # a service may raise SystemExit or KeyboardInterrupt too
        pipes.send({"kind": "error", "id": number, "body": wire.describe_error(error)})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
