"""JSON Lines files that survive a kill: append with a flush, drop a torn last line, cut back to a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = ["JsonLines", "finite_or_none", "read_jsonl", "write_atomically"]


class JsonLines:
    """Append-only file of one JSON object a line.

    Opening an existing file first drops the torn line that a killed writer may have left at its end.

    Args:
        path: The file; its folder is made when the first record is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it; numbers that are not finite become null."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite(lambda _: True)
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(finite_or_none(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps, so that a resumed run writes them once; those without a step stay."""
        self.close()
        self._rewrite(lambda record: record.get("step", step) <= step)

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, keep: Any) -> None:
        if not self.path.exists():
            return
        old = self.path.read_text(encoding="utf-8", errors="replace")
        kept = [line for line, record in _parsed_lines(old) if keep(record)]
        new = "".join(line + "\n" for line in kept)
        if new != old:
            write_atomically(self.path, new)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read every whole record of a JSON Lines file in order; a torn line is skipped, a missing file has none."""
    if not path.exists():
        return []
    return [record for _, record in _parsed_lines(path.read_text(encoding="utf-8", errors="replace"))]


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step, so that a reader or a kill never sees half of it; its folder must exist."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON value in which numbers that are not finite are None.

    Args:
        value: Numbers, strings, lists and mappings, nested; 0-d tensors and arrays count as numbers.

    Returns:
        The same structure in plain Python types.
    """
    if isinstance(value, Mapping):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _parsed_lines(text: str) -> list[tuple[str, dict[str, Any]]]:
    parsed = []
    for line in text.split("\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            parsed.append((line, record))
    return parsed
