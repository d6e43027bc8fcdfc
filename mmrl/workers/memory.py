"""Memory and cores of this machine, or of the container around this process."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int | None:
    """Return bytes of memory that all processes here may hold together; None where it cannot be found out."""
    found = []
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None
    for file in CGROUP_LIMITS:
        try:
            found.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return min(found)


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
