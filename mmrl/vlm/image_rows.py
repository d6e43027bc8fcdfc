"""Rows with an image each, written as JSON lines with PNG files beside them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

__all__ = ["MakeRow", "write_rows"]

MakeRow = Callable[[], tuple[Image.Image, dict[str, Any]]]
"""Draws the image and the other columns of the next row."""


def write_rows(path: Path, count: int, make_row: MakeRow) -> Path:
    """Write rows with their images beside the final place and rename, since parallel runs may build the same file.

    Args:
        path: .jsonl file; its images go into a folder of its name.
        count: rows.
        make_row: draws an image and the other columns.

    Returns:
        The file.

    Raises:
        ValueError: the file has another extension.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"the questions go to a .jsonl file, with their images in a folder beside it; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    folder = path.with_suffix("")
    lines = []
    for index in range(count):
        image, row = make_row()
        image.save(partial / f"{index:05d}.png", compress_level=1)
        name = f"{folder.name}/{index:05d}.png"
        lines.append(json.dumps({"id": f"{path.stem}-{index:05d}", **row, "images": [name]}))
    listing = partial / "rows.jsonl"
    listing.write_text("\n".join(lines) + "\n", encoding="utf-8")
    lines_path = partial.with_suffix(".jsonl")
    listing.rename(lines_path)
    partial.chmod(0o755)
    try:
        partial.rename(folder)
    except OSError:  # another run was faster; its images are the same
        shutil.rmtree(partial)
    lines_path.replace(path)
    return path
