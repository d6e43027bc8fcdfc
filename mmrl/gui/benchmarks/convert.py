"""Other projects' files of screens and steps as rows of this suite, with targets in pixels of the stored image.

What the numbers of a file mean is declared by the source and never guessed; every row and the whole file are checked
against it. Rows that contradict it are errors, and then nothing is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl.agents.environments.action_formats import UnreadableError
from mmrl.agents.environments.peer_formats import read_ui_tars
from mmrl.errors import UserError
from mmrl.files import expanded, open_image_file
from mmrl.gui.benchmarks.annotations import Cells, RowError, cell_of, number_cells, shortened, size_cell, text_cell
from mmrl.gui.benchmarks.benchmark_copies import ImageFolder
from mmrl.gui.grounding.conventions import BoxForm, FormedBox, corners, fit_convention, fits
from mmrl.gui.grounding.coords import Box, Size
from mmrl.gui.grounding.samples import TARGET_COLUMNS, NoTarget, Spot, Target, sample_target
from mmrl.gui.grounding.step_rewards import CLICK, TEXTED
from mmrl.hub.tables import read_rows
from mmrl.rewards.answers import chat_text

OWN_COLUMNS = ("id", "image", "instruction", "original_wh", "radius", "action", "input_text", *TARGET_COLUMNS)
"""Columns that conversion writes."""
LISTED = 5
"""Rows in an error message."""
INSTRUCTION_MARK = "## User Instruction"
"""Heading of the task in UI-TARS's prompts."""


class ContradictionError(Exception):
    """Numbers that do not mean what the source says; the message states both."""


@dataclass(frozen=True)
class SourceRow:
    """One instruction of a file, its numbers as they are written."""

    image: Any
    """Path, or a stored image."""
    instruction: str
    numbers: Sequence[float] = ()
    """Two of a point or four of a box; empty for a step without a place."""
    size: Size | None = None
    """(width, height) of the image according to the row."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Action, text and other columns."""


@dataclass(frozen=True)
class Source:
    """One kind of file."""

    read: Callable[[Cells], list[SourceRow]]
    """The instructions in a row; raises RowError."""
    form: BoxForm
    """Meaning of four numbers; corners or sizes, whatever their unit."""
    extent: int | None
    """Width and height of an image in the unit of the file: 1 or 1000; None if the numbers are pixels."""
    summary: str
    """Columns and meaning of the numbers, in one line."""

    @property
    def unit(self) -> str:
        """Unit of the numbers, for messages."""
        return UNITS[self.extent]

    def target(self, numbers: Sequence[float], size: Size, radius: float) -> Target:
        """The target in pixels of the image; `radius` in pixels is that of points."""
        if not numbers:
            return NoTarget()
        self._check(numbers, size)
        wide, high = (1.0, 1.0) if self.extent is None else (size[0] / self.extent, size[1] / self.extent)
        if len(numbers) == 2:
            return Spot((numbers[0] * wide, numbers[1] * high), radius)
        x1, y1, x2, y2 = corners(numbers, self.form)
        return Box(x1 * wide, y1 * high, x2 * wide, y2 * high)

    def _check(self, numbers: Sequence[float], size: Size) -> None:
        """Reject numbers that cannot be in the unit of the file."""
        fractions = max(map(abs, numbers)) <= 1 and any(number % 1 for number in numbers)
        if self.extent != 1 and fractions:
            raise ContradictionError(f"{shortened(list(numbers))} are fractions, not {self.unit}")
        if self.extent is not None and not all(0 <= number <= self.extent for number in numbers):
            raise ContradictionError(f"{shortened(list(numbers))} are not {self.unit}, which are 0 to {self.extent}")
        if self.extent is None and len(numbers) == 2 and not Box(0, 0, *size).contains((numbers[0], numbers[1])):
            raise ContradictionError(
                f"the point {shortened(list(numbers))} is outside the image of {_shown(size)} pixels"
            )


@dataclass
class Conversion:
    """Result of a conversion."""

    rows: int = 0
    """Written rows."""
    without_target: int = 0
    """Written rows of steps without a place, such as typing."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Place and reason of rows that were left out."""
    convention: str = ""
    """Test of the boxes of the whole file; empty without boxes."""


