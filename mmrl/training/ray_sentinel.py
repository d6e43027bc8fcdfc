"""A small process beside a run that samples in Ray, for a training process that Ray ends without a word.

    python -I -S ray_sentinel.py '{"raylet": SOCKET, "gcs": HOST:PORT, "host": HOST, "resume": COMMAND}'

Ray's library calls `_exit` in a training process whose raylet is lost, so no Python of that process can say why. The
sentinel reads its standard input until the training process ends: one byte means that it ended by itself. Run by path
with the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

WAIT_S = 2.0
"""Seconds within which a service on the network has to accept a connection."""


def is_lost(address: str) -> bool:
    """Whether nothing accepts connections at the path of a socket, or at a host and port."""
    host, _, port = address.rpartition(":")
    here = address.startswith("/")
    family = socket.AF_UNIX if here else socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as link:
        link.settimeout(WAIT_S)
        try:
            link.connect(address if here else (host.strip("[]"), int(port)))
        except OSError:
            return True
    return False


def watch(raylet: str, gcs: str) -> str:
    """Cause of the end of the training process, from which of the two ends first; empty if it ended by itself."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(raylet)
        ready, _, _ = select.select([0, link.fileno()], [], [])
        # all of Ray ends soon after the training process, so this cannot be asked later
        lost = ("gcs_server" if is_lost(gcs) else "raylet") if ready == [link.fileno()] else ""
    if os.read(0, 1):
        return ""
    if lost:
        return f"Ray's {lost} has died (killed, or out of memory), and Ray has ended the training process"
    return "the training process was killed"


def main(job: dict[str, str]) -> None:
    """Print a line at the end of a training process that had no chance to print one."""
    # the keyboard's signals go to the training process too, which then ends by itself
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if cause := watch(job["raylet"], job["gcs"]):
        os.write(2, f"mmrl: {cause} on {job['host']}; continue with: {job['resume']}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
