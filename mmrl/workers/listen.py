"""A service behind a socket, for processes not started by this one; messages follow `mmrl.workers.wire`.

    python listen.py path/to/service.py:make HOST:PORT '{"option": 1}'

One client at a time; the next one is served when it has left. Where MMRL_SERVICE_TOKEN is set, a client sends the same
token before anything else. This file runs in the Python of the service, as `serve.py` does.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The script's own folder leads sys.path; its files must not hide the service's modules of the same name.
if __name__ == "__main__" and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from mmrl.workers import serve, wire
    from mmrl.workers.serve import Service
else:
    import importlib.util

    _spec = importlib.util.spec_from_file_location("mmrl_serve", str(Path(__file__).resolve().with_name("serve.py")))
    serve = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(serve)
    wire = serve.wire

TOKEN = "MMRL_SERVICE_TOKEN"


class Connection:
    """One client of a service."""

    def __init__(self, peer: socket.socket) -> None:
        self._peer = peer
        self._stream = peer.makefile("rb")

    def receive(self) -> wire.Message | None:
        """The next request; None if the client has left."""
        try:
            return wire.read(self._stream)
        except (OSError, wire.WireError):
            return None

    def send(self, fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Send a reply; `receive` detects if the client has left."""
        try:
            self._peer.sendall(wire.pack(fields, arrays))
        except OSError:
            return


def listen(service: Service, server: socket.socket, token: str = "", clients: int | None = None) -> None:
    """Serve one client after another: `clients` of them, or without end if None."""
    served = 0
    while clients is None or served < clients:
        # One at a time: the service has one state.
        peer, _ = server.accept()
        with peer:
            _serve(service, Connection(peer), token)
        served += 1


def _serve(service: Service, client: Connection, token: str) -> None:
    first = client.receive()
    if first is None:
        return
    # In constant time, so that the token cannot be guessed byte by byte.
    if not hmac.compare_digest(str(first.fields.get("token", "")), token):
        refusal = {"type": "PermissionError", "message": f"wrong token; both sides use {TOKEN}"}
        client.send({"kind": "error", "id": 0, "body": {**refusal, "for_user": True, "traceback": ""}})
        return
    client.send({"kind": "hello", "id": 0, "body": dict(service.hello())})
    while (request := client.receive()) is not None:
        serve.answer(client, service, request)


def main(service: str, address: str, options: Mapping[str, Any]) -> None:
    """Create a service and listen at HOST:PORT until the process ends."""
    file, _, name = service.rpartition(":")
    host, _, port = address.rpartition(":")
    # Before the socket: a service that cannot be made takes no clients.
    made: Service = getattr(serve.load_file(file, "mmrl_service"), name)(**options)
    # This machine only, unless the user names an address.
    with socket.create_server((host or "127.0.0.1", int(port))) as server:
        sys.stderr.write(f"listening at {server.getsockname()[0]}:{server.getsockname()[1]}\n")
        listen(made, server, os.environ.get(TOKEN, ""))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
