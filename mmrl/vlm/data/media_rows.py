"""Write rows with images or videos as JSON lines plus media files."""

from __future__ import annotations

import filecmp
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

MakeRow = Callable[[], tuple[Image.Image, dict[str, Any]]]
"""Function that draws the image and the other columns of the next row."""


def write_rows(path: Path, count: int, make_row: MakeRow) -> Path:
    """Write `count` rows with an image each."""

    def save(folder: Path, stem: str) -> dict[str, Any]:
        image, row = make_row()
        image.save(folder / f"{stem}.png", compress_level=1)
        return {**row, "images": [f"{path.with_suffix('').name}/{stem}.png"]}

    return write_media_rows(path, count, save)


def write_media_rows(path: Path, count: int, save: Callable[[Path, str], dict[str, Any]]) -> Path:
    """Write rows with their media in a temporary folder and rename, since parallel runs may build the same file."""
    if path.suffix != ".jsonl":
        raise ValueError(f"the questions go to a .jsonl file, with their media in a folder next to it; got {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=path.parent))
    rows = [{"id": f"{path.stem}-{index:05d}", **save(partial, f"{index:05d}")} for index in range(count)]
    listing = partial / "rows.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    lines_path = partial.with_suffix(".jsonl")
    listing.rename(lines_path)
    partial.chmod(0o755)
    _place_media(partial, path.with_suffix(""), lines_path)
    lines_path.replace(path)
    return path


def _place_media(partial: Path, folder: Path, lines_path: Path) -> None:
    """Give the media folder its final name, unless another run was faster and has written the same media."""
    try:
        partial.rename(folder)
    except OSError as error:
        names = [file.name for file in partial.iterdir()]
        same = len(filecmp.cmpfiles(partial, folder, names, shallow=False)[0]) == len(names)
        shutil.rmtree(partial)
        if same:
            return
        lines_path.unlink()
        raise ValueError(
            f"the media of {folder.with_suffix('.jsonl')} go into {folder}, which has other content: remove "
            "it, or choose another name for the file (another output_dir, where it is the folder of this run)"
        ) from error
