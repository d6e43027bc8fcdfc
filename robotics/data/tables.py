"""Parquet files of a LeRobotDataset: columns, and conversion to and from arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.files import is_file, replaced
from mmrl.hub.tables import check_parquet
from robotics.data.images import encode_png, encode_tiff

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray


def data_schema(features: Mapping[str, Any]) -> pa.Schema:
    """Columns of the data files."""
    import pyarrow as pa

    columns: list[tuple[str, Any]] = []
    described: dict[str, Any] = {}
    for key, feature in features.items():
        if feature["dtype"] == "image":
            # the form of `datasets.Image`, which lerobot reads
            columns.append((key, pa.struct([("bytes", pa.binary()), ("path", pa.string())])))
            described[key] = {"_type": "Image"}
        elif feature["dtype"] != "video":
            columns.append((key, _column_type(pa.type_for_alias(feature["dtype"]), feature["shape"])))
            described[key] = _described(feature["dtype"], feature["shape"])
    # the library `datasets` restores images and array shapes from this metadata
    return pa.schema(columns, metadata={"huggingface": json.dumps({"info": {"features": described}})})


def episode_table(columns: Mapping[str, NDArray], features: Mapping[str, Any]) -> pa.Table:
    """Frames of an episode as in a data file: images (T, H, W, 3) become PNG and depth TIFF; videos are excluded."""
    import pyarrow as pa

    schema = data_schema(features)
    return pa.table([_arrow(columns[one.name], one.type) for one in schema], schema=schema)


def column_array(column: pa.ChunkedArray) -> NDArray:
    """Values (T,) or (T, n, ...) of a column in their own dtype; texts and everything else as objects."""
    import pyarrow as pa

    whole, shape = column.combine_chunks(), [len(column)]
    if isinstance(whole, pa.ExtensionArray):  # matrices, once the library `datasets` has been imported
        whole = whole.storage
    if _has_structs(whole.type):
        # filled cell by cell, as np.array would make a matrix of lists of equal lengths
        cells = np.empty(len(whole), object)
        for index, content in enumerate(whole.to_pylist()):
            cells[index] = content
        return cells
    while pa.types.is_nested(whole.type):
        shape.append(_list_length(whole))
        whole = whole.flatten()
    return whole.to_numpy(zero_copy_only=False).reshape(shape)


def task_table(tasks: Sequence[str]) -> pa.Table:
    """`meta/tasks.parquet`, with metadata that makes the texts the index in pandas."""
    import pyarrow as pa

    described = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
            for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
        ],
    }
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(described)})


def task_texts(table: pa.Table) -> list[str]:
    """Instructions of `meta/tasks.parquet`, whose text column has no fixed name."""
    texts = [name for name in table.column_names if name != "task_index"]
    numbers = table["task_index"].to_pylist() if "task_index" in table.column_names else []
    if set(numbers) != set(range(len(table))) or not texts:
        raise UserError(
            f"meta/tasks.parquet has the columns {table.column_names}; expected task_index 0..n-1 and texts"
        )
    by_number = dict(zip(numbers, table[texts[0]].to_pylist(), strict=True))
    return [str(by_number[number]) for number in range(len(table))]


def read_table(path: Path, **options: Any) -> pa.Table:
    """Read a parquet file, with options of `pyarrow.parquet`; raises UserError."""
    import pyarrow.parquet as pq

    with _named_errors(path):
        check_parquet(path)
        # folder names such as a=b would otherwise become columns
        return pq.read_table(path, partitioning=None, **options)


def count_rows(path: Path) -> int:
    """Number of rows of a parquet file, from its footer; raises UserError."""
    return int(_footer(path).num_rows)


def read_schema(path: Path) -> pa.Schema:
    """Columns of a parquet file and their types; raises UserError."""
    return _footer(path).schema.to_arrow_schema()


def write_table(tables: pa.Table | Sequence[pa.Table], path: Path) -> None:
    """Write a parquet file with a row group for each table, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    parts = [tables] if isinstance(tables, pa.Table) else tables
    with (
        replaced(path) as draft,
        pq.ParquetWriter(draft, parts[0].schema, compression="snappy", use_dictionary=True) as writer,
    ):
        for part in parts:
            writer.write_table(part)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    import pyarrow as pa

    if not is_file(path):
        raise UserError(f"the dataset lacks {path}")
    try:
        yield
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:  # the last two by filters of wrong types
        raise UserError(f"{path} cannot be read as parquet: {error}") from error


def _footer(path: Path) -> Any:
    import pyarrow.parquet as pq

    with _named_errors(path):
        return pq.read_metadata(path)


def _arrow(values: NDArray, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        encode, suffix = (encode_png, "png") if values.ndim == 4 else (encode_tiff, "tiff")
        encoded = [{"bytes": encode(frame), "path": f"frame-{at:06d}.{suffix}"} for at, frame in enumerate(values)]
        return pa.array(encoded, type=kind)
    return _nested(values, kind) if pa.types.is_nested(kind) else _flat(values.reshape(-1), kind)


def _nested(values: NDArray, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    inner = kind.value_type
    below = values.reshape(-1, *values.shape[2:])
    flat = _nested(below, inner) if pa.types.is_nested(inner) else _flat(below, inner)
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    ends = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, type=kind)


def _flat(values: NDArray, kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_string(kind):
        return pa.array(values.tolist(), type=kind)
    return pa.array(values.astype(kind.to_pandas_dtype()), type=kind)


def _has_structs(kind: pa.DataType) -> bool:
    import pyarrow as pa

    while hasattr(kind, "value_type"):
        kind = kind.value_type
    return bool(pa.types.is_nested(kind))


def _list_length(lists: pa.Array) -> int:
    import pyarrow.compute as pc

    lengths = pc.unique(pc.list_value_length(lists)).to_pylist()
    if len(lengths) > 1 or lengths == [None]:
        raise ValueError(f"its lists have the lengths {sorted(lengths, key=str)}; expected equal lengths")
    return int(lengths[0]) if lengths else 0


def _column_type(kind: pa.DataType, shape: Sequence[int]) -> pa.DataType:
    import pyarrow as pa

    if len(shape) == 1:
        return kind if shape[0] == 1 else pa.list_(kind, shape[0])
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def _described(dtype: str, shape: Sequence[int]) -> dict[str, Any]:
    value: dict[str, Any] = {"dtype": dtype, "_type": "Value"}
    if len(shape) == 1:
        return value if shape[0] == 1 else {"feature": value, "length": shape[0], "_type": "Sequence"}
    return {"shape": list(shape), "dtype": dtype, "_type": f"Array{len(shape)}D"}
