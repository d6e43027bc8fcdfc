"""Digests used to check whether data or weights have changed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time, timedelta
from numbers import Number
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import torch

from mmrl.files import read_sample

FILES_READ = 256
"""Number of images, videos and other files whose bytes are read, spread evenly over the data; all names count."""
PLACES = frozenset({"id"})
"""Fields that identify a row by its position in a file, which may be renamed."""
FILE_FIELDS = frozenset({"images", "videos", "VideoClip.source"})
"""Fields in which texts are file paths; folders may be moved, so only the name counts."""


def content_digest(items: Iterable[Any]) -> str:
    """Digest of items in their order: texts, numbers, arrays and images, and the bytes of some of their files."""
    files: list[Any] = []
    digest = hashlib.blake2b(digest_size=8)

    def plain(value: Any) -> Any:
        return _plain(value, files)

    for item in items:
        digest.update(json.dumps(item, default=plain).encode() + b"\n")
    step = max(1, -(-len(files) // FILES_READ))
    for source in files[::step]:
        digest.update(json.dumps(_content(source), default=plain).encode() + b"\n")
    return digest.hexdigest()


def weights_digest(module: torch.nn.Module) -> str:
    """SHA-256 of a module's state: names, types, shapes and values, one tensor at a time."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {content_digest([value])}".encode())
    return digest.hexdigest()


def _plain(value: Any, files: list[Any]) -> Any:
    """JSON form of an object that json cannot write; files are noted to be read later."""
    if isinstance(value, Path):
        files.append(value)
        return {"file": value.name}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": _digest(bytes(value))}
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return {"tensor": [str(value.dtype), list(value.shape), _digest(value.reshape(-1).view(torch.uint8).numpy())]}
    if isinstance(value, np.ndarray) and value.dtype == object:
        return value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        array = np.ascontiguousarray(value)
        return {"array": [str(array.dtype), list(array.shape), _digest(array.tobytes())]}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Number | date | time | timedelta | UUID):
        return {type(value).__name__: repr(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if hasattr(value, "tobytes"):  # a PIL image
        return {"image": [str(getattr(value, "mode", "")), list(getattr(value, "size", ())), _digest(value.tobytes())]}
    return _plain_object(value, files)


def _plain_object(value: Any, files: list[Any]) -> Any:
    """Fields of a dataclass, or what an object's own `contents()` says a run depends on."""
    if callable(getattr(value, "contents", None)):
        return value.contents()
    found: dict[str, Any] = {"kind": type(value).__name__}  # its text may hold an address in memory
    if callable(getattr(value, "read", None)):
        files.append(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            entry = getattr(value, field.name)
            if field.name not in PLACES and not callable(entry):
                is_file = FILE_FIELDS & {field.name, f"{found['kind']}.{field.name}"}
                found[field.name] = _as_files(entry) if is_file else entry
    return found


def _as_files(sources: Any) -> Any:
    """Convert strings that are paths to paths."""
    if isinstance(sources, str):
        return sources if sources.startswith("data:") else Path(sources)
    return [_as_files(source) for source in sources] if isinstance(sources, Sequence) else sources


def _content(source: Any) -> Any:
    """Content of a file; None if it cannot be read, which the run reports itself."""
    try:
        if isinstance(source, Path):
            return read_sample(source)
        found = source.read()
        return read_sample(Path(found)) if isinstance(found, str) and Path(found).is_file() else found
    except Exception:  # each kind of source raises its own
        return None


def _digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
