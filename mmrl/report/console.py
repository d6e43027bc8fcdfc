"""The report's tables by data column as lines of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmrl.report.folder import read_run
from mmrl.report.tables import part_tables


def part_lines(folders: Sequence[Path]) -> list[str]:
    """Accuracy or success by data column, as in the report."""
    lines = []
    for table in part_tables([read_run(folder) for folder in folders]):
        rows = [("", "tasks", *(column["label"] for column in table["columns"]), "change, 95 % interval")]
        for group in table["groups"]:
            rows += [(group["heading"],)] if group["heading"] else []
            indent = "  " if group["heading"] else ""
            rows += [_row(indent + row["label"], row) for row in group["rows"]]
        lines += [f"{table['split']}, {table['protocol']}", *_aligned(rows)]
    return lines


def _row(label: str, row: dict[str, Any]) -> tuple[str, ...]:
    last = row["cells"][-1] or {}
    change = f"{last['change']} {last['change_interval']}" if "change" in last else ""
    return label, str(row["count"]), *("–" if cell is None else cell["value"] for cell in row["cells"]), change


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Cells under one another; a row of one cell is a heading and widens nothing but the first column."""
    columns = max(map(len, rows))
    widths = [max(len(row[place]) for row in rows if len(row) > place) for place in range(columns)]
    return [
        "  "
        + "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False))]
        ).rstrip()
        for row in rows
    ]
