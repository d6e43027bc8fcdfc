"""Read files that someone else may have written within limits, and write the suite's own files atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote

from mmrl.errors import UserError

if TYPE_CHECKING:
    from io import BufferedReader

    from PIL import Image

DRAFT = re.compile(r"\..*\.(\d+)\.partial(\..*)?", re.DOTALL)
"""Temporary names that `replaced` writes to; they contain the process id."""
INSTALLED = Path(__file__).resolve().with_name("configs")
CONFIGS = INSTALLED if INSTALLED.is_dir() else INSTALLED.parents[1] / "configs"
"""Configurations of the suite: inside the package of an installed wheel, at the root of a checkout."""
LONGEST_NAME = 255
"""Maximum length of the name of a file or folder, in bytes."""
LARGEST_TEXT = 64 * 2**20
"""Maximum size of a file that is read as a whole, such as settings or a log, in bytes."""
LARGEST_YAML = 2**21
LARGEST_LINES = 2**30
"""Maximum size of a JSON Lines file of a run, in bytes."""
LONGEST_LINE = 32_000_000
"""Maximum length of a line of a JSON Lines file, in bytes; a longer one is damaged, or contains images that belong in
files."""
READ_WHOLE, READ_END = 2**26, 2**20
"""Maximum size of files that digests read completely, and how much of each end of larger files, in bytes."""
DEEPEST = 100
"""Maximum nesting depth of JSON or YAML."""
MOST_DIGITS = 300
MOST_NODES = 100_000
"""Maximum number of keys and values of a YAML file, counting repetitions by aliases, and one more for each 64
characters of a text."""

LONGEST_LABEL = 100
"""Maximum length in bytes of a name that file names are built from; file systems limit these to 255."""
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Image formats by their Pillow names. Other decoders of Pillow, some of which start programs, never see a file."""


def without_scheme(path: str) -> str:
    """The path of a file:// URL with percent-encoding decoded; other paths stay as they are."""
    if not path.startswith("file://"):
        return path
    plain = path.removeprefix("file://").removeprefix("localhost")
    return plain if os.path.exists(plain) else unquote(plain)


def label_problem(name: str) -> str:
    """Reason why a name cannot be part of a file name; empty if it can."""
    if not name.strip() or name.startswith("."):
        return "it must not be empty or begin with a dot"
    if found := re.search(r"[/\\\x00-\x1f\x7f\ud800-\udfff]", name):
        return f"it must not contain {found[0]!a}"
    length = len(os.fsencode(name))
    return f"it has {length} bytes; at most {LONGEST_LABEL} are allowed" if length > LONGEST_LABEL else ""


def shortened_name(name: str, most: int = LONGEST_LABEL) -> str:
    """Part of a file name with at most `most` bytes; a longer one is cut and ends in a digest of the whole name."""
    content = name.encode("utf-8", "surrogatepass")
    if len(content) <= most:
        return name
    return f"{content[: most - 9].decode('utf-8', 'ignore')}-{hashlib.sha256(content).hexdigest()[:8]}"


def own_config(path: Path) -> Path:
    """The path itself, or the suite's own file if `configs/...` does not exist in the working folder."""
    own = CONFIGS.joinpath(*path.parts[1:])
    return own if path.parts[:1] == ("configs",) and not path.exists() and own.exists() else path


