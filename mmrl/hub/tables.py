"""Read rows from JSONL, JSON, parquet, CSV and text files, dataset folders and hub datasets, and make them tasks."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from omegaconf import MISSING

from mmrl.errors import UserError, did_you_mean
from mmrl.fields import bounded, rare
from mmrl.files import LARGEST_LINES, LONGEST_LINE, expanded, is_file, open_file, parse_json, read_file, read_lines
from mmrl.hub.building import BuiltPath, build_if_missing
from mmrl.runs.dry_run import fetch_follows

ItemT = TypeVar("ItemT")
TaskT = TypeVar("TaskT")
LOGGER = logging.getLogger("mmrl")
BATCH = 1024
"""Number of rows of a table that are converted at a time."""
MOST_UNPACKED, MOST_PACKED = 2**28, 200
"""Bytes of a column of a row group of a parquet file that is not large itself, and times the file's size of others."""
MOST_DECODED = 2**29
"""Bytes of a batch if each of its values were all that its column chunk stores."""
BAD_ROWS = ("error", "skip")
"""Treatments of bad rows, `on_bad_row`."""
PUBLISHED = "docs/data.md lists the columns and published datasets"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class DataRow:
    """One row: its location for messages, and its cells or its problem."""

    place: str
    cells: dict[str, Any]
    problem: str | None = None


class BadRowError(Exception):
    """A row that cannot be used; it ends the run, or is skipped and counted by kind."""

    def __init__(self, kind: str, place: str, message: str) -> None:
        super().__init__(kind, place, message)
        self.kind = kind
        self.place = place
        self.message = message

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


@dataclass
class LoadedRows(Generic[TaskT]):
    """The usable rows of a dataset as tasks, and the rows that were skipped."""

    tasks: list[TaskT] = field(default_factory=list)
    on_bad_row: str = "error"
    """error: stop at a bad row; skip: skip and count it."""
    problems: list[BadRowError] = field(default_factory=list)
    """All rows that were skipped."""
    key: str = "data"
    """Section of the option `on_bad_row`, for messages."""

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped rows by kind."""
        return Counter(error.kind for error in self.problems)

    @property
    def examples(self) -> dict[str, str]:
        """The first message of each kind."""
        # reversed: of each kind the earliest one is written last and stays
        return {error.kind: str(error) for error in reversed(self.problems)}

    def take(self, items: Iterable[ItemT], make: Callable[[ItemT], TaskT], limit: int | None = None) -> None:
        """Append the task that `make` returns for each item, up to `limit` tasks; a BadRowError skips the item."""
        for item in items:
            # the limit counts usable rows, not lines
            if len(self.tasks) == limit:
                return
            try:
                self.tasks.append(make(item))
            except BadRowError as error:
                self.leave_out(error)

    def leave_out(self, error: BadRowError) -> None:
        """Count a row that cannot be used; raises UserError if bad rows are errors."""
        if self.on_bad_row == "error":
            raise UserError(f"{error} (set {self.key}.on_bad_row=skip to skip such rows)") from None
        self.problems.append(error)

    def check_left(self, path: Path | str) -> None:
        """Raise UserError if a dataset has no usable row, and log the skipped rows."""
        # no rows at all, as opposed to rows that are all bad
        if not self.tasks and not self.problems:
            raise UserError(f"{path} is empty: it has no rows")
        if not self.tasks:
            counts = ", ".join(f"{count} {kind}" for kind, count in self.skipped.items())
            raise UserError(f"{path}: no usable rows (skipped: {counts}); first problem: {self.problems[0]}")
        examples = self.examples
        for kind, count in self.skipped.items():
            LOGGER.warning("%s: skipped %d rows (%s), e.g. %s", path, count, kind, examples[kind])


@dataclass
class ArrowImage:
    """An image cell that stays in its memory-mapped table until it is read."""

    dataset: Any
    row: int
    column: str
    position: int | None
    """Index inside the cell's list, or None when the cell is a single image."""
    folder: Path | None = None
    """Folder to which a relative path refers."""

    def read(self) -> Any:
        """Return the stored {"bytes", "path"} mapping, or bytes."""
        # one cell: the table is memory-mapped, and other rows are not read
        cell = self.dataset[self.row][self.column][0].as_py()
        cell = cell if self.position is None else cell[self.position]
        if self.folder is None or not isinstance(cell, dict) or cell["bytes"] is not None or not cell["path"]:
            return cell
        return {**cell, "path": str(self.folder / cell["path"])}


