"""Files of saved weights: equal tensors as equal bytes, and bases that are found again when a chain of runs moves."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LENGTH_BYTES = 8
ALIGNMENT = 8


def sort_header(file: Path) -> None:
    """Rewrite a safetensors file so that equal tensors and metadata are equal bytes.

    The library writes the entries of its metadata in an order that differs from process to process.
    """
    with file.open("rb") as source:
        length = int.from_bytes(source.read(LENGTH_BYTES), "little")
        header = json.loads(source.read(length))
        text = json.dumps(_sorted_header(header), separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        partial = file.with_name(f"{file.name}.partial")
        with partial.open("wb") as target:
            target.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            shutil.copyfileobj(source, target)
    partial.replace(file)


def base_entries(path: str, folder: Path) -> dict[str, str]:
    """How a saved model names the one that it builds on."""
    if not Path(path).is_dir():
        return {"path": path}
    start = folder.resolve()
    return {"path": path, "relative": os.path.relpath(Path(path).resolve(), start)}


def base_path(entries: Mapping[str, Any], folder: Path) -> str:
    """The base that `base_entries` named: where it lies from the folder, else where it lay."""
    relative = entries.get("relative")
    if isinstance(relative, str) and (folder.resolve() / relative).is_dir():
        return str((folder.resolve() / relative).resolve())
    return str(entries["path"])


def _sorted_header(header: dict[str, Any]) -> dict[str, Any]:
    metadata = header.pop("__metadata__", None)
    tensors = dict(sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])))
    return ({} if metadata is None else {"__metadata__": dict(sorted(metadata.items()))}) | tensors
