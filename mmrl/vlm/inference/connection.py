"""An inference engine behind the messages of `mmrl.workers.wire`: a worker of another Python, or a running server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mmrl.errors import RunError, UserError
from mmrl.workers import wire
from mmrl.workers.engine import WorkerFailure, WorkerSpec
from mmrl.workers.listen import TOKEN
from mmrl.workers.pool import Request, WorkerPool

Arrays = Mapping[str, np.ndarray]
SERVICE = Path(__file__).resolve().with_name("vllm_service.py")
CONNECT_SECONDS = 30.0
START_SECONDS = 1800.0


class EngineConnection(Protocol):
    """A service that answers requests in order."""

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """Send a request and wait for its answer; raises RunError or UserError."""
        ...

    def close(self) -> None:
        """Leave the service; one that was started for it ends."""
        ...


class LocalService:
    """A worker process of this machine, in the interpreter of the engine."""

    def __init__(self, python: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        spec = WorkerSpec(
            f"{SERVICE}:make",
            purpose="sampling with vLLM",
            python=python,
            start_timeout_s=START_SECONDS,
            heartbeat_timeout_s=None,  # the compiler and large weights keep Python's lock for long
            closing_s=10.0,
        )
        self._pool = WorkerPool(spec, 1)

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """See `EngineConnection`."""
        answer = self._pool.ask({0: Request(fields, arrays)}, self._timeout_s)[0]
        if isinstance(answer, WorkerFailure):
            raise RunError(f"vLLM {answer.kind} at '{fields['do']}': {answer.reason}\n{answer.evidence}")
        return answer

    def close(self) -> None:
        """See `EngineConnection`."""
        self._pool.close()


class RemoteService:
    """A server started with `mmrl/workers/listen.py`, such as one on a machine with other GPUs."""

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._number = address, 0
        try:
            self._peer = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError as error:
            raise UserError(f"no sampling server answers at {address} (sampler.vllm.address): {error}") from error
        self._peer.settimeout(timeout_s)
        self._stream = self._peer.makefile("rb")
        self._exchange({"token": os.environ.get(TOKEN, "")}, {})

    def ask(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        """See `EngineConnection`."""
        self._number += 1
        return self._exchange({"kind": "request", "id": self._number, "body": dict(fields)}, arrays)

    def close(self) -> None:
        """See `EngineConnection`."""
        self._stream.close()
        self._peer.close()

    def _exchange(self, fields: Mapping[str, Any], arrays: Arrays) -> wire.Message:
        try:
            self._peer.sendall(wire.pack(fields, arrays))
            answer = wire.read(self._stream)
        except OSError as error:
            raise RunError(f"the sampling server at {self._address} is lost: {error}") from error
        if answer is None:
            raise RunError(f"the sampling server at {self._address} has closed the connection")
        body = answer.fields["body"]
        if answer.fields["kind"] == "error":
            kind = UserError if body["for_user"] else RunError
            raise kind(
                f"the sampling server at {self._address}: {body['type']}: {body['message']}\n{body['traceback']}"
            )
        return wire.Message(body, answer.arrays)