@dataclass(kw_only=True)
class RowsConfig(BuiltPath):
    """A dataset, and which of its rows are read."""

    split: str = "train"
    """Split of a dataset with several splits; a file is a single split."""
    subset: str | None = rare(None)
    """Configuration name of a hub dataset with several configurations."""
    max_tasks: int | None = rare(bounded(None, at_least=1))
    """Use only the first rows, up to this number of usable ones."""


def built_path(config: BuiltPath, key: str, kinds: str) -> Path:
    """Path of a configuration's data, created by its `build` if missing; raises UserError if no path is set.

    `key` is the section of the options and `kinds` lists the kinds of files, both for messages.
    """
    if not config.path or config.path == MISSING:
        raise UserError(f"{key}.path is not set; set it to {kinds}")
    build_if_missing(config, key)
    return expanded(config.path)


def rows(config: RowsConfig) -> Iterator[DataRow]:
    """All rows of a dataset."""
    check_split(config.path, config.split, config.subset)
    yield from read_rows(config.path, config.split, config.subset)


def read_rows(path: str, split: str, subset: str | None) -> Iterator[DataRow]:
    """Read all rows behind a path or hub id."""
    # a path first, a hub id last: a local folder of that name wins
    file = expanded(path)
    if file.is_dir():
        yield from _read_folder(file, split)
    elif file.suffix.lower() in (LINES, *READERS):
        if not is_file(file):
            raise UserError(_missing(file))
        if file.suffix.lower() == LINES:
            yield from _read_jsonl(file, LONGEST_LINE)
        else:
            yield from READERS[file.suffix.lower()](file)
    elif file.exists():
        # a file that exists is never looked for on the hub
        known = ", ".join((LINES, *READERS))
        raise UserError(f"{file}: unknown extension {file.suffix!r}; expected {known}, or a dataset folder")
    elif HUB_ID.fullmatch(path):
        yield from _read_hub(path, split, subset)
    else:
        raise UserError(_missing(file))


def media_folder(path: Path) -> Path:
    """Folder that relative paths of images and videos in a data set refer to."""
    return path if path.is_dir() else path.parent


def good_rows(path: str) -> Iterator[DataRow]:
    """All rows behind a path or hub id; raises UserError at a bad row."""
    for row in read_rows(path, "train", None):
        if row.problem is not None:
            raise UserError(f"{row.place}: {row.problem}")
        yield row


def check_split(path: str, split: str, subset: str | None) -> None:
    """Reject a split or subset of data that has none: a file is one split, and only hub datasets have subsets."""
    file = expanded(path)
    is_one = is_file(file) and file.suffix.lower() in (LINES, *READERS)
    if is_one and split != "train":
        raise UserError(f"data.split is {split!r}, but {file} is a single split; leave it out")
    if subset is not None and (is_one or file.is_dir()):
        raise UserError(f"data.subset is {subset!r}, but {file} is not on the hub and has none; set it to null")


def _missing(file: Path) -> str:
    # absolute: a relative path starts from the working directory, which may not be the one that was meant
    folder = file.parent.absolute()
    if not folder.is_dir():
        return f"file not found: {file} (the folder {folder} does not exist either); {PUBLISHED}"
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    listed = f"the folder {folder} contains: {', '.join(names[:12]) or 'nothing'}"
    return f"file not found: {file}; {did_you_mean(file.name, names)}{listed}"


def _read_jsonl(file: Path, longest: int) -> Iterator[DataRow]:
    # numbered from 1, as editors count lines; a data set may be larger than any file of a run
    for number, line in enumerate(read_lines(file, None, longest), start=1):
        place = f"{file.name} line {number}"
        if len(line) > longest:
            yield DataRow(place, {}, f"the line has more than {longest / 1e6:g} MB")
        elif line.strip():
            yield _json_row(line, place)


def _read_text(file: Path) -> Iterator[DataRow]:
    """A prompt per line."""
    for number, line in enumerate(read_lines(file, None), start=1):
        problem = f"the line has more than {LONGEST_LINE / 1e6:g} MB" if len(line) > LONGEST_LINE else None
        try:
            text = "" if problem else line.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} cannot be read: {error}") from error
        yield DataRow(f"{file.name} line {number}", {"prompt": text}, problem)


