"""Rows with images or videos, written as JSON lines with the files beside them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

__all__ = ["MakeRow", "write_media_rows", "write_rows"]

MakeRow = Callable[[], tuple[Image.Image, dict[str, Any]]]
"""Draws the image and the other columns of the next row."""


def write_rows(path: Path, count: int, make_row: MakeRow) -> Path:
    """Write rows with an image each; see `write_media_rows`.

    Args:
        path: .jsonl file; its images go into a folder of its name.
        count: rows.
        make_row: draws an image and the other columns.

    Returns:
        The file.

    Raises:
        ValueError: the file has another extension.
    """

    def save(folder: Path, stem: str) -> dict[str, Any]:
        image, row = make_row()
        image.save(folder / f"{stem}.png", compress_level=1)
        return {**row, "images": [f"{path.with_suffix('').name}/{stem}.png"]}

    return write_media_rows(path, count, save)


def write_media_rows(path: Path, count: int, save: Callable[[Path, str], dict[str, Any]]) -> Path:
    """Write rows with their media beside the final place and rename, since parallel runs may build the same file.

    Args:
        path: .jsonl file; its media go into a folder of its name.
        count: rows.
        save: writes the media of the next row into a folder, under a stem, and returns the row.

    Returns:
        The file.

    Raises:
        ValueError: the file has another extension.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"the questions go to a .jsonl file, with their media in a folder beside it; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    rows = [{"id": f"{path.stem}-{index:05d}", **save(partial, f"{index:05d}")} for index in range(count)]
    listing = partial / "rows.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines_path = partial.with_suffix(".jsonl")
    listing.rename(lines_path)
    partial.chmod(0o755)
    try:
        partial.rename(path.with_suffix(""))
    except OSError:  # another run was faster; its media are the same
        shutil.rmtree(partial)
    lines_path.replace(path)
    return path
