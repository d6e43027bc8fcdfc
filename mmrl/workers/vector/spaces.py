"""Gymnasium's spaces as plain data, and their values in the arrays of a `Board`.

A worker loads this file by its path: it runs on Python 3.8 and numpy, and tells spaces by their class names, which gym
and gymnasium share. A Dict or a Tuple has an array for each of its parts, named `observation/part`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

PLAIN = ("Box", "Discrete", "MultiDiscrete", "MultiBinary")


class SpaceError(Exception):
    """A space whose values have no fixed number of numbers, or a value that is not of its space."""

    for_user = True


def describe(space: Any, what: str) -> dict[str, Any]:
    """Class, shape, dtype and bounds of a space, or descriptions of its parts, as `values.encode` takes them."""
    kind = next((base.__name__ for base in type(space).__mro__ if base.__name__ in (*PLAIN, "Dict", "Tuple")), "")
    if kind in ("Dict", "Tuple"):
        parts = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
        return {"kind": kind, "parts": [[str(key), describe(part, f"{what}/{key}")] for key, part in parts]}
    if not kind:
        raise SpaceError(
            f"{what} is {space}; shared memory holds {', '.join(PLAIN)} and Dict and Tuple of them. Wrap the "
            "environment so that its values have a fixed size"
        )
    found = {"kind": kind, "shape": list(space.shape), "dtype": np.dtype(space.dtype).str}
    for name in ("low", "high", "n", "start", "nvec"):
        value = getattr(space, name, None)
        if value is not None:
            found[name] = np.asarray(value)
    return found


def leaves(tree: Mapping[str, Any], name: str, rows: int) -> list[list[Any]]:
    """Name, dtype and shape of the arrays that hold `rows` values of a described space."""
    if "parts" in tree:
        return [leaf for key, part in tree["parts"] for leaf in leaves(part, f"{name}/{key}", rows)]
    return [[name, tree["dtype"], [rows, *tree["shape"]]]]


def write(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int, value: Any) -> None:
    """Put one value into a row; SpaceError where it has another shape than the space."""
    if "parts" in tree:
        for place, (key, part) in enumerate(tree["parts"]):
            write(part, arrays, f"{name}/{key}", row, value[key if tree["kind"] == "Dict" else place])
        return
    array = arrays[name]
    if np.shape(value) != array.shape[1:]:
        raise SpaceError(f"{name} has the shape {np.shape(value)}; its space has {array.shape[1:]}")
    array[row] = value


def write_batch(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, values: Any) -> None:
    """Put values of all rows into the arrays; SpaceError where shape, dtype or finiteness do not fit."""
    if "parts" in tree:
        for place, (key, part) in enumerate(tree["parts"]):
            write_batch(part, arrays, f"{name}/{key}", values[key if tree["kind"] == "Dict" else place])
        return
    array, given = arrays[name], np.asarray(values)
    if given.shape != array.shape:
        raise SpaceError(f"{name} has the shape {given.shape}; expected {array.shape}, a row for each environment")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        row = int(np.argwhere(~np.isfinite(given))[0][0])
        raise SpaceError(f"{name} of environment {row} is not finite; nothing was stepped")
    try:
        np.copyto(array, given, casting="same_kind")
    except TypeError:
        raise SpaceError(f"{name} has the dtype {given.dtype}; its space has {array.dtype}") from None


def read(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int | None = None) -> Any:
    """Put arrays together in the form that the space has: a copy of one row, or the arrays themselves when None."""
    if "parts" in tree:
        parts = [(key, read(part, arrays, f"{name}/{key}", row)) for key, part in tree["parts"]]
        return dict(parts) if tree["kind"] == "Dict" else tuple(value for _, value in parts)
    return arrays[name] if row is None else arrays[name][row].copy()


def problem_in(tree: Mapping[str, Any], arrays: Mapping[str, np.ndarray], name: str, row: int) -> str:
    """Name of the part of a row that is NaN; empty where none is."""
    if "parts" in tree:
        found = (problem_in(part, arrays, f"{name}/{key}", row) for key, part in tree["parts"])
        return next((problem for problem in found if problem), "")
    array = arrays[name]
    return f"{name} is NaN" if array.dtype.kind == "f" and np.isnan(array[row]).any() else ""
