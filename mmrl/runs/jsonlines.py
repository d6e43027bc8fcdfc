"""JSON Lines files that survive a kill (append with a flush, drop a torn last line, cut to a step); resumable rows."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mmrl.errors import UserError
from mmrl.files import write_atomically

LOGGER = logging.getLogger("mmrl")


class JsonLines:
    """Append-only file of one JSON object a line.

    Opening an existing file first drops the torn line that a killed writer may have left at its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it; numbers that are not finite become null."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite(lambda _: True)
            # half a surrogate pair becomes \\ud800, which JSON reads back as what it was
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._file.write(json.dumps(finite_or_none(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps, so that a resumed run writes them once; those without a step stay."""
        self.close()
        read_steps(self.path)
        self._rewrite(lambda record: bool(record.get("step", step) <= step))

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        if not self.path.exists():
            return
        old = self.path.read_text(encoding="utf-8", errors="replace")
        parsed = _parsed_lines(old)
        new = "".join(line + "\n" for line, record in parsed if keep(record))
        if new != old:
            self._keep_unreadable(old, len(parsed))
            write_atomically(self.path, new)

    def _keep_unreadable(self, old: str, readable: int) -> None:
        """Keep a copy of a file with lines that are no records; a killed writer leaves one such line, the last."""
        whole = [line for line in old.split("\n")[:-1] if line.strip()]
        if len(whole) <= readable:
            return
        copy = self.path.with_name(f"{self.path.name}.unreadable-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copy2(self.path, copy)
        count = len(whole) - readable
        LOGGER.warning("%s has %d lines that cannot be read; the file as it was is kept as %s", self.path, count, copy)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read every whole record of a JSON Lines file in order; a torn line is skipped, a missing file has none."""
    if not path.exists():
        return []
    return [record for _, record in _parsed_lines(path.read_text(encoding="utf-8", errors="replace"))]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON Lines file that have a step."""
    records = [record for record in read_jsonl(path) if "step" in record]
    for record in records:
        step = record["step"]
        if type(step) is not int or step < 0:
            raise UserError(f"{path}: a line has the step {step!r}; expected a whole number; mend or remove that line")
    return records


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON value in which numbers that are not finite are None."""
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
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            parsed.append((line, record))
    return parsed


class ResumableRows:
    """One JSON line a row in `<folder>/<name>-<fingerprint>.jsonl`.

    The fingerprint is that of the conditions under which the rows were made, so rows of other weights or settings are
    never mixed in; the conditions themselves are in a `.protocol.json` of the same name. Several processes write a file
    each, and `write` joins them.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any], unsaved: Collection[str] = ()) -> None:
        fingerprint = short_digest(json.dumps(conditions, sort_keys=True, default=str).encode())
        self.path = folder / f"{name}-{fingerprint}.jsonl"
        self.images = folder / "images"
        """Folders of the sample images that belong to rows."""
        self.conditions = conditions
        self.unsaved = frozenset(unsaved)

    def read(self) -> list[dict[str, Any]]:
        """Rows of an earlier evaluation, those of all its processes."""
        return [row for file in (self.path, *self._parts()) for row in read_jsonl(file)]

    def appender(self, process: int, processes: int) -> JsonLines:
        """The file to which a process adds its rows while the others add theirs."""
        if processes == 1:
            return JsonLines(self.path)
        return JsonLines(self.path.with_name(f"{self.path.stem}.part-{process:03d}.jsonl"))

    def saved(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Content of a row as it is written."""
        return {key: value for key, value in row.items() if key not in self.unsaved}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace all files by one with these rows, and write the conditions."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(finite_or_none(self.saved(row)), ensure_ascii=False, allow_nan=False) for row in rows]
        write_atomically(self.path, "".join(line + "\n" for line in lines))
        about = json.dumps(self.conditions, indent=2, default=str)
        write_atomically(self.path.with_suffix(".protocol.json"), about + "\n")
        for part in self._parts():
            part.unlink()

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}.part-*.jsonl"))


def short_digest(data: bytes) -> str:
    """First 12 hexadecimal digits of the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()[:12]
