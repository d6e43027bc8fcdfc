"""Named arrays in memory that a process and its workers share.

Both ends load this file, a worker by its path: it runs on Python 3.8 with the standard library and numpy alone. On
Linux the memory has no name in any folder, so nothing is left behind however the processes end; elsewhere it is a
temporary file, removed by the process that made it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 64
"""Bytes of a cache line, in which no two arrays meet."""


class Board:
    """Shared memory that holds the arrays of a layout; `create` makes it, `open` finds it in another process."""

    def __init__(self, layout: Sequence[Sequence[Any]], descriptor: int, path: str) -> None:
        self.layout: list[tuple[str, str, list[int]]] = [
            (str(name), str(dtype), [int(size) for size in shape]) for name, dtype, shape in layout
        ]
        self.path = path
        self._memory = mmap.mmap(descriptor, _bytes_of(self.layout))
        self.arrays: dict[str, np.ndarray] = {}
        start = 0
        for name, dtype, shape in self.layout:
            self.arrays[name] = np.ndarray(shape, dtype, self._memory, start)
            start += _room(dtype, shape)

    @classmethod
    def create(cls, layout: Sequence[Sequence[Any]]) -> Board:
        """Make the memory, filled with zeros; it goes with the board."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("mmrl-board")
            os.ftruncate(descriptor, _bytes_of(layout))
            board = cls(layout, descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")
            weakref.finalize(board, os.close, descriptor)
            return board
        descriptor, path = tempfile.mkstemp(prefix="mmrl-board-")
        try:
            os.ftruncate(descriptor, _bytes_of(layout))
            board = cls(layout, descriptor, path)
        finally:
            os.close(descriptor)
        weakref.finalize(board, os.unlink, path)
        return board

    @classmethod
    def open(cls, path: str, layout: Sequence[Sequence[Any]]) -> Board:
        """Find the memory that another process made with the same layout."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(layout, descriptor, path)
        finally:
            os.close(descriptor)


def _bytes_of(layout: Sequence[Sequence[Any]]) -> int:
    return max(ALIGNMENT, sum(_room(dtype, shape) for _, dtype, shape in layout))


def _room(dtype: str, shape: Sequence[int]) -> int:
    size = np.dtype(dtype).itemsize
    for length in shape:
        size *= int(length)
    return -(-size // ALIGNMENT) * ALIGNMENT
