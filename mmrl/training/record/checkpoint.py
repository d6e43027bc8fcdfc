"""Checkpoints: written to a temporary folder, renamed when whole, listed with sizes so that damage is noticed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from mmrl.errors import UserError

__all__ = ["Checkpoints", "link_or_copy"]

MANIFEST = "manifest.json"
STATE = "state.pt"
TEMPORARY_PREFIX = ".partial-"


class Checkpoints:
    """The checkpoint folder of one run.

    Layout of `step-000100/`: `model/` (loads with from_pretrained), `reference/` when the run has its own copy,
    `state.pt` (optimiser, counters, task position, every RNG, recipe state), `manifest.json` (file sizes).

    Args:
        folder: `checkpoints` of the run.
        keep: newest checkpoints kept beside the best one; 0 = all.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, step: int, state: dict[str, Any], write_parts: Callable[[Path], None]) -> Path:
        """Write one checkpoint; readers see either all of it or nothing.

        Args:
            step: rollout steps done.
            state: tensors and plain Python values.
            write_parts: writes `model/` and other folders into the directory that it is given.

        Returns:
            The checkpoint folder.

        Raises:
            OSError: the disk is full or not writable; what was partly written is removed, older checkpoints stay.
        """
        final = self.path(step)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{final.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            _write(temporary, state, write_parts)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._forget_old()
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
        """Remember which checkpoint is the best so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"step": step, "metric": metric, "value": value})
        temporary = self.folder / f"{TEMPORARY_PREFIX}best.json"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.folder / "best.json")

    def best(self) -> dict[str, Any] | None:
        """What `mark_best` wrote last; None without one, or where that checkpoint has been deleted."""
        path = self.folder / "best.json"
        try:
            best = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}; delete it, the newest checkpoint then counts") from error
        return best if best is not None and self.path(int(best["step"])).is_dir() else None

    def latest(self) -> Path:
        """The newest checkpoint, checked to be whole.

        Raises:
            UserError: there is none, or the newest one is damaged.
        """
        steps = self.steps()
        if not steps:
            raise UserError(f"nothing to resume: no checkpoint in {self.folder}")
        path = self.path(steps[-1])
        self.check(path)
        return path

    def check(self, path: Path) -> None:
        """Compare a checkpoint with its manifest.

        Raises:
            UserError: a file is missing or has another size; names it and what to do.
        """
        older = [step for step in self.steps() if self.path(step) != path]
        advice = f"delete {path} to resume from step {older[-1]}" if older else f"delete {path} and start again"
        manifest = path / MANIFEST
        if not manifest.is_file():
            raise UserError(f"checkpoint {path} is damaged: {MANIFEST} is missing; {advice}")
        try:
            sizes = json.loads(manifest.read_text(encoding="utf-8"))
            if STATE not in sizes:
                raise ValueError(f"it does not list {STATE}")
        except (TypeError, ValueError) as error:
            raise UserError(f"checkpoint {path} is damaged: {MANIFEST} cannot be read; {advice}") from error
        for name, size in sizes.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise UserError(f"checkpoint {path} is damaged: {name} {state}; {advice}")

    @staticmethod
    def load_state(path: Path) -> dict[str, Any]:
        """Read the state of a checked checkpoint.

        Raises:
            UserError: the file has the right size but cannot be read.
        """
        try:
            return torch.load(path / STATE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:  # torch, zipfile and pickle each raise their own
            raise UserError(
                f"checkpoint {path} is damaged: {STATE} cannot be read ({type(error).__name__}); delete {path} to "
                "resume from the one before it"
            ) from error

    def remove_partial(self) -> None:
        """Delete what a killed writer left behind."""
        for path in self.folder.glob(f"{TEMPORARY_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _forget_old(self) -> None:
        best = self.best()
        protected = set(self.steps()[-self.keep :] if self.keep else self.steps())
        if best is not None:
            protected.add(int(best["step"]))
        for step in set(self.steps()) - protected:
            shutil.rmtree(self.path(step), ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` hold the files of `source` without using disk space twice where the file system allows it.

    Args:
        source: folder with files that are never changed in place.
        target: folder to create.
    """
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, place)
        except OSError:
            shutil.copy2(file, place)


def _write(folder: Path, state: dict[str, Any], write_parts: Callable[[Path], None]) -> None:
    try:
        write_parts(folder)
        torch.save(state, folder / STATE)
        _write_manifest(folder)
    except (RuntimeError, SafetensorError) as error:  # what torch and safetensors make of a full disk
        raise OSError(f"{type(error).__name__}, as on a full disk: {error}") from error


def _write_manifest(folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    for path in files:
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
