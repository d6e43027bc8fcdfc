"""Atomic writes, and checks of paths that never raise."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mmrl.errors import UserError

DRAFT = re.compile(r"\..*\.(\d+)\.partial(\..*)?", re.DOTALL)
"""Names that `replaced` writes to, with the number of the process."""
INSTALLED = Path(__file__).resolve().with_name("configs")
CONFIGS = INSTALLED if INSTALLED.is_dir() else INSTALLED.parents[1] / "configs"
"""Configurations of the suite: inside the package of an installed wheel, at the root of a checkout."""
LONGEST_NAME = 255
"""Bytes of the name of a file or folder."""
LARGEST_JSON = 64 * 2**20
"""Bytes of a file of settings."""


def without_scheme(path: str) -> str:
    """The path of a file:// address, whose special characters are written as %20 and the like; others as they are."""
    if not path.startswith("file://"):
        return path
    plain = path.removeprefix("file://").removeprefix("localhost")
    return plain if os.path.exists(plain) else unquote(plain)


def own_config(path: Path) -> Path:
    """A path as it is, but the suite's own file where `configs/...` is not in the working folder."""
    own = CONFIGS.joinpath(*path.parts[1:])
    return own if path.parts[:1] == ("configs",) and not path.exists() and own.exists() else path


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of settings, which a user may have edited."""
    if not is_file(path):
        raise UserError(f"there is no file {path}")
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise UserError(f"{path} has {size} bytes; no such file of settings is that large")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read, it is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold an object, it holds a {type(content).__name__}")
    return content


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Put a file or folder in place at once, so that a reader or a kill never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem[:200]}.{os.getpid()}.partial{path.suffix}")  # as in DRAFT
    _remove(draft)
    try:
        yield draft
        follow_umask(draft)
        if draft.is_dir() and path.is_dir():
            _move_into(draft, path)
        else:
            os.replace(draft, path)
    finally:
        _remove(draft)


def follow_umask(path: Path) -> None:
    """Give a file, or those of a folder, that only their owner may read the permissions of an ordinary new file.

    safetensors makes weights readable by their owner only, regardless of the umask.
    """
    files = [path, *(path.rglob("*") if path.is_dir() else ())]
    private = [file for file in files if file.is_file() and stat.S_IMODE(file.lstat().st_mode) == 0o600]
    if private:
        probe = path / ".mode" if path.is_dir() else path.with_name(f"{path.name}.mode")
        probe.touch()
        for file in private:
            file.chmod(probe.stat().st_mode)
        probe.unlink()


def remove_drafts(folder: Path) -> None:
    """Remove unfinished drafts that killed processes left of `replaced`, in a folder and its subfolders."""
    for path in sorted(folder.rglob(".*.partial*")):
        found = DRAFT.fullmatch(path.name)
        if found is not None and not _is_another(int(found[1])):
            _remove(path)


def _is_another(pid: int) -> bool:
    """Whether another process has this id."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def expanded(path: Path | str) -> Path:
    """A path with `~` as the home folder; one of a user who does not exist stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_file(path: Path | str) -> bool:
    """Whether the file exists; False also for an invalid path: too long, with a NUL or half a character."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def output_folder(path: Path | str, what: str = "") -> Path:
    """The path of a folder to write to, which need not exist; `what` names the option in messages.

    Raises:
        UserError: what stands in its way.
    """
    return _checked_output(Path(path), f"{what} " if what else "", folder=True)


def output_file(path: Path | str) -> Path:
    """The path of a file to write; raises UserError with what stands in its way."""
    return _checked_output(Path(path), "", folder=False)


def _checked_output(path: Path, what: str, *, folder: bool) -> Path:
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > LONGEST_NAME:
        raise UserError(f"{what}{path} has a name of {longest} bytes; file systems allow {LONGEST_NAME}")
    try:
        for place in (path, *path.absolute().parents):
            if place.is_symlink() and not place.exists():
                raise UserError(f"{what}{path}: {place} is a link to {os.readlink(place)}, which does not exist")
            if place.exists():
                break
        if (folder or place != path) and not place.is_dir():
            raise UserError(f"{what}{path}: {place} is not a folder; choose another path")
        if not folder and place == path and not path.is_file():
            raise UserError(f"{what}{path} is {'a folder' if path.is_dir() else 'no file'}; choose another path")
        if not os.access(place, os.W_OK):
            raise UserError(f"{what}{path}: {place} cannot be written; choose another path")
    except OSError as error:  # such as a path that is too long as a whole
        raise UserError(f"{what}{path}: {error.strerror}; choose another path") from error
    return path


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a surrogate pair would raise


def _move_into(folder: Path, target: Path) -> None:
    for file in sorted(folder.rglob("*")):
        place = target / file.relative_to(folder)
        if file.is_dir():
            place.mkdir(exist_ok=True)
        else:
            os.replace(file, place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
