"""Memory that the C library and oneDNN hold and nobody uses, given back to the system.

On a CPU the tensors of a step differ in size from step to step: episodes and answers have lengths of their own. Blocks
that are freed between others stay with the process, a larger tensor fits into none of them, and the process grows
although the same number of tensors is alive. glibc gives whole free pages back where it is asked to.

oneDNN, which computes convolutions, compiles a kernel for every shape that it meets and keeps the last 1024 of them,
some 50 KB each. Batches of changing sizes fill that cache over tens of steps and seldom come back to a shape.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

GROWTH = 1.25
SLACK = 64 << 20
"""Bytes. A process is trimmed where it holds more than GROWTH times what the last trim left, and SLACK."""
PRIMITIVES = 256
"""Kernels that oneDNN keeps: more than a step of a large model needs, and a quarter of its default."""


class HeapTrimmer:
    """Gives free pages of the heap back to the system whenever the process has grown; elsewhere than glibc, nothing."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._trim = _malloc_trim() if enabled else None
        self._left = 0.0

    def trim(self) -> bool:
        """Trim where the process has grown by more than a quarter since the last time; returns whether it did.

        Source: glibc, malloc_trim(3).
        """
        if self._trim is None or _resident_bytes() <= GROWTH * self._left + SLACK:
            return False
        self._trim(0)
        self._left = _resident_bytes()
        return True


def limit_primitive_cache() -> None:
    """Have oneDNN keep fewer kernels; without effect once it has computed something, or where the user set a number.

    Source: oneDNN developer guide, "Primitive Cache".
    """
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:  # its older name
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(PRIMITIVES))


def _resident_bytes() -> int:
    """Memory of this process that is in RAM, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux" or not Path("/proc/self/statm").is_file():
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function  # type: ignore[no-any-return]