def _json_row(line: bytes, place: str) -> DataRow:
    try:
        # with a byte-order mark, which some programs write
        value = parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataRow(place, {}, f"not UTF-8 ({error.reason} at byte {error.start})")
    except ValueError as error:
        return DataRow(place, {}, f"not valid JSON ({error})")
    return _object_row(value, place)


def _object_row(value: Any, place: str) -> DataRow:
    if isinstance(value, dict):
        return DataRow(place, value, unusable_text(value))
    return DataRow(place, {}, f'expected an object like {{"prompt": ...}}, found {type(value).__name__}')


def unusable_text(cells: dict[str, Any]) -> str | None:
    """Describe a column whose text cannot be written to a file; None if there is none."""
    for name, cell in cells.items():
        # texts inside lists and objects too
        text = f"{name}{cell}" if isinstance(cell, str) else json.dumps([name, cell], ensure_ascii=False)
        half = next((letter for letter in SURROGATES.findall(text)), None)
        if half is not None:
            return f"column {name!a} contains U+{ord(half):04X}, a lone surrogate, which is not valid text"
    return None


def _read_json(file: Path) -> Iterator[DataRow]:
    try:
        rows = parse_json(read_file(file, LARGEST_LINES).decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(
            f"{file} is not valid JSON ({error}); files with one object per line need the extension .jsonl"
        ) from None
    if not isinstance(rows, list):
        raise UserError(f"{file}: expected a JSON list of objects, found {type(rows).__name__}")
    for number, value in enumerate(rows, start=1):
        yield _object_row(value, f"{file.name} row {number}")


def _read_csv(file: Path) -> Iterator[DataRow]:
    _import_datasets(file)
    import pandas  # which datasets requires
    import pyarrow as pa

    if not file.stat().st_size:
        return
    # only an empty cell is missing: "None" and "NA" may be answers
    missing: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    try:
        # column types are inferred from the whole file; integers stay integers even if a cell is empty
        frame = pandas.read_csv(file, dtype_backend="numpy_nullable", low_memory=False, **missing)
        text = pandas.read_csv(file, dtype=str, **missing)
    except ValueError as error:
        raise UserError(f"{file} cannot be read as csv: {type(error).__name__}: {error}") from None
    for name in frame:  # 007 is no number
        if text[name].str.match(r"[+-]?0\d", na=False).any():
            frame[name] = text[name]
    cells = pa.Table.from_pandas(frame, preserve_index=False).to_pylist()
    yield from (DataRow(f"{file.name} row {number}", row) for number, row in enumerate(cells, start=1))


def _read_parquet(file: Path) -> Iterator[DataRow]:
    datasets = _import_datasets(file)
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        metadata = check_parquet(file)
        if metadata.num_rows == 0:
            return
        images = _image_columns(metadata.schema.to_arrow_schema())
        # images are read one by one, in any order, from a memory-mapped copy; the rest as far as it is asked for
        with quiet_datasets(datasets):
            stored = datasets.Dataset.from_parquet(str(file), columns=images).with_format("arrow") if images else None
        with ParquetFile(file) as opened:
            plain = [name for name in opened.schema_arrow.names if name not in images]
            batches = opened.iter_batches(_rows_at_once(metadata), columns=plain)
            batched = (pa.Table.from_batches([batch]) for batch in batches)
            yield from _arrow_rows(batched, stored, images, file.name)
    except UserError:
        raise
    except Exception as error:
        # the cause says what is wrong with the file
        cause = error.__cause__ or error
        raise UserError(f"{file} cannot be read as parquet: {type(cause).__name__}: {cause}") from None


def check_parquet(file: Path) -> Any:
    """Metadata of a parquet file; raises UserError if a column decompresses to far more bytes than the file has."""
    from pyarrow.parquet import read_metadata

    with open_file(file) as content:
        size, metadata = os.fstat(content.fileno()).st_size, read_metadata(content)
    for number, column in _column_chunks(metadata):
        unpacked = column.total_uncompressed_size
        if unpacked > max(MOST_UNPACKED, MOST_PACKED * size):
            raise UserError(
                f"{file} has {size} bytes, but its column {column.path_in_schema} decompresses to {unpacked} "
                f"bytes in row group {number}; at most {MOST_UNPACKED} bytes may be decompressed at a time. If "
                "the file is valid, write it with smaller row groups, such as pyarrow.parquet.write_table(table, "
                "file, row_group_size=1000)"
            )
    return metadata


def _column_chunks(metadata: Any) -> Iterator[tuple[int, Any]]:
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        yield from ((number, group.column(index)) for index in range(group.num_columns))


def _rows_at_once(metadata: Any) -> int:
    """Rows of a batch; few where a long text, stored once, may be the value of every row."""
    largest = max((column.total_uncompressed_size for _, column in _column_chunks(metadata)), default=1)
    return max(1, min(BATCH, MOST_DECODED // max(largest, 1)))


def _read_folder(folder: Path, split: str) -> Iterator[DataRow]:
    datasets = _import_datasets(folder)
    # save_to_disk writes its own files next to the data
    saved = (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
    try:
        for file in () if saved else sorted(folder.rglob("*.parquet")):
            check_parquet(file)
        with quiet_datasets(datasets):
            found = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{folder} is neither a folder written by datasets.save_to_disk nor a folder of data files: "
            f"{type(error).__name__}: {error}"
        ) from None
    yield from _dataset_rows(_pick_split(found, split, str(folder)), folder.name)


def _read_hub(name: str, split: str, subset: str | None) -> Iterator[DataRow]:
    fetch_follows(name, "a hub id or not on this machine, so it was not checked")
    datasets = _import_datasets(name)
    try:
        found = datasets.load_dataset(name, subset)
    except Exception as error:
        raise UserError(
            f"file or folder not found: {name}; loading it as a hub dataset failed: {type(error).__name__}: {error}"
        ) from None
    yield from _dataset_rows(_pick_split(found, split, name), name)


def _pick_split(found: Any, split: str, name: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split in found:
        return found[split]
    raise UserError(f"{name} has no split {split!r}; it has: {', '.join(found)} (set data.split)")


def _import_datasets(wanted: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"reading {wanted} requires the datasets package ({error}); pip install datasets") from None
    return datasets


@contextmanager
def quiet_datasets(datasets: Any) -> Iterator[None]:
    """Hide the library's progress bars."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _dataset_rows(dataset: Any, name: str) -> Iterator[DataRow]:
    stored = dataset.with_format("arrow")
    images = _image_columns(stored.features.arrow_schema)
    # rows at a time: a table may be larger than memory
    tables = (stored[start : min(start + BATCH, len(dataset))] for start in range(0, len(dataset), BATCH))
    yield from _arrow_rows((table.drop_columns(images) for table in tables), stored, images, name)


def _image_columns(schema: Any) -> list[str]:
    return [column.name for column in schema if is_image(column.type)]


def _arrow_rows(tables: Iterable[Any], stored: Any, images: Sequence[str], name: str) -> Iterator[DataRow]:
    """Turn columns into cells, images left in the memory-mapped table `stored` as `ArrowImage`."""
    start = 0
    for table in tables:
        plain, rows = table.to_pylist(), range(start, start + table.num_rows)
        columns = stored[rows.start : rows.stop] if images else {}
        counts = {key: _image_counts(columns[key]) for key in images}
        for offset, row in enumerate(rows):
            # a table of images alone has no plain columns
            cells = plain[offset] if plain else {}
            for key in images:
                cells[key] = _image_cell(stored, row, key, counts[key][offset])
            yield DataRow(f"{name} row {row + 1}", cells)
        start = rows.stop


def is_image(kind: Any) -> bool:
    """Whether a type of Arrow is that of images: bytes, {bytes, path}, or a list of either."""
    import pyarrow.types as kinds

    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return is_image(kind.value_type)
    if kinds.is_struct(kind):
        return {item.name for item in kind} == {"bytes", "path"}
    return kinds.is_binary(kind) or kinds.is_large_binary(kind)


def _image_counts(column: Any) -> list[int | None]:
    """Per row: None without an image, -1 for a single image, otherwise the length of the list."""
    import pyarrow.compute as compute
    import pyarrow.types as kinds

    if kinds.is_struct(column.type) or kinds.is_binary(column.type) or kinds.is_large_binary(column.type):
        return [-1 if valid else None for valid in compute.is_valid(column).to_pylist()]
    return compute.list_value_length(column).to_pylist()


def _image_cell(stored: Any, row: int, key: str, count: int | None) -> Any:
    if count is None:
        return None
    if count < 0:
        return ArrowImage(stored, row, key, None)
    return [ArrowImage(stored, row, key, position) for position in range(count)]


LINES = ".jsonl"
READERS = {".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv, ".txt": _read_text}
SURROGATES = re.compile("[\ud800-\udfff]")