def convert(
    path: str | Path,
    out: str | Path,
    source: str,
    *,
    images: str | Path | None = None,
    radius: float = 0.0,
    skip_bad_rows: bool = False,
) -> Conversion:
    """Convert a file of another project.

    Args:
        path: .json, .jsonl or .parquet file.
        out: .jsonl file to write. Images that the file contains are written to a folder next to it; others stay where
            they are.
        source: row of `SOURCES`, which declares what the numbers of the file mean.
        images: folder of the images; default: the folder of the file.
        radius: of targets that are points, as a fraction of the image's diagonal; 0 writes none.
        skip_bad_rows: leave out rows that cannot be read. Numbers that contradict the source are errors anyway.

    Returns:
        Number of rows and what was left out.

    Raises:
        UserError: there is no such file or source, the output exists, or rows contradict the source, each named.
    """
    if source not in SOURCES:
        raise UserError(f"unknown source {source!r}; expected one of {', '.join(SOURCES)}")
    if not 0 <= radius < math.inf:
        raise UserError(f"the radius is {radius:g}; expected a fraction of the diagonal, such as 0.05")
    file, target = expanded(path), expanded(out)
    if target.suffix != ".jsonl":
        raise UserError(f"rows are written to a .jsonl file; got {target}")
    if target.exists():
        raise UserError(f"{target} already exists; choose another name, or remove it")
    folders = [file.parent] if images is None else [expanded(images)]
    if not folders[0].is_dir():
        raise UserError(f"the image folder {folders[0]} does not exist")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.parent) as scratch:
        writer = _Writer(target, Path(scratch))
        result = _Reading(SOURCES[source], source, file, ImageFolder(folders), radius, writer).run(skip_bad_rows)
        writer.finish()
    return result