def open_file(path: Path | str, most: int | None = None) -> BufferedReader:
    """Open a file for reading, in binary mode.

    Args:
        path: of a regular file; pipes, devices and sockets, which may never end, are refused.
        most: largest size in bytes; None for any.

    Raises:
        UserError: it is no regular file, or larger.
        OSError: it is missing or cannot be read.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is {_kind_of(found.st_mode)}, not a file")
    if most is not None and found.st_size > most:
        raise UserError(f"{path} has {found.st_size} bytes; at most {most} are allowed")
    # a pipe that takes the file's place between the two calls must not block
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0)))


def _kind_of(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a device")


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Name a file whose content cannot be read; the system's error does not, other than where a file is opened."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def read_file(path: Path | str, most: int = LARGEST_TEXT) -> bytes:
    """Read a file of at most `most` bytes; raises UserError and OSError like `open_file`."""
    with open_file(path, most) as file, _reading(path):
        # files of /proc and those that still grow are longer than their size says; read(most) would take it all at once
        parts, size = [], 0
        while size <= most and (part := file.read(min(2**20, most + 1 - size))):
            parts.append(part)
            size += len(part)
    if size > most:
        raise UserError(f"{path} has more than {most} bytes, which is the limit")
    return b"".join(parts)


def read_text(path: Path | str, most: int = LARGEST_TEXT, errors: str = "strict") -> str:
    """Read a UTF-8 file of at most `most` bytes, with Unix line ends; raises the same errors as `open_file`."""
    try:
        text = read_file(path, most).decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_sample(path: Path) -> bytes | list[Any]:
    """Content of a file for a digest; of a large one, such as a long video, the size and both ends."""
    size = path.stat().st_size
    if size <= READ_WHOLE:
        return path.read_bytes()
    with path.open("rb") as file:
        first = file.read(READ_END)
        file.seek(-READ_END, 2)
        return [size, first, file.read(READ_END)]


def read_lines(path: Path | str, most: int | None = LARGEST_LINES, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Lines of a file; a line with more than `longest` bytes is cut to `longest` + 1 bytes."""
    with open_file(path, most) as file, _reading(path):
        while line := file.readline(longest + 1):
            yield line
            while len(line) > longest and not line.endswith(b"\n"):
                if not (rest := file.readline(2**20)) or rest.endswith(b"\n"):
                    break


def last_line(path: Path | str) -> str:
    """The last non-empty line of a log; a sentence if there is none."""
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 2**16))
            lines = file.read(2**16).decode("utf-8", "replace").splitlines()
    except (OSError, UserError) as error:
        return f"it cannot be read ({error})"
    return next((line.strip() for line in reversed(lines) if line.strip()), "it is empty")


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON, with options of `json.JSONDecoder`; raises ValueError, also for content nested too deeply."""
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        # one decoder for all lines of a file: json.loads would make one for each
        content = (json.JSONDecoder(parse_int=_whole_number, **options) if options else DECODER).decode(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from None
    # counted first: almost no text has so many brackets, and a walk takes longer
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(content):
        raise ValueError(f"it is nested more than {DEEPEST} levels deep")
    return content


def _whole_number(text: str) -> int:
    """A whole number that a float can be made of, which is no limit for what the suite writes."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"it contains a number with {len(text)} digits")
    return int(text)


DECODER = json.JSONDecoder(parse_int=_whole_number)


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(DEEPEST + 1):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [each for part in parts for each in (part.values() if isinstance(part, dict) else part)]
    return bool(level)


def read_json_object(path: Path, **options: Any) -> dict[str, Any]:
    """Read a JSON settings file that a user may have edited, with options of `json.JSONDecoder`."""
    if not os.path.exists(path):
        raise UserError(f"file not found: {path}")
    try:
        content = parse_json(read_file(path), **options)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must contain a JSON object, but it contains a {type(content).__name__}")
    return content


def read_yaml_text(path: Path | str) -> str:
    """Text of a YAML file that can be parsed within bounds.

    Raises:
        UserError: the file is no regular file, too large, not YAML, nested too deeply, or grows with its aliases.
        OSError: it is missing or cannot be read.
    """
    text = read_text(path, LARGEST_YAML)
    check_yaml(text, path)
    return text


def read_yaml(path: Path | str, errors: str = "strict") -> Any:
    """Plain content of a YAML file; raises UserError and OSError like `read_yaml_text`."""
    return parse_yaml(read_text(path, LARGEST_YAML, errors), path)


def parse_yaml(text: str, place: Path | str) -> Any:
    """Plain content of YAML that `check_yaml` accepts, read from `place`; raises UserError."""
    import yaml

    check_yaml(text, place)
    # in C where there is one: a comparison has many files
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        return loader.get_single_data()
    # a date such as 2024-99-99 is Python's own error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


def check_yaml(text: str, place: Path | str) -> None:
    """Reject text that is not YAML, or whose content is too large once its aliases are expanded."""
    import yaml

    try:
        problem = _yaml_problem(text)
    except yaml.YAMLError as error:
        raise UserError(f"{place} is not valid YAML: {' '.join(str(error).split())}") from error
    if problem:
        raise UserError(f"{place} cannot be read: {problem}")


