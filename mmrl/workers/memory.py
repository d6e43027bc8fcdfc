"""Memory, cores and GPUs of this machine or container, and this process's fraction of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

DEVICES = Path("/dev")
CGROUP_OF_PROCESS = Path("/proc/self/cgroup")
CGROUP_LIMITS = {"": "/sys/fs/cgroup{group}/memory.max", "memory": "/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"}
"""Files with limits by controller, for version 2 (which has no controller names) and version 1."""


def _limit_files() -> Iterator[Path]:
    """Files of the limits around this process: those of its own control group and of all groups above it."""
    try:
        lines = CGROUP_OF_PROCESS.read_text().splitlines()
    except OSError:
        lines = []
    # a container often sees its own group as the root
    groups = [("", "/"), ("memory", "/"), *((line.split(":")[1], line.split(":", 2)[2]) for line in lines)]
    for controllers, group in groups:
        for place in (PurePosixPath(group), *PurePosixPath(group).parents):
            for name in set(controllers.split(",")) & CGROUP_LIMITS.keys():
                yield Path(CGROUP_LIMITS[name].format(group="" if str(place) == "/" else place))


def machine_bytes() -> int | None:
    """Return the memory in bytes available to all processes on this machine together; None if unknown."""
    found = []
    try:
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return None
    for file in _limit_files():
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return min(found)


def usable_cores() -> int:
    """Return the number of cores this process may use; its share if several training processes run on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def device_variables() -> dict[str, str]:
    """Environment variables that make a worker compute and render on the GPU of this training process.

    Empty unless there are several of them on this machine and GPUs: alone, a process may use all.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == 1:
        return {}
    every = [str(index) for index in range(len(list(DEVICES.glob("nvidia[0-9]*"))))]
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(every)).split(",") if name]
    if not every or not visible:
        return {}
    own = visible[int(os.environ.get("LOCAL_RANK", "0")) % len(visible)]
    # EGL counts all GPUs, also those that CUDA_VISIBLE_DEVICES hides, and knows no names such as GPU-4f2a
    return {"CUDA_VISIBLE_DEVICES": own} | ({"MUJOCO_EGL_DEVICE_ID": own} if own in every else {})
