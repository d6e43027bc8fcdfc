"""Sizes and checksums of a folder's files, so that a truncated or altered one is noticed before it is used."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mmrl.errors import UserError

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20


class DamagedError(Exception):
    """A file is missing or is not what was written; the message names the file."""


def write_manifest(folder: Path) -> None:
    """List every file of a folder with its size and CRC-32, and bring all of them to the disk.

    A CRC-32 tells every flipped bit and every burst of up to 32 bits, others but for one in 4e9; it guards against
    broken disks and transfers, not against someone who forges a file.
    """
    manifest = folder / MANIFEST
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    entries = {str(path.relative_to(folder)): _describe(path) for path in files}
    manifest.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        fsync(path)


def verify(folder: Path, below: str = "", needed: Iterable[str] = ()) -> None:
    """Compare a folder's files with its manifest."""
    for name, entry in _entries(folder, needed).items():
        if name.startswith(below):
            _compare(folder / name, name, entry)


def check_model(folder: Path) -> None:
    """Verify a model folder if it is that of a checkpoint; another folder has no manifest to be compared with."""
    if not (folder.parent / MANIFEST).is_file():
        return
    try:
        verify(folder.parent, below=f"{folder.name}/")
    except DamagedError as error:
        raise UserError(f"checkpoint {folder.parent} is damaged: {error}; use another one of that run") from error


def fsync(path: Path) -> None:
    """Bring a file or a folder's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(folder: Path, needed: Iterable[str]) -> dict[str, Any]:
    try:
        entries = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read") from error
    missing = [name for name in needed if not isinstance(entries, dict) or name not in entries]
    if not isinstance(entries, dict) or missing:
        raise DamagedError(f"{MANIFEST} cannot be read: it does not list {', '.join(missing) or 'files'}")
    return entries


def _compare(path: Path, name: str, entry: Any) -> None:
    # the first release wrote sizes alone
    size, crc = (entry.get("bytes"), entry.get("crc32")) if isinstance(entry, dict) else (entry, None)
    if type(size) is not int or not (crc is None if entry is size else isinstance(crc, str)):
        raise DamagedError(f"{MANIFEST} cannot be read: its entry of {name} is {entry!r}")
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedError(f"{name} has {found} bytes instead of {size}")
        if crc is not None and _crc32(path) != crc:
            raise DamagedError(f"{name} is not what was written: its checksum is {_crc32(path)} instead of {crc}")
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "crc32": _crc32(path)}


def _crc32(path: Path) -> str:
    checksum = 0
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"
