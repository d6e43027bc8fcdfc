"""Write rows given as Python objects to files in the run folder."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

from mmrl.errors import UserError
from mmrl.files import is_file, replaced, write_atomically
from mmrl.hub.foreign import MalformedError, as_image, to_rgb
from mmrl.hub.images import ImageError, decode_image, upright
from mmrl.hub.tables import BATCH, is_image, quiet_datasets, unusable_text

HELD_OUT = "heldout"
"""Name of held-out rows that are passed without a name."""
MEDIA = ("image", "images", "video", "videos")
"""Columns, and entries of chat turns, that may be paths."""
ITEMS, SOURCES = ("image", "image_url", "video"), ("path", "url", "image_url", "frames")
"""Types of items of chat turns, and entries of such an item, or of a mapping in these columns, that may be paths."""
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
TIFF = (b"II*\0", b"MM\0*")
"""First bytes of TIFF files."""
IMAGE_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp", b"BM": "bmp"}


def splits_of(data: Any, what: str) -> dict[str, Any]:
    """Splits of rows by name; a single split without a name gets the empty name."""
    if isinstance(data, Mapping) and "path" not in data and "file" not in data:
        if not data or not all(isinstance(name, str) for name in data):
            raise UserError(f"{what} is a mapping whose keys are not split names; pass rows, or {{'name': rows}}")
        return dict(data)
    return {"": data}


def reusable(data: Any) -> Any:
    """The same rows, which can be read more than once: an iterator becomes a list, also as a split."""
    if isinstance(data, Mapping):
        return {name: reusable(rows) for name, rows in data.items()}
    return list(data) if isinstance(data, Iterator) else data


def place(data: Any, folder: Path, name: str, media: Collection[str] = MEDIA) -> str:
    """Path of a split's rows, which are written to a folder unless they are already in files.

    Rows are dictionaries, texts (a prompt each), a table of pandas, polars or pyarrow, or a `datasets.Dataset`. What
    stands in a column reaches rewards as it is: JSON with images in files next to it, named by their content, so that
    equal rows are one file. Only the columns `media` may be paths, which are made absolute.
    """
    if isinstance(data, str | Path):
        return str(data)
    if _is_dataset(data):
        return _saved(data, folder, name, media)
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # a DataFrame, which iterates over its columns' names
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    for rows_of in ("to_dicts", "to_pylist"):  # polars and pyarrow
        data = getattr(data, rows_of)() if hasattr(data, rows_of) else data
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise UserError(f"{name} is a {type(data).__name__}; pass a path, a list of dicts or a datasets.Dataset")
    lines = [_line(row, f"{name}[{number}]", folder, media) for number, row in enumerate(data)]
    if not lines:
        raise UserError(f"{name} has no rows")
    text = "".join(lines)
    file = folder / f"{name}-{_digest(text.encode())}.jsonl"
    if not file.exists():
        write_atomically(file, text)
    return str(file)


def _is_dataset(data: Any) -> bool:
    return any(base.__module__.startswith("datasets.") for base in type(data).__mro__)


def _saved(data: Any, folder: Path, name: str, media: Collection[str]) -> str:
    """Folder of a data set of the package datasets: that it was loaded from, or a copy of its tables."""
    if type(data).__name__ != "Dataset":
        kinds = "a DatasetDict is a mapping of splits; an iterable one has no length, so take its rows: list(data)"
        raise UserError(f"{name} is a {type(data).__name__} of datasets; pass one Dataset ({kinds})")
    if data.format["type"] == "custom":
        raise UserError(f"{name} has a transform that changes rows when they are read; apply it with data.map")
    if not len(data):
        raise UserError(f"{name} has no rows")
    import datasets

    with quiet_datasets(datasets):
        data = _portable(data, name, media)
        if stored := _stored_folder(data, datasets):
            return stored
        target = folder / f"{name}-{data._fingerprint}"
        if not (target / "state.json").is_file():
            data.save_to_disk(str(target))
    return str(target)


def _portable(data: Any, name: str, media: Collection[str]) -> Any:
    """A data set whose paths are absolute, and its TIFF, as which `datasets` encodes palettes, CMYK and others, PNG."""
    table = data.with_format("arrow")
    columns = {key: key in media for key in table.column_names if _must_change(table, key, media)}
    if not columns:
        return data
    # in memory: not into a file next to those that the data set was loaded from
    changed = table.map(
        _changed,
        with_indices=True,
        batched=True,
        fn_kwargs={"columns": columns, "name": name},
        features=data.features,
        keep_in_memory=True,
    )
    return changed.with_format(None)


def _must_change(table: Any, key: str, media: Collection[str]) -> bool:
    import pyarrow.types as kinds

    kind = table.features.arrow_schema.field(key).type
    parts = (part[key] for part in table.select_columns(key).iter(BATCH))
    if is_image(kind):
        return any(_holds_tiff(part) for part in parts)
    while hasattr(kind, "value_type"):
        kind = kind.value_type
    text = kinds.is_string(kind) or kinds.is_large_string(kind)
    if not (kinds.is_struct(kind) or (text and key in media)):
        return False
    return any(_located(cell, key, key in media) != cell for part in parts for cell in part.to_pylist())


def _holds_tiff(column: Any) -> bool:
    """Whether a column of images, or lists of them, contains a TIFF, by the first bytes of each."""
    import pyarrow.compute as compute
    import pyarrow.types as kinds

    while hasattr(column.type, "value_type"):
        column = compute.list_flatten(column)
    if kinds.is_struct(column.type):
        column = compute.struct_field(column, "bytes")
    return any(compute.any(compute.starts_with(column, mark)).as_py() for mark in TIFF)


def _changed(table: Any, rows: Sequence[int], columns: Mapping[str, bool], name: str) -> Any:
    import pyarrow as pa

    for key, media in columns.items():
        cells = zip(rows, table[key].to_pylist(), strict=True)
        values = [_located(cell, f"{name}[{row}][{key!r}]", media) for row, cell in cells]
        field = table.schema.field(key)
        table = table.set_column(table.schema.get_field_index(key), field, pa.array(values, field.type))
    return table


def _located(cell: Any, where: str, media: bool) -> Any:
    """A cell of a data set as it can be read from another folder."""
    if isinstance(cell, str):
        return str(Path(cell).absolute()) if media and is_file(cell) else cell
    if isinstance(cell, list):
        return [_located(each, f"{where}[{number}]", media) for number, each in enumerate(cell)]
    if isinstance(cell, Mapping):
        named = _media_entries(cell, media)
        return {key: _located(each, f"{where}[{key!r}]", named[key]) for key, each in cell.items()}
    if isinstance(cell, bytes) and cell.startswith(TIFF):
        try:
            return _png(decode_image(cell, formats=("TIFF",)), where)
        except ImageError as error:
            raise UserError(f"{where}: {error}") from None
    return cell


def _media_entries(value: Mapping[Any, Any], media: bool) -> dict[Any, bool]:
    """Which entries of a mapping may be paths."""
    media = media or value.get("type") in ITEMS
    return {key: key in MEDIA or (media and key in SOURCES) for key in value}


def _stored_folder(data: Any, datasets: Any) -> str:
    """Folder that a data set was loaded from and whose rows and columns it still has; empty without one."""
    folders = {Path(file["filename"]).parent for file in data.cache_files}
    if len(folders) != 1 or data._indices is not None:
        return ""
    (folder,) = folders
    if not (folder / "state.json").is_file():
        return ""
    stored = datasets.load_from_disk(str(folder))
    same = stored.cache_files == data.cache_files and len(stored) == len(data) and stored.features == data.features
    return str(folder) if same else ""


def _line(row: Any, where: str, folder: Path, media: Collection[str]) -> str:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, Mapping):
        raise UserError(
            f"{where} is a {type(row).__name__}; a row must be a dict such as {{'prompt': 'What is 2 + 2?'}}"
        )
    cells = {str(name): _cell(value, f"{where}[{name!r}]", folder, name in media) for name, value in row.items()}
    if problem := unusable_text(cells):
        raise UserError(f"{where}: {problem}")
    return json.dumps(cells, ensure_ascii=False) + "\n"


def _cell(value: Any, where: str, folder: Path, media: bool = False) -> Any:
    # a path is relative to the program, and not to the file that the rows are written to
    if isinstance(value, Path) or (media and isinstance(value, str) and is_file(value)):
        return str(Path(value).absolute() if is_file(value) else value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        if "bytes" in value and set(value) <= {"bytes", "path"}:  # an image of datasets
            stored = value["bytes"]
            return _cell(value.get("path"), where, folder, True) if stored is None else _stored(stored, where, folder)
        named = _media_entries(value, media)
        return {str(key): _cell(each, f"{where}[{key!r}]", folder, named[key]) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cell(each, f"{where}[{number}]", folder, media) for number, each in enumerate(value)]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return _stored(value, where, folder)
    if hasattr(value, "getexif"):
        return _stored(_png(value, where), where, folder)
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and torch
        return _array(value, where, folder, media)
    raise UserError(f"{where} is a {type(value).__name__}; columns can contain texts, numbers, lists, dicts and images")


def _array(value: Any, where: str, folder: Path, media: bool) -> Any:
    import numpy as np

    array = np.asarray(value)
    pixels = media and array.dtype.kind in "biuf"  # the others are paths
    if pixels and array.ndim > 3:  # images, or the frames of a video
        return [_array(each, f"{where}[{number}]", folder, media) for number, each in enumerate(array)]
    if array.ndim < 2 or not (pixels or (array.dtype == np.uint8 and array.shape[2:] == (3,))):
        return _cell(array.tolist(), where, folder, media)
    from PIL import Image

    try:
        return _stored(_png(Image.fromarray(as_image(array)), where), where, folder)
    except MalformedError as error:
        raise UserError(f"{where}: {error}") from None


def _png(image: Any, where: str) -> bytes:
    if not image.width or not image.height:
        raise UserError(f"{where} is an image of {image.width} x {image.height} pixels")
    content, image = io.BytesIO(), upright(image)
    try:
        (image if image.mode in PNG_MODES else to_rgb(image)).save(content, "PNG", compress_level=1)
    except MalformedError as error:
        raise UserError(f"{where} has {error}") from None
    return content.getvalue()


def _stored(content: bytes, where: str, folder: Path) -> str:
    """Path, relative to the rows, of an encoded image."""
    kind = next((suffix for mark, suffix in IMAGE_TYPES.items() if content.startswith(mark)), None)
    if kind is None:
        raise UserError(f"{where} contains bytes that are not a PNG, JPEG, WebP, GIF or BMP image")
    file = folder / "images" / f"{_digest(content)}.{kind}"
    if not file.exists():
        with replaced(file) as draft:
            draft.write_bytes(content)
    return str(file.relative_to(folder))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
