"""Rows of an evaluation on disk, kept as they are finished, so that an evaluation that was cut off can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmrl.files import write_atomically
from mmrl.training.record.jsonlines import JsonLines, finite_or_none, read_jsonl


class ResumableRows:
    """One JSON line a row in `<folder>/<name>-<fingerprint>.jsonl`.

    The fingerprint is that of the conditions under which the rows were made, so rows of other weights or settings are
    never mixed in; the conditions themselves lie beside them in a `.protocol.json`. Several processes write a file
    each, and `write` joins them.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any], unsaved: Collection[str] = ()) -> None:
        fingerprint = short_digest(json.dumps(conditions, sort_keys=True, default=str).encode())
        self.path = folder / f"{name}-{fingerprint}.jsonl"
        self.pictures = folder / "pictures"
        """Where the images of samples lie that belong to rows."""
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
        """What is written of a row."""
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
