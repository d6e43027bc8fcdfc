"""Checkpoints of a run, with sizes and checksums that detect truncated or altered files before they are used."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmrl.errors import UserError
from mmrl.files import follow_umask, read_json_object, write_atomically

MANIFEST = "manifest.json"
BLOCK_BYTES = 2**20
LOGGER = logging.getLogger("mmrl")
STATE = "state.pt"
TEMPORARY_PREFIX = ".partial-"
REPLACED_PREFIX = ".replaced-"
DAMAGED_PREFIX = "damaged-"


ABOUT = """\
# Checkpoint of step {step:,}

Written by mmrl. `model/` can be loaded with the model's own library, `state.pt` is for resuming, and `manifest.json`
has their checksums. From this folder:

```bash
mmrl export ../.. --step {step}              # exports the model to a folder, with a card of its results
mmrl evaluate ../..                    # evaluates the best checkpoint (or the newest) on held-out tasks
mmrl train ../../config.yaml --resume  # continues from the newest checkpoint; run it where the run was started
```
"""
"""Text of the README.md of a checkpoint."""


class DamagedError(Exception):
    """A file is missing or differs from what was written; the message contains its name."""


def write_manifest(folder: Path) -> None:
    """List every file of a folder with its size and CRC-32, and sync all of them to disk.

    CRC-32 detects every single-bit error and every burst of up to 32 bits, and misses one in 4e9 of the others. It
    protects against broken disks and transfers, not against forgery.
    """
    follow_umask(folder)
    manifest = folder / MANIFEST
    # sorted, so that manifests of equal folders are equal
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != manifest)
    entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "crc32": _crc32(path)} for path in files}
    manifest.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    # files first, then the folders that name them: after a power failure a name never points to missing content
    for path in (*files, manifest, *(path for path in folder.rglob("*") if path.is_dir()), folder):
        fsync(path)


def verify(folder: Path, below: str = "", needed: Iterable[str] = ()) -> None:
    """Compare a folder's files with its manifest."""
    for name, entry in _entries(folder, needed).items():
        if name.startswith(below):
            _compare(folder / name, name, entry)


def check_model(folder: Path) -> None:
    """Verify a model folder if it belongs to a checkpoint; other folders have no manifest."""
    if not (folder.parent / MANIFEST).is_file():
        return
    try:
        verify(folder.parent, below=f"{folder.name}/")
    except DamagedError as error:
        raise UserError(
            f"checkpoint {folder.parent} is damaged: {error}; use another checkpoint of that run"
        ) from error


def fsync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    # opened for reading: fsync needs a descriptor, also that of a folder
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(folder: Path, needed: Iterable[str]) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise DamagedError(f"{MANIFEST} is missing")
    try:
        entries = read_json_object(folder / MANIFEST)
    except UserError as error:
        raise DamagedError(f"{MANIFEST} cannot be read") from error
    # a manifest that lost an entry would verify everything else and load without it
    missing = [name for name in needed if name not in entries]
    if missing:
        raise DamagedError(f"{MANIFEST} cannot be read: it does not list {', '.join(missing)}")
    return entries


def _compare(path: Path, name: str, entry: Any) -> None:
    # the first release wrote sizes alone
    size, crc = (entry.get("bytes"), entry.get("crc32")) if isinstance(entry, dict) else (entry, None)
    # type(), not isinstance: True is an int, and a manifest may have been edited
    if type(size) is not int or not (crc is None if entry is size else isinstance(crc, str)):
        raise DamagedError(f"{MANIFEST} cannot be read: its entry for {name} is {entry!r}")
    try:
        found = path.stat().st_size
        if found != size:
            raise DamagedError(f"{name} has {found} bytes instead of {size}")
        if crc is not None and _crc32(path) != crc:
            raise DamagedError(f"{name} has changed: its checksum is {_crc32(path)} instead of {crc}")
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{name} cannot be read: {error}") from error


