"""A growing JSON Lines file: read from where the last look ended, kept as columns, thinned for a chart."""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 2**22
"""Bytes of one look, so that a long file is read in parts between which requests are answered."""
LARGEST_STEP = 2**53


class Tail:
    """Records that a JSON Lines file got since the last look.

    A partial last line waits for its end. A file that was replaced or cut, as `--resume` does, is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.behind = False
        """Whether the file goes on after what the last look took."""
        self._inode = 0
        self._offset = 0
        self._rest = b""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether the records of earlier looks no longer count, and the new ones."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                anew = found.st_ino != self._inode or found.st_size < self._offset
                if anew:
                    self._inode = found.st_ino
                    self._offset = 0
                    self._rest = b""
                file.seek(self._offset)
                data = file.read(CHUNK)
        except OSError:  # not there yet, or moved aside by a run that starts again
            anew = self._inode != 0
            self._inode = 0
            self._offset = 0
            self._rest = b""
            self.behind = False
            return anew, []
        self._offset += len(data)
        self.behind = self._offset < found.st_size
        *lines, self._rest = (self._rest + data).split(b"\n")
        return anew, [record for line in lines if (record := _record(line)) is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < LARGEST_STEP else None


class Columns:
    """Numbers of a run by metric, one a step; a step that is written again takes the place of it and of later ones."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._values: dict[str, array[float]] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the numbers of one step."""
        keep = bisect_left(self.steps, record["step"])
        if keep < len(self.steps):
            del self.steps[keep:]
            for values in self._values.values():
                del values[keep:]
        self.steps.append(record["step"])
        for name, value in record.items():
            if isinstance(value, int | float) and name != "step" and abs(value) < math.inf:
                column = self._values.setdefault(name, array("d"))
                column.extend([math.nan] * (keep - len(column)))
                column.append(min(max(value, -1e300), 1e300))  # a whole number may be larger than any float

    def names(self) -> list[str]:
        """Metrics in the order in which they came."""
        return list(self._values)

    def column(self, name: str) -> np.ndarray:
        """Values of a metric, NaN for steps without one."""
        found = np.full(len(self.steps), math.nan)
        values = self._values.get(name, ())
        found[: len(values)] = values
        return found

    def last(self, name: str) -> float | None:
        """Newest step, or None."""
        column = self._values.get(name, ())
        return column[-1] if column and len(column) == len(self.steps) else None

    def thinned(self, name: str, points: int) -> dict[str, list[float]]:
        """A curve of at most so many points: means, and beyond that number of steps lows and highs of the buckets."""
        values = self.column(name)
        kept = np.isfinite(values)
        steps, values = np.array(self.steps)[kept], values[kept]
        if len(values) <= points:
            return {"step": steps.tolist(), "mean": short(values)}
        starts = np.arange(points) * len(values) // points
        counts = np.diff(np.append(starts, len(values)))
        return {
            "step": steps[starts + counts // 2].tolist(),
            "mean": short(np.add.reduceat(values, starts) / counts),
            "low": short(np.minimum.reduceat(values, starts)),
            "high": short(np.maximum.reduceat(values, starts)),
        }


def short(values: np.ndarray) -> list[float]:
    """Numbers with five digits, which is more than a chart shows."""
    return [float(f"{value:.5g}") for value in values]
