"""JSON Lines files that survive a kill, and what is kept in them: rows of an evaluation, outcomes and samples."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from mmrl.errors import UserError
from mmrl.files import LONGEST_LINE, open_image_file, parse_json, read_file, read_lines, replaced, write_atomically

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


LOGGER = logging.getLogger("mmrl")
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
IMAGE_FIELDS = ("images", "outputs")
_STORED_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("answer", "finish"), (str,)),
    **dict.fromkeys(("reward", "advantage"), (int, float)),
    "correct": (bool,),
    "terms": (dict,),
    **dict.fromkeys(IMAGE_FIELDS, (list,)),
}
WARNINGS_FILE = "warnings.jsonl"
KEPT = "kept"
"""Attribute of log records that `warnings.jsonl` does without: it has them, or the warning that they belong to."""
LEDGER = "ledger.jsonl"
STEP_NAME = re.compile(r"step-(\d+)")
FILM_FRAMES = 32
FILM_SIDE = 256
FILM_RATE = 8
"""Frames per second."""
LARGEST_IMAGE = 2**30
"""Maximum size of an image file in bytes."""
LARGEST_FILM = 180_000_000
"""Number of pixels of an image, or of all frames of a film, above which it is not shown."""


class JsonLines:
    """Append-only file with one JSON object per line.

    Opening an existing file first drops an incomplete last line, which a killed writer may have left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record and flush it; non-finite numbers become null."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # the torn line that a kill left would otherwise swallow the next record
            self._rewrite(lambda _: True)
            # half a surrogate pair becomes \\ud800, which JSON reads back as what it was
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        self._file.write(json.dumps(finite_or_none(record), ensure_ascii=False, allow_nan=False) + "\n")
        # to the system at once: a killed run keeps every record that was logged
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop records of later steps, so that a resumed run writes them once; keep records without a step."""
        # reads the file first, so that a bad step is reported before anything is dropped
        read_steps(self.path)
        self.drop(lambda record: bool(record.get("step", step) > step))

    def drop(self, dropped: Callable[[dict[str, Any]], bool]) -> None:
        """Rewrite the file without the records for which `dropped` is true."""
        self.close()
        self._rewrite(lambda record: not dropped(record))

    def close(self) -> None:
        """Close the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _rewrite(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        if not self.path.exists():
            return
        old = list(read_lines(self.path))
        parsed = [(line, record) for line in old if (record := parsed_line(line)) is not None]
        new = [line.rstrip(b"\n") + b"\n" for line, record in parsed if keep(record)]
        # untouched unless something changes, since a rewrite moves the file under readers
        if new != old:
            self._keep_unreadable(old, len(parsed))
            with replaced(self.path) as draft, draft.open("wb") as file:
                file.writelines(new)

    def _keep_unreadable(self, old: Sequence[bytes], readable: int) -> None:
        """Keep a copy of a file with lines that are not records; a killed writer leaves one such line, the last."""
        # without the text after the last newline, which is the torn line of a kill
        whole = sum(bool(line.strip()) for line in old) - (not old[-1].endswith(b"\n"))
        if whole <= readable:
            return
        copy = self.path.with_name(f"{self.path.name}.unreadable-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copy2(self.path, copy)
        count = whole - readable
        LOGGER.warning("%s has %d lines that cannot be read; the original file is kept as %s", self.path, count, copy)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read all complete records of a JSON Lines file in order; an incomplete line is skipped."""
    return list(iterate_jsonl(path))


def iterate_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of `read_jsonl` one by one."""
    lines = read_lines(path) if path.exists() else ()
    return (record for line in lines if (record := parsed_line(line)) is not None)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the records of a JSON Lines file that have a step."""
    records = [record for record in read_jsonl(path) if "step" in record]
    for record in records:
        step = record["step"]
        # type(), not isinstance: True is an int
        if type(step) is not int or step < 0:
            raise UserError(f"{path}: a line has the step {step!r}; expected an integer; fix or remove that line")
    return records


def finite_or_none(value: Any) -> Any:
    """Copy of a JSON value with non-finite numbers replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    # numbers of NumPy and tensors of one entry
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The record in a line of a JSON Lines file; None if the line is damaged or longer than any written line."""
    if len(line) > LONGEST_LINE:
        return None
    try:
        # replace: a line may hold half a character and be sound otherwise
        record = parse_json(line.decode("utf-8", "replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class ResumableRows:
    """One JSON line per row in `<folder>/<name>-<fingerprint>.jsonl`.

    The fingerprint covers the conditions under which the rows were made, so that rows with other weights or settings
    are never mixed in. The conditions are stored in a `.protocol.json` of the same name. Several processes each write a
    file, and `write` joins them.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any], unsaved: Collection[str] = ()) -> None:
        # of the conditions and not the step: weights and settings decide whether rows can be taken over
        fingerprint = short_digest(json.dumps(conditions, sort_keys=True, default=str).encode())
        self.path = folder / f"{name}-{fingerprint}.jsonl"
        self.images = folder / "images"
        """Folders with the sample images of rows."""
        self.conditions = conditions
        self.unsaved = frozenset(unsaved)

    def read(self) -> list[dict[str, Any]]:
        """Rows of an earlier evaluation from all of its processes."""
        return [row for file in (self.path, *self._parts()) for row in read_jsonl(file)]

    def appender(self, process: int, processes: int) -> JsonLines:
        """The file to which this process appends its rows, in parallel with other processes."""
        # one file a process: lines of several writers could mix
        if processes == 1:
            return JsonLines(self.path)
        return JsonLines(self.path.with_name(f"{self.path.stem}.part-{process:03d}.jsonl"))

    def saved(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Content of a row as written to the file."""
        return {key: value for key, value in row.items() if key not in self.unsaved}

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace all files by a single one with these rows, and write the conditions."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(finite_or_none(self.saved(row)), ensure_ascii=False, allow_nan=False) for row in rows]
        write_atomically(self.path, "".join(line + "\n" for line in lines))
        about = json.dumps(self.conditions, indent=2, default=str)
        write_atomically(self.path.with_suffix(".protocol.json"), about + "\n")
        # after the joined file is written: a kill before loses nothing
        for part in self._parts():
            part.unlink()

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.stem}.part-*.jsonl"))


def short_digest(data: bytes) -> str:
    """First 12 hexadecimal digits of the SHA-256 of the given bytes."""
    return hashlib.sha256(data).hexdigest()[:12]


@dataclass
class Outcome:
    """Scores of one held-out task."""

    id: str
    """The task's id; the same in every evaluation of its split."""
    scores: dict[str, float]
    """Mean score of its samples by metric, such as accuracy/greedy; samples that could not be scored are excluded."""
    parts: dict[str, str] = field(default_factory=dict)
    """Value of each data column by which results are broken down."""


def mean_outcomes(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Join the outcomes of each task: of its repeats and of several protocols."""
    joined: dict[str, Outcome] = {}
    collected: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        joined.setdefault(outcome.id, Outcome(outcome.id, {}, dict(outcome.parts)))
        scores = collected.setdefault(outcome.id, {})
        for name, value in outcome.scores.items():
            # NaN: the sample could not be scored
            if value == value:
                scores.setdefault(name, []).append(value)
    for task, scores in collected.items():
        joined[task].scores = {name: sum(values) / len(values) for name, values in scores.items()}
    return list(joined.values())


def write_outcomes(run_dir: Path, step: int, split: str, outcomes: Sequence[Outcome]) -> Path:
    """Write the outcomes of one evaluation; an earlier file of the same step and split is replaced."""
    path = _path(run_dir, step, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(finite_or_none(vars(outcome)), ensure_ascii=False, allow_nan=False) for outcome in outcomes)
    write_atomically(path, "".join(f"{line}\n" for line in lines))
    return path


def read_outcomes(run_dir: Path, step: int, split: str) -> dict[str, Outcome]:
    """Read the outcomes of one evaluation: of a run, or from the ledger of `mmrl evaluate`."""
    path = _path(run_dir, step, split)
    # an evaluation by `mmrl evaluate` has a ledger and no outcomes
    if not path.is_file():
        rows = ({**row, "id": row.get("state")} for row in iterate_jsonl(Path(run_dir) / LEDGER))
        own = [row for row in rows if (row.get("step"), row.get("split")) == (step, split)]
        found = mean_outcomes(_outcome(row) for row in own if isinstance(row["id"], str))
        return {outcome.id: outcome for outcome in found}
    return {row["id"]: _outcome(row) for row in read_jsonl(path) if isinstance(row.get("id"), str)}


def _outcome(row: Mapping[str, object]) -> Outcome:
    scores, parts = row.get("scores"), row.get("parts")
    return Outcome(
        id=str(row["id"]),
        # a file may have been edited, so only numbers are taken
        scores={name: float(value) for name, value in scores.items() if isinstance(value, int | float)}
        if isinstance(scores, dict)
        else {},
        parts={name: str(value) for name, value in parts.items()} if isinstance(parts, dict) else {},
    )


def _path(run_dir: Path, step: int, split: str) -> Path:
    return Path(run_dir) / "outcomes" / f"step-{step:06d}" / f"{split.replace('/', '.')}.jsonl"


@dataclass
class SampleRecord:
    """One response to one task, with everything needed to inspect it."""

    id: str
    """Task of the sample; shared by the samples of a group."""
    prompt: str
    """The prompt as the model saw it."""
    response: str
    """The sampled text."""
    answer: str | None = None
    """The reference answer."""
    images: list[Image] = field(default_factory=list)
    """The prompt's images."""
    outputs: list[Image] = field(default_factory=list)
    """Images generated for the prompt; a `film` is an animated image."""
    reward: float | None = None
    """Total reward; None if it could not be scored or does not exist."""
    terms: dict[str, float] = field(default_factory=dict)
    """Each reward term before weighting."""
    advantage: float | None = None
    """Advantage of the sample; the mean over its decisions if they differ."""
    finish: str | None = None
    """Reason why the response ended: "eos", "stop" or "length"."""
    correct: bool | None = None
    """Whether the evaluation counted the answer as correct."""


def film(frames: np.ndarray) -> Image:
    """A video as an animated image for browsers; a single frame becomes an ordinary image.

    Args:
        frames: uint8 (K, height, width, 3). Of more than 32, so many evenly spaced ones are kept, and frames larger
            than 256 pixels are reduced; they play at 8 a second.
    """
    from PIL import Image

    if len(frames) == 1:
        return Image.fromarray(frames[0])
    count = min(len(frames), FILM_FRAMES)
    # the first and the last frame are always among them
    kept = [Image.fromarray(frames[index * (len(frames) - 1) // (count - 1)]) for index in range(count)]
    for frame in kept:
        if max(frame.size) > FILM_SIDE:
            frame.thumbnail((FILM_SIDE, FILM_SIDE))
    data = io.BytesIO()
    _save_png(kept, data)
    return open_image_file(data)


def film_frames(image: Image) -> list[Image]:
    """The frames of a film, each shown for 1/8 second; a still image has a single frame."""
    frames: list[Image] = []
    count = getattr(image, "n_frames", 1) if image.format == "PNG" else 1
    for index in range(count if count > 1 else 0):
        # `film` keeps no more; a file from elsewhere may hold any number
        if len(frames) >= FILM_FRAMES:
            break
        image.seek(index)
        # frames like the one before are stored as its longer duration
        repeats = max(1.0, min(float(image.info.get("duration", 0)) * FILM_RATE / 1000, FILM_FRAMES))
        frames += [image.copy()] * round(repeats)
    if count > 1:
        image.seek(0)
    return frames[:FILM_FRAMES] or [image.copy()]


def write_samples(run_dir: Path, step: int, split: str, records: Sequence[SampleRecord]) -> Path:
    """Write the samples of one step; an earlier file of the same step and split is replaced."""
    folder = Path(run_dir) / "samples" / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    # by identity: samples of one task share their image objects
    names: dict[int, str] = {}
    rows = [store_record(folder, record, names) for record in records]
    lines = [json.dumps(finite_or_none(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    path = folder / f"{split}.jsonl"
    write_atomically(path, "".join(lines))
    return path


def read_samples(run_dir: Path, step: int, split: str) -> list[SampleRecord]:
    """Read the samples of one step."""
    folder = Path(run_dir) / "samples" / f"step-{step:06d}"
    images: dict[str, Image | None] = {}
    rows = read_jsonl(folder / f"{split}.jsonl")
    # rows of another kind, such as an edited line, are skipped
    return [load_record(folder, row, images) for row in rows if _is_record(row)]


def store_record(folder: Path, record: SampleRecord, names: dict[int, str] | None = None) -> dict[str, Any]:
    """Write a sample's images as PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {} if names is None else names
    for image in (*record.images, *record.outputs):
        if id(image) not in names:
            names[id(image)] = _store_image(folder, image)
    return {**vars(record), **{key: [names[id(image)] for image in getattr(record, key)] for key in IMAGE_FIELDS}}


def load_record(folder: Path, row: dict[str, Any], images: dict[str, Image | None] | None = None) -> SampleRecord:
    """Read a record that `store_record` returned."""
    images = {} if images is None else images
    fields: dict[str, Any] = {key: value for key, value in row.items() if key in SampleRecord.__dataclass_fields__}
    for key in IMAGE_FIELDS:
        names = row.get(key) or []
        # the name only: a path in the file must not lead out of the folder
        images |= {name: _load_image(folder / Path(name).name) for name in names if name not in images}
        fields[key] = [image for name in names if (image := images[name]) is not None]
    fields["terms"] = {name: math.nan if value is None else value for name, value in (row.get("terms") or {}).items()}
    return SampleRecord(**{"id": "", "prompt": "", "response": "", **fields})


def read_warnings(run_dir: Path) -> list[str]:
    """Warnings of a run in order; warnings of the same kind are listed once, with their count."""
    kinds: dict[str, list[str]] = {}
    for row in read_jsonl(Path(run_dir) / WARNINGS_FILE):
        if "message" in row:
            kinds.setdefault(str(row.get("form", row["message"])), []).append(str(row["message"]))
    more = ((found[0], len(found) - 1) for found in kinds.values())
    return [f"{first} (and {count} more of this kind)" if count else first for first, count in more]


class LoggedWarnings(logging.Handler):
    """Collects the warnings logged during a run for its report; those of `RunWarnings` are collected already."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._early: list[dict[str, Any]] = []
        self._folder: Path | None = None
        self._step: Callable[[], int] = lambda: 0

    def __enter__(self) -> Self:
        logging.getLogger("mmrl").addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("mmrl").removeHandler(self)

    def write_to(self, folder: Path, step: Callable[[], int] = lambda: 0, *, keep: bool = False) -> None:
        """Write the warnings so far, and later ones as they are logged, with the current step.

        `keep` adds to the warnings that the folder holds; else these are of something that came before, and go.
        """
        self._folder, self._step = folder, step
        if not keep:
            (folder / WARNINGS_FILE).unlink(missing_ok=True)
        for row in self._early:
            self._write(row)

    def emit(self, record: logging.LogRecord) -> None:
        """Collect a warning."""
        if getattr(record, KEPT, False):
            return
        # `form`: the message before values are filled in, by which those of one kind are counted together
        message, form = record.getMessage(), str(record.msg)
        form = form if form.strip("%s:;, ") else message  # nothing but values
        row = {"step": self._step(), "kind": "logged", "message": message, "form": form}
        if self._folder is None:
            self._early.append(row)
            return
        # a full disk must not end the run; the console shows the warning
        with suppress(OSError, UserError):
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        assert self._folder is not None
        lines = JsonLines(self._folder / WARNINGS_FILE)
        lines.append(row)
        lines.close()


def sample_steps(run_dir: Path, split: str) -> list[int]:
    """Steps with samples of a split ("train" or "eval"), in ascending order."""
    folders = (Path(run_dir) / "samples").glob("step-*")
    matches = [(STEP_NAME.fullmatch(folder.name), folder) for folder in folders]
    return sorted(int(match[1]) for match, folder in matches if match and (folder / f"{split}.jsonl").exists())


def _is_record(row: dict[str, Any]) -> bool:
    """Whether every field of a row has a type that `write_samples` writes."""
    if not all(isinstance(row.get(name, ""), str) for name in ("id", "prompt", "response")):
        return False
    if not all(isinstance(row.get(name), (*kinds, type(None))) for name, kinds in _STORED_TYPES.items()):
        return False
    numbers, files = (row.get("terms") or {}).values(), [name for key in IMAGE_FIELDS for name in row.get(key) or []]
    return all(isinstance(value, int | float | None) for value in numbers) and all(isinstance(f, str) for f in files)


def _store_image(folder: Path, image: Image) -> str:
    frames = film_frames(image)
    # by pixels, so that the same image is stored once for all samples and steps
    pixels = b"".join(frame.tobytes() for frame in frames)
    path = folder / f"{hashlib.sha256(f'{image.mode}{image.size}'.encode() + pixels).hexdigest()[:16]}.png"
    if not path.exists():
        # modes that PNG lacks, such as CMYK, are converted
        storable = [frame if frame.mode in _PNG_MODES else frame.convert("RGB") for frame in frames]
        with replaced(path) as draft:
            _save_png(storable, draft)
    return path.name


def _save_png(frames: Sequence[Image], file: Path | io.BytesIO) -> None:
    if len(frames) == 1:
        frames[0].save(file, format="PNG")
    else:
        frames[0].save(file, format="PNG", save_all=True, append_images=frames[1:], duration=1000 / FILM_RATE, loop=0)


def _load_image(path: Path) -> Image | None:
    try:
        # from memory, so that the file can be replaced while the image is in use
        image = open_image_file(io.BytesIO(read_file(path, LARGEST_IMAGE)), ["PNG"])
        frames = film_frames(image) if getattr(image, "n_frames", 1) * image.width * image.height < LARGEST_FILM else []
        return image if len(frames) > 1 else frames[0] if frames else None
    except Exception:  # Pillow's decoders raise OSError, SyntaxError, struct.error, DecompressionBombError, ...
        return None
