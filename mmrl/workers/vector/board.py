"""Values of Gymnasium's spaces in named arrays of memory that a process and its workers share.

A `Board` has the arrays; a Dict or a Tuple has an array for each of its parts, named `observation/part`. Both ends load
this file, a worker by its path: it runs on Python 3.8 with the standard library and numpy alone, and knows spaces by
their class names, which gym and gymnasium share. On Linux the memory has no name in any folder, so nothing is left
behind however the processes end; elsewhere it is a temporary file, removed by the process that made it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ALIGNMENT = 64
"""Size of a cache line in bytes; arrays do not share cache lines."""
PLAIN = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")


class Board:
    """Shared memory with the arrays of a layout; `create` makes it, `open` finds it in another process."""

    def __init__(self, layout: Sequence[Sequence[Any]], descriptor: int, path: str) -> None:
        self.layout: list[tuple[str, str, list[int]]] = [
            (str(name), str(dtype), [int(size) for size in shape]) for name, dtype, shape in layout
        ]
        self.path = path
        # Shared between processes: mmap of a descriptor maps the same pages in each.
        self._memory = mmap.mmap(descriptor, _bytes_of(self.layout))
        self.arrays: dict[str, np.ndarray] = {}
        start = 0
        for name, dtype, shape in self.layout:
            # Views: writing into them is all that sending takes.
            self.arrays[name] = np.ndarray(shape, dtype, self._memory, start)
            start += _room(dtype, shape)

    @classmethod
    def create(cls, layout: Sequence[Sequence[Any]]) -> Board:
        """Create the memory, filled with zeros; it is freed with the board."""
        # In memory and without a name, so that nothing has to be removed after a crash.
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("mmrl-board")
            os.ftruncate(descriptor, _bytes_of(layout))
            # A worker opens the descriptor of this process by its number; no file has to be passed on.
            board = cls(layout, descriptor, f"/proc/{os.getpid()}/fd/{descriptor}")
            # Open as long as the board lives: workers reach it through this process's /proc entry.
            weakref.finalize(board, os.close, descriptor)
            return board
        descriptor, path = tempfile.mkstemp(prefix="mmrl-board-")
        try:
            os.ftruncate(descriptor, _bytes_of(layout))
            board = cls(layout, descriptor, path)
        finally:
            # A mapping survives the descriptor that it was made from.
            os.close(descriptor)
        weakref.finalize(board, os.unlink, path)
        return board

    @classmethod
    def open(cls, path: str, layout: Sequence[Sequence[Any]]) -> Board:
        """Open the memory that another process created with the same layout."""
        descriptor = os.open(path, os.O_RDWR)
        try:
            return cls(layout, descriptor, path)
        finally:
            os.close(descriptor)


def _bytes_of(layout: Sequence[Sequence[Any]]) -> int:
    # At least one line, since an empty mapping is an error.
    return max(ALIGNMENT, sum(_room(dtype, shape) for _, dtype, shape in layout))


def _room(dtype: str, shape: Sequence[int]) -> int:
    size = np.dtype(dtype).itemsize
    for length in shape:
        size *= int(length)
    # Rounded up to a cache line, so that two processes never write into the same one.
    return -(-size // ALIGNMENT) * ALIGNMENT


class SpaceError(Exception):
    """A space whose values have no fixed size, or a value that is not in its space."""

    for_user = True


def describe(space: Any, what: str) -> dict[str, Any]:
    """Class, shape, dtype and bounds of a space, or descriptions of its parts, as `values.encode` takes them."""
    # By class name: gym and gymnasium have separate classes, and the worker may have either.
    kind = next((base.__name__ for base in type(space).__mro__ if base.__name__ in (*PLAIN, "Dict", "Tuple")), "")
    if kind in ("Dict", "Tuple"):
        parts = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
        return {"kind": kind, "parts": [[str(key), describe(part, f"{what}/{key}")] for key, part in parts]}
    if not kind:
        raise SpaceError(
            f"{what} is {space}; shared memory supports {', '.join(PLAIN)}, and Dict and Tuple of them. Wrap the "
            "environment so that its values have a fixed size"
        )
    found = {"kind": kind, "shape": list(space.shape), "dtype": np.dtype(space.dtype).str}
    # What `_build_space` needs on the other side.
    for name in ("low", "high", "n", "start", "nvec"):
        value = getattr(space, name, None)
        if value is not None:
            found[name] = np.asarray(value)
    return found


def leaves(tree: Mapping[str, Any], name: str, rows: int) -> list[list[Any]]:
    """Name, dtype and shape of the arrays for `rows` values of a described space."""
    if "parts" in tree:
        return [leaf for key, part in tree["parts"] for leaf in leaves(part, f"{name}/{key}", rows)]
    return [[name, tree["dtype"], [rows, *tree["shape"]]]]


def write(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int, value: Any) -> None:
    """Write one value to a row; raises SpaceError if its shape does not match the space."""
    if "parts" in tree:
        for place, (key, part) in enumerate(tree["parts"]):
            write(part, arrays, f"{name}/{key}", row, value[key if tree["kind"] == "Dict" else place])
        return
    array = arrays[name]
    # Checked here: NumPy would broadcast a value of another shape into the row without a word.
    if np.shape(value) != array.shape[1:]:
        raise SpaceError(f"{name} has shape {np.shape(value)}, but its space has {array.shape[1:]}")
    array[row] = value


def write_batch(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, values: Any) -> None:
    """Write values of all rows to the arrays; raises SpaceError if shape, dtype or a value is invalid."""
    if "parts" in tree:
        for place, (key, part) in enumerate(tree["parts"]):
            write_batch(part, arrays, f"{name}/{key}", values[key if tree["kind"] == "Dict" else place])
        return
    array, given = arrays[name], np.asarray(values)
    if given.shape != array.shape:
        raise SpaceError(f"{name} has shape {given.shape}; expected {array.shape}, one row per environment")
    # Before anything is stepped, so that no environment has moved when the call fails.
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        row = int(np.argwhere(~np.isfinite(given))[0][0])
        raise SpaceError(f"{name} of environment {row} is not finite; no environment was stepped")
    try:
        # float64 to float32 is what everybody passes; float to integer would cut digits off.
        np.copyto(array, given, casting="same_kind")
    except TypeError:
        raise SpaceError(f"{name} has dtype {given.dtype}, but its space has {array.dtype}") from None


def read(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int | None = None) -> Any:
    """Combine arrays into the structure of the space: a copy of one row, or the arrays themselves when None."""
    if "parts" in tree:
        parts = [(key, read(part, arrays, f"{name}/{key}", row)) for key, part in tree["parts"]]
        return dict(parts) if tree["kind"] == "Dict" else tuple(value for _, value in parts)
    # A copy of a row: an environment may keep the action it is given.
    return arrays[name] if row is None else arrays[name][row].copy()


def problem_in(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int) -> str:
    """Which part of a row is NaN, as text for a message; empty if none is."""
    if "parts" in tree:
        found = (problem_in(part, arrays, f"{name}/{key}", row) for key, part in tree["parts"])
        return next((problem for problem in found if problem), "")
    # Integers cannot be NaN, and infinite observations are allowed by Box.
    array = arrays[name]
    return f"{name} is NaN" if array.dtype.kind == "f" and np.isnan(array[row]).any() else ""