def _crc32(path: Path) -> str:
    # by blocks: weights may be larger than memory
    checksum = 0
    with path.open("rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return f"{checksum:08x}"


class Checkpoints:
    """The checkpoint folder of one run.

    Layout of `step-000100/`: `model/` (loads with from_pretrained), `reference/` if the run compares with a policy
    other than the model in the folder `model.path` (for which the state has a digest), `state.pt` (optimiser, counters,
    task position, every RNG, recipe state), `manifest.json` (sizes and checksums).
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, state: dict[str, Any], write_parts: Callable[[Path], None]) -> Path:
        """Write one checkpoint atomically; readers see either all of it or nothing."""
        # the final name is the promise that the checkpoint is whole
        final = self.path(step)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            _write(temporary, state, write_parts)
            (temporary / "README.md").write_text(ABOUT.format(step=step), encoding="utf-8")  # people may edit it
            self._put(temporary, final)
        # also KeyboardInterrupt: nothing half-written stays
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        # only after the new one is in place: a failure must not cost the older checkpoints
        self.forget_old()
        return final

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint, existing or not."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Steps with a checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name[5:]) for path in self.folder.glob("step-*") if path.name[5:].isdigit())

    def mark_best(self, step: int, metric: str, value: float) -> None:
        """Record the best checkpoint so far; the previous best loses its protection from deletion."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "best.json", json.dumps({"step": step, "metric": metric, "value": value}))
        self.forget_old()

    def forget_best(self) -> None:
        """Remove the mark of `mark_best`."""
        (self.folder / "best.json").unlink(missing_ok=True)

    def forget_old(self) -> None:
        """Remove all but the newest checkpoints and the best one; leftovers of a killed run are removed next time."""
        best = self.best()
        # keep=0 keeps all
        protected = set(self.steps()[-self.keep :] if self.keep else self.steps())
        if best is not None:
            protected.add(best["step"])
        for step in set(self.steps()) - protected:
            # renamed first, so that a kill leaves no half of it under its name
            half = self.folder / f"{TEMPORARY_PREFIX}{self.path(step).name}"
            shutil.rmtree(half, ignore_errors=True)
            self.path(step).rename(half)
            shutil.rmtree(half, ignore_errors=True)

    def best(self) -> dict[str, Any] | None:
        """Last record of `mark_best`; None if there is none or its checkpoint was deleted."""
        path = self.folder / "best.json"
        try:
            best = _checked_best(read_json_object(path)) if path.is_file() else None
        except (UserError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}; delete it to use the newest checkpoint instead") from error
        return best if best is not None and self.path(best["step"]).is_dir() else None

    def latest(self) -> Path:
        """Return the newest checkpoint after verifying it."""
        steps = self.steps()
        if not steps:
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        path = self.path(steps[-1])
        # verified before anything is loaded, since half a state is worse than none
        self.check(path)
        return path

    def check(self, path: Path) -> None:
        """Compare a checkpoint with its manifest."""
        damage = self.damage(path)
        if damage is not None:
            raise UserError(self._refusal(path, damage))

    @staticmethod
    def damage(path: Path) -> str | None:
        """Describe the damage of a checkpoint in one line; None if it is intact."""
        try:
            verify(path, needed=[STATE])
        except DamagedError as error:
            return str(error)
        return None

    def set_damaged_aside(self) -> None:
        """Rename all checkpoints newer than the newest intact one, so that resuming starts from the intact one."""
        damaged: list[tuple[Path, str]] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            # the manifest of the first release has no checksums, so state.pt is also opened
            damage = self.damage(path) or _unreadable(path)
            if damage is None:
                break
            damaged.append((path, damage))
        else:
            found = "; ".join(f"{path.name}: {damage}" for path, damage in damaged) or "there is none"
            raise UserError(f"no checkpoint in {self.folder} is intact ({found}); start again in another output_dir")
        for path, damage in damaged:
            aside = path.with_name(f"{DAMAGED_PREFIX}{path.name}")
            # a damaged checkpoint of this step was set aside before
            if aside.exists():
                aside = aside.with_name(f"{aside.name}-{time.strftime('%Y%m%d-%H%M%S')}")
            path.rename(aside)
            LOGGER.warning("checkpoint %s is damaged (%s); it was renamed to %s", path, damage, aside.name)

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """Read the state of a verified checkpoint."""
        try:
            return _read_state(path)
        except DamagedError as error:
            raise UserError(Checkpoints(path.parent)._refusal(path, str(error))) from error

    def remove_partial(self) -> None:
        """Delete leftovers of a killed writer, and restore a checkpoint that it was replacing."""
        for path in self.folder.glob(f"{REPLACED_PREFIX}*"):
            final = path.with_name(path.name.removeprefix(REPLACED_PREFIX))
            # killed between the two renames of `_put`: the old checkpoint gets its name back
            shutil.rmtree(path, ignore_errors=True) if final.exists() else path.rename(final)
        # drafts of single files have such names, too
        for path in (*self.folder.glob(f"{TEMPORARY_PREFIX}*"), *self.folder.glob(".*.partial.*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _put(self, temporary: Path, final: Path) -> None:
        """Move a complete checkpoint to its final name."""
        replaced = final.with_name(f"{REPLACED_PREFIX}{final.name}")
        if final.exists():
            # a folder cannot be renamed onto another, so for an instant the step has no checkpoint; see remove_partial
            final.rename(replaced)
        temporary.rename(final)
        # before the old one is deleted: the new name must survive a power failure
        fsync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)

    def _refusal(self, path: Path, damage: str) -> str:
        older = [self.path(step) for step in reversed(self.steps()) if self.path(step) != path]
        # newest first, and only until one is intact: each check reads a whole checkpoint
        whole = next((other for other in older if self.damage(other) is None), None)
        if whole is None:
            advice = f"no other checkpoint of the run is intact; delete {path.parent.parent} to start again"
        else:
            step = int(whole.name.removeprefix("step-"))
            advice = f"step {step} is intact: add --from-last-good to resume from it, or delete {path}"
        return f"checkpoint {path} is damaged: {damage}; {advice}"


def link_or_copy(source: Path, target: Path) -> None:
    """Link or copy the files of `source` into `target`; links save disk space if the file system supports them."""
    # files one by one, as hard links of folders do not exist
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, place)
        # another file system, or one without hard links
        except OSError:
            shutil.copy2(file, place)


def _write(folder: Path, state: dict[str, Any], write_parts: Callable[[Path], None]) -> None:
    try:
        write_parts(folder)
        torch.save(state, folder / STATE)
        # last: a folder without a manifest counts as damaged
        write_manifest(folder)
    except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a full disk
        raise OSError(f"{type(error).__name__}, as on a full disk: {error}") from error


def _read_state(path: Path) -> dict[str, Any]:
    try:
        # weights_only: a checkpoint from elsewhere must not run code
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch, zipfile and pickle each raise their own
        raise DamagedError(f"{STATE} cannot be read ({type(error).__name__})") from error
    # an intact file of another kind, such as a model's own state.pt
    if not isinstance(state, dict) or "step" not in state:
        raise DamagedError(f"{STATE} does not contain the state of a run")
    return state


def _unreadable(path: Path) -> str | None:
    try:
        _read_state(path)
    except DamagedError as error:
        return str(error)
    return None


def _checked_best(found: dict[str, Any]) -> dict[str, Any]:
    """Validate the content of best.json; raises ValueError if it is not as `mark_best` writes it."""
    kinds = {"step": int, "metric": str, "value": (int, float)}
    for name, kind in kinds.items():
        value = found.get(name)
        # bool is an int in Python, but no step
        if not isinstance(value, kind) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"its {name} is {value!r}")
    if not math.isfinite(found["value"]) or found["step"] < 0:
        raise ValueError(f"its step is {found['step']} and its value {found['value']}")
    return found