def _yaml_problem(text: str) -> str:
    """Reason why YAML is not parsed, empty if there is none; reads its events, so that nothing is expanded."""
    import yaml

    count, sizes, parents = 0, {}, []
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent):
            parents.append((event.anchor, count))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = parents.pop()
            sizes[anchor] = count - before
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in parents):
                return f"the anchor &{event.anchor} contains an alias of itself"
            count += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            # a long text counts as several, or many aliases of it would grow unnoticed
            sizes[event.anchor] = len(event.value) // 64
            count += sizes[event.anchor]
        count += isinstance(event, yaml.NodeEvent)
        if count > MOST_NODES:
            return f"it has more than {MOST_NODES} keys and values, counting those repeated by aliases"
        if len(parents) > DEEPEST:
            return f"it is nested more than {DEEPEST} levels deep"
    return ""


def open_image_file(source: BinaryIO, formats: Sequence[str] = IMAGE_FORMATS) -> Image.Image:
    """Read the header of an image; its pixels are read when they are needed.

    Args:
        source: the file or its content.
        formats: allowed ones, as Pillow names them.

    Raises:
        OSError: the image has another format, which the message names if it is known.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(source, formats=tuple(formats))
    except UnidentifiedImageError:
        source.seek(0)
        start = source.read(16)
    Image.init()
    # these look at the first bytes alone; formats without such a mark cannot be named
    known = (name for name, (_, accepts) in Image.OPEN.items() if accepts and accepts(start))
    name = next((name for name in known if name not in formats), None)
    problem = "it is damaged or not an image" if name is None else f"it is a {name} image"
    raise UnidentifiedImageError(f"{problem}; allowed formats are {', '.join(formats)}")


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Put a file or folder in place atomically, so that neither a reader nor a kill leaves a partial one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{shortened_name(path.stem, 200)}.{os.getpid()}.partial{path.suffix}")  # as in DRAFT
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
    """Give a file (or the files of a folder) readable only by its owner the permissions of an ordinary new file.

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


def remove_drafts(folder: Path, name: str = "") -> None:
    """Remove the drafts that `replaced` left in a folder and its subfolders when a process was killed.

    `name` removes those of one entry of the folder alone, where the folder is somebody else's.
    """
    for path in sorted(folder.glob(f".{escape(name)}.*.partial*") if name else folder.rglob(".*.partial*")):
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
    """A path with `~` expanded; if the user does not exist, it stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def written_by_run(path: Path | str) -> str:
    """Advice about a missing folder if it looks like one that a run writes; empty otherwise."""
    place = Path(path).as_posix()
    return "; a run writes it: train its configuration first" if re.search(r"^runs/|checkpoints/step-", place) else ""


def is_file(path: Path | str) -> bool:
    """Whether the file exists; False also for an invalid path: too long, with a NUL or half a character."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def output_folder(path: Path | str, what: str = "") -> Path:
    """The path of a folder to write to, which need not exist; `what` is the name of the option in messages.

    Raises:
        UserError: the file or folder that prevents it.
    """
    return _checked_output(Path(path), f"{what} " if what else "", folder=True)


def output_file(path: Path | str) -> Path:
    """The path of a file to write; raises UserError with the reason if it cannot be written."""
    return _checked_output(Path(path), "", folder=False)


def _checked_output(path: Path, what: str, *, folder: bool) -> Path:
    longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    if longest > LONGEST_NAME:
        raise UserError(f"{what}{path} has a name of {longest} bytes; file systems allow at most {LONGEST_NAME}")
    try:
        for place in (path, *path.absolute().parents):
            if place.is_symlink() and not place.exists():
                raise UserError(f"{what}{path}: {place} is a link to {os.readlink(place)}, which does not exist")
            if place.exists():
                break
        if (folder or place != path) and not place.is_dir():
            raise UserError(f"{what}{path}: {place} is not a folder; choose another path")
        if not folder and place == path and not path.is_file():
            raise UserError(
                f"{what}{path} is {'a folder' if path.is_dir() else 'not a regular file'}; choose another path"
            )
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
