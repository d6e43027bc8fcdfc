"""A small process next to a run that samples in Ray, in case Ray ends the training process without a message.

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
"""Seconds within which a network service must accept a connection."""
LOOK_S = 5.0
"""Seconds between two checks of the cluster's state process, for which Ray waits a minute."""
EXITING = 0x4
"""Flag of a Linux process that has begun to exit, in the seventh field after the name in /proc/PID/stat."""


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


def is_exiting(process: int) -> bool:
    """Whether a process is exiting or gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return bool(int(fields[6]) & EXITING)


def watch(raylet: str, gcs: str) -> str:
    """Cause of the end of the training process; empty if it ended normally."""
    training, lost, sure = os.getppid(), "", False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(raylet)
        while not lost:
            ready, _, _ = select.select([0, link.fileno()], [], [], LOOK_S)
            if 0 in ready:
                break
            # all of Ray ends soon after the training process, so this cannot be asked later
            lost = "gcs_server" if is_lost(gcs) else "raylet" if ready else ""
            # the system kills the raylet of a dying process before it closes its files
            sure = bool(lost) and not is_exiting(training)
    if os.read(0, 1):
        return ""
    if sure:
        return f"Ray's {lost} has died (killed, or out of memory), and Ray has ended the training process"
    together = ", or a process of Ray was killed and ended it, too" if lost else ""
    return f"the training process was killed{together}"


def main(job: dict[str, str]) -> None:
    """Print a final line for a training process that could not print one itself."""
    # the keyboard's signals go to the training process too, which then ends by itself
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if cause := watch(job["raylet"], job["gcs"]):
        os.write(2, f"mmrl: {cause} on {job['host']}; continue with: {job['resume']}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