class _Writer:
    """Rows and stored images of a conversion, moved into place when they are complete."""

    def __init__(self, target: Path, scratch: Path) -> None:
        self.target = target
        self.images = scratch / "images"
        self.images.mkdir()
        self.rows = scratch / "rows.jsonl"
        self.folder = target.with_name(f"{target.stem}-images")
        if self.folder.exists():
            raise UserError(f"{self.folder} already exists; choose another name, or remove it")
        self._file = self.rows.open("w", encoding="utf-8")
        self._count = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row with an id."""
        self._file.write(json.dumps({"id": f"{self.target.stem}-{self._count:06d}", **row}, ensure_ascii=False) + "\n")
        self._count += 1

    def name_of(self, image: Any) -> str:
        """Path of an image relative to the output; a stored one is written, equal ones once."""
        if isinstance(image, Path):
            # from the real folder, where ".." leads if the output's is a link
            return os.path.relpath(image.parent.resolve() / image.name, self.target.parent.resolve())
        content = image.read() if hasattr(image, "read") else image
        content = content["bytes"] if isinstance(content, Mapping) else content
        kind = str(open_image_file(io.BytesIO(content)).format).lower()
        name = f"{hashlib.sha256(content).hexdigest()[:24]}.{kind}"
        draft = self.images / name
        if not draft.exists():
            draft.write_bytes(content)
        return f"{self.folder.name}/{name}"

    def finish(self) -> None:
        """Move the rows, and the images if there are any, to their places."""
        self._file.close()
        if any(self.images.iterdir()):
            shutil.move(self.images, self.folder)
        self.rows.replace(self.target)


@dataclass
class _Reading:
    """One pass over a file."""

    source: Source
    name: str
    file: Path
    images: ImageFolder
    radius: float
    writer: _Writer
    result: Conversion = field(default_factory=Conversion)
    boxes: list[FormedBox] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def run(self, skip_bad_rows: bool) -> Conversion:
        """Convert all rows; raises UserError."""
        contradictions: list[str] = []
        for row in read_rows(str(self.file), "train", None):
            try:
                if row.problem:
                    raise RowError(row.problem)
                for each in self.source.read(row.cells):
                    self._take(each, row.place)
            except ContradictionError as error:
                contradictions.append(f"{row.place}: {error}")
            except RowError as error:
                if not skip_bad_rows:
                    raise UserError(
                        f"{self.file}: {row.place}: {error} (--skip-bad-rows leaves such rows out)"
                    ) from None
                self.result.skipped.append((row.place, str(error)))
        self._check(contradictions)
        return self.result

    def _take(self, row: SourceRow, place: str) -> None:
        image = self.images.resolve(row.image)
        size = self.images.size(image)
        if row.size is not None and row.size != size:
            raise ContradictionError(f"the row says {_shown(row.size)} pixels, but its image has {_shown(size)}")
        target = self.source.target(row.numbers, size, self.radius * math.hypot(*size))
        if len(row.numbers) == 4:
            extent = self.source.extent
            scaled = row.numbers if extent is None else [number / extent for number in row.numbers]
            self.boxes.append((scaled, self.source.form, size))
            self.places.append(place)
        self.result.rows += 1
        self.result.without_target += isinstance(target, NoTarget)
        own = {"image": self.writer.name_of(image), "instruction": row.instruction, "original_wh": list(size)}
        self.writer.write({**row.columns, **own, **sample_target(target)})

    def _check(self, contradictions: Sequence[str]) -> None:
        """Refuse a file whose rows contradict the source, one by one or all together."""
        if contradictions:
            listed = "; ".join(contradictions[:LISTED]) + ("; ..." if len(contradictions) > LISTED else "")
            count = f"{len(contradictions)} {'row contradicts' if len(contradictions) == 1 else 'rows contradict'}"
            raise UserError(f"{self.file}: {count} --from {self.name} ({self.source.summary}): {listed}")
        found = fit_convention(self.source.form, self.boxes, self.places)
        if found is not None:
            self.result.convention = found.sentence
            if found.verdict in ("mixed", "wrong", "thousandths"):
                misfits = [place for box, place in zip(self.boxes, self.places, strict=True) if not fits(*box)]
                rows = f"; do not fit: {', '.join(misfits[:LISTED])}" if misfits else ""
                raise UserError(f"{self.file} contradicts --from {self.name}: {found.sentence}{rows}")
        if not self.result.rows:
            raise UserError(f"{self.file} has no usable rows; skipped: {len(self.result.skipped)}")


def _read_gui_r1(cells: Cells) -> list[SourceRow]:
    """Source: ritzz-ai/GUI-R1 verl/utils/dataset.py (`RLHFDataset`)."""
    action, text = text_cell(cells, "gt_action").lower(), cells.get("gt_input_text")
    numbers = _numbers(cells, "gt_bbox") if action == CLICK else ()
    if action in TEXTED and not str(text or "").strip():
        raise RowError(f"gt_action is {action}, but gt_input_text is {shortened(text)}")
    step = {"action": action, "input_text": text}
    used = ("image", "gt_action", "gt_bbox", "gt_input_text")
    return [
        SourceRow(cell_of(cells, "image"), text_cell(cells, "instruction"), numbers, None, _others(cells, used) | step)
    ]


def _read_ui_r1(cells: Cells) -> list[SourceRow]:
    """Source: lll6gg/UI-R1 src/ui_r1/src/open_r1/grpo_json_action_coord.py (`main`)."""
    has_box = cells.get("bbox") is not None
    action = CLICK if has_box else text_cell(cells, "action")
    if action == CLICK and not has_box:
        raise RowError("the action is click, but there is no bbox")
    # boxes mean clicks in UI-R1's files, which have no column for the action of such rows
    if has_box and cells.get("action") not in (None, CLICK):
        raise RowError(f"there is a bbox, but the action is {shortened(cells['action'])} instead of click")
    numbers = _numbers(cells, "bbox", (4,)) if has_box else ()
    columns = _others(cells, ("img_filename", "bbox", "action")) | {"action": action}
    return [SourceRow(text_cell(cells, "img_filename"), text_cell(cells, "instruction"), numbers, None, columns)]


def _read_ui_tars(cells: Cells) -> list[SourceRow]:
    """The last turn of a conversation is the step, on the last image; earlier ones are its history.

    Source: bytedance/UI-TARS issue 77 (a training sample) and codes/ui_tars/prompt.py.
    """
    turns = _turns(cells)
    said = [text for role, text in turns if role in ("assistant", "gpt")]
    asked = [text for role, text in turns if role in ("user", "human")]
    if not said or not asked or turns[-1][0] not in ("assistant", "gpt"):
        raise RowError("the conversation needs a question of the user, and ends with a response")
    instruction = asked[0].partition(INSTRUCTION_MARK)[2] or asked[0]
    instruction = instruction.replace("<image>", "").strip()
    if not instruction:
        raise RowError("the first turn of the user has no instruction")
    try:
        actions = read_ui_tars(said[-1], strict=False)[1]
    except UnreadableError as error:
        raise RowError(f"the response {shortened(said[-1])} is no action of UI-TARS: {error}") from None
    if len(actions) != 1:
        raise RowError(f"the response has {len(actions)} actions; a step has one")
    ((action, arguments),) = actions
    if action == CLICK and "point" not in arguments:
        raise RowError("the action is click, but there is no point")
    columns = _others(cells, ("messages", "conversations", "images", "image"))
    columns |= {"action": action, "input_text": _said_text(arguments), "history": "\n".join(said[:-1])}
    # a drag has two points, of which none is the target
    return [SourceRow(_last_image(cells), instruction, arguments.get("point", ()), None, columns)]


def _said_text(arguments: Mapping[str, Any]) -> str | None:
    names = ("text", "direction", "key", "app_name", "answer")
    return next((str(arguments[name]) for name in names if arguments.get(name) is not None), None)


def _turns(cells: Cells) -> list[tuple[str, str]]:
    """Role and text of each turn, in the form of OpenAI (role, content) or ShareGPT (from, value)."""
    key, role, content = ("messages", "role", "content")
    if cells.get(key) is None:
        key, role, content = ("conversations", "from", "value")
    turns = cell_of(cells, key)
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise RowError(f"{key} is {shortened(turns)}; expected a list of turns")
    return [(str(turn.get(role)), chat_text([{"content": turn.get(content) or ""}])) for turn in turns]


def _last_image(cells: Cells) -> Any:
    images = cells.get("images")
    if images is None:
        return cell_of(cells, "image")
    if not isinstance(images, list) or not images:
        raise RowError(f"images is {shortened(images)}; expected a list of images")
    return images[-1]


def _read_showui(cells: Cells) -> list[SourceRow]:
    """A screen with its elements, or one element of the published tables.

    Source: showlab/ShowUI-desktop-8K and ShowUI-web (data sets of showlab/ShowUI data/dset_shared_grounding.py).
    """
    if "element" not in cells:
        return _read_plain(cells)
    elements = cell_of(cells, "element")
    if not isinstance(elements, list) or not all(isinstance(element, Mapping) for element in elements):
        raise RowError(f"element is {shortened(elements)}; expected a list of objects")
    image, size = text_cell(cells, "img_url"), size_cell(cells, "img_size")
    return [
        SourceRow(
            image,
            text_cell(element, "instruction"),
            _place(element),
            size,
            _others(element, ("instruction", "bbox", "point")),
        )
        for element in elements
    ]


def _read_plain(cells: Cells) -> list[SourceRow]:
    """Columns image, instruction, and bbox or point; optional action and input_text."""
    key = next((key for key in IMAGE_COLUMNS if cells.get(key) is not None), "image")
    action = cells.get("action")
    is_step = isinstance(action, str) and action.lower() != CLICK
    none = is_step and cells.get("bbox") is None and cells.get("point") is None
    columns = _others(cells, (*IMAGE_COLUMNS, "bbox", "point", "action", "input_text"))
    columns |= {name: cells[name] for name in ("action", "input_text") if cells.get(name) is not None}
    size = size_cell(cells, "img_size") or size_cell(cells, "original_wh")
    return [
        SourceRow(cell_of(cells, key), text_cell(cells, "instruction"), () if none else _place(cells), size, columns)
    ]


def _place(cells: Cells) -> Sequence[float]:
    """The box, or the point of a row that has no box."""
    return _numbers(cells, "bbox", (4,)) if cells.get("bbox") is not None else _numbers(cells, "point", (2,))


def _numbers(cells: Cells, name: str, counts: Sequence[int] = (2, 4)) -> tuple[float, ...]:
    numbers = number_cells(cells, name)
    if len(numbers) not in counts:
        raise RowError(f"{name} has {len(numbers)} numbers; expected {' or '.join(map(str, counts))}")
    return numbers


def _others(cells: Cells, used: Sequence[str]) -> dict[str, Any]:
    """Columns that are kept: plain data under names that mean nothing to training."""
    left_out = {*used, *OWN_COLUMNS} - {"id"}
    kept = {name: value for name, value in cells.items() if name not in left_out and _is_plain(value)}
    return {f"source_{name}" if name in READ_COLUMNS else name: value for name, value in kept.items()}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _shown(size: Size) -> str:
    return f"{size[0]} x {size[1]}"


IMAGE_COLUMNS = ("image", "img_filename", "img_url", "image_path")
CHAT_COLUMNS = ("prompt", "problem", "question", "messages", "conversations")
READ_COLUMNS = ("id", "answers", *CHAT_COLUMNS, "images", "videos", "video")
"""Columns that training reads besides those written here, so that those of a source get another name."""
UNITS = {None: "pixels of the image", 1: "fractions of the image's sides", 1000: "thousandths of the image's sides"}

SOURCES: dict[str, Source] = {
    "gui_r1": Source(
        _read_gui_r1,
        BoxForm.XYXY_RELATIVE,
        1,
        "image, instruction, gt_action, gt_bbox (corners or a point as fractions), gt_input_text",
    ),
    "ui_r1": Source(
        _read_ui_r1, BoxForm.XYXY, None, "img_filename, instruction, bbox (corners in pixels), or action without a box"
    ),
    "ui_tars": Source(
        _read_ui_tars,
        BoxForm.XYXY_RELATIVE,
        1000,
        "messages or conversations ending with an action (points in thousandths), images",
    ),
    "showui": Source(
        _read_showui,
        BoxForm.XYXY_RELATIVE,
        1,
        "img_url and element, or image, instruction, bbox (corners as fractions) or point",
    ),
    "xywh": Source(_read_plain, BoxForm.XYWH, None, "image, instruction, bbox (left, top, width, height in pixels)"),
    "rel1": Source(_read_plain, BoxForm.XYXY_RELATIVE, 1, "image, instruction, bbox (corners as fractions) or point"),
    "rel1000": Source(
        _read_plain, BoxForm.XYXY_RELATIVE, 1000, "image, instruction, bbox (corners in thousandths) or point"
    ),
}
"""Kinds of files that `mmrl gui convert` reads."""
