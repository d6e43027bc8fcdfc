"""Saved weights: equal tensors as equal bytes, references to base models, and building a folder that is missing."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from mmrl.config import as_given
from mmrl.errors import UserError
from mmrl.fields import rare
from mmrl.files import expanded
from mmrl.hub.cards import note_build
from mmrl.runs.dry_run import fetch_follows

LENGTH_BYTES = 8
ALIGNMENT = 8
log = logging.getLogger("mmrl")


def sort_header(file: Path) -> None:
    """Rewrite a safetensors file so that equal tensors and metadata give equal bytes.

    The library writes the entries of its metadata in an order that differs from process to process.
    """
    with file.open("rb") as source:
        length = int.from_bytes(source.read(LENGTH_BYTES), "little")
        header = json.loads(source.read(length))
        metadata = header.pop("__metadata__", None)
        entries = dict(sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0])))
        if metadata is not None:
            entries = {"__metadata__": dict(sorted(metadata.items())), **entries}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        partial = file.with_name(f"{file.name}.partial")
        with partial.open("wb") as target:
            target.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
            shutil.copyfileobj(source, target)
    partial.replace(file)


def base_entries(path: str, folder: Path) -> dict[str, str]:
    """Reference from a saved model to its base model."""
    if not Path(path).is_dir():
        return {"path": path}
    start = folder.resolve()
    return {"path": path, "relative": os.path.relpath(Path(path).resolve(), start)}


def base_path(entries: Mapping[str, Any], folder: Path) -> str:
    """Path of the base model given by `base_entries`: relative to the folder if it is there, else absolute."""
    relative = entries.get("relative")
    if isinstance(relative, str) and (folder.resolve() / relative).is_dir():
        return str((folder.resolve() / relative).resolve())
    return str(entries["path"])


def merged_weights(module: Any, adapter: str) -> dict[str, Any]:
    """Weights with a LoRA adapter merged; weights without an adapter are shared, and the module is not changed."""
    import torch

    # a new table of weights: merging and unmerging the module's own would round them
    state = {
        name.replace(".base_layer.", "."): weight
        for name, weight in module.state_dict().items()
        if ".lora_" not in name
    }
    with torch.no_grad():
        for name, layer in module.named_modules():
            if hasattr(layer, "get_delta_weight"):
                weight = state[f"{name}.weight"]
                state[f"{name}.weight"] = (weight.float() + layer.get_delta_weight(adapter)).to(weight.dtype)
    return state


def check_finite(weights: Mapping[str, Any], place: Path | str) -> None:
    """Raise UserError if weights have NaN or infinite entries, with the name of the first."""
    for name, weight in weights.items():
        if weight.is_floating_point() and not weight.is_meta and not bool(weight.isfinite().all()):
            raise UserError(f"{name} in {place} contains NaN or infinite entries; the file is damaged")


def may_be_hub_id(path: str) -> bool:
    """Whether a path that is not a model folder may be a hub id (owner/name)."""
    folder = expanded(path).absolute()
    # data/model is also a well-formed hub id; next to an existing data/, and always in runs/, the folder of runs, it is
    # one that is missing
    if folder.is_file() or folder.parent.is_dir() or path.startswith("runs/"):
        return False
    return re.fullmatch(r"[\w.-]+/[\w.-]+", path) is not None


def first_line(error: Exception) -> str:
    """Kind of an error and the first line of its message."""
    if type(error).__name__ == "UnpicklingError":  # torch's message advises to load it all the same
        return "its pickled weights contain more than tensors and could run code; use safetensors"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@dataclass(kw_only=True)
class BuiltPath:
    """A file or folder, and the function that creates it if it is missing."""

    path: str = MISSING
    """File or folder."""
    build: str | None = rare(None)
    """`module:function` that writes `path` if it is missing; called with the path and `build_options`."""
    build_options: dict[str, Any] = rare(field(default_factory=dict))
    """Keyword arguments of `build`."""


def build_if_missing(config: BuiltPath, what: str = "data") -> None:
    """Call a configuration's `build` function if its `path` is missing; other processes wait for it."""
    path = expanded(config.path)
    if config.build is None or path.exists():
        return
    fetch_follows(config.path, "the run builds it")
    from mmrl.rewards.reward_loading import load_function

    function = load_function(config.build, what=f"{what}.build")
    new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            log.info("building %s with %s", path, config.build)
            _call_build(function, path, config, what)
            if what != "model":
                note_build(path, config.build, as_given(config.build_options), new_folder=new)
    if not path.exists():
        raise UserError(f"{what}.build {config.build!r} returned without writing {path}")


def _call_build(function: Callable[..., Any], path: Path, config: BuiltPath, what: str) -> None:
    try:
        function(str(path), **dict(config.build_options))
    except (TypeError, ValueError, KeyError, ImportError, OSError) as error:  # options or paths that do not fit
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{what}.build {config.build!r} with {what}.build_options failed: {reason}") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Let one of several processes build while the others wait; the end of a process frees its lock."""
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
