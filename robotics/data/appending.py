"""Opening a dataset that is there for appending, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from robotics.data.features import DTYPES, IMAGES, SUCCESS, complete_features
from robotics.data.layout import DATA_PATH, INFO_PATH, VIDEO_PATH, numbered_files
from robotics.data.series import FileSeries
from robotics.data.tables import count_rows, read_schema, read_table, write_table

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa


def check_appendable(
    folder: Path, info: Mapping[str, Any], fps: int | None, features: Mapping[str, Any] | None, robot_type: str | None
) -> None:
    """Refuse to append to a dataset with other features, rate or robot than the given ones."""
    theirs = {key: (one["dtype"], list(one["shape"])) for key, one in info["features"].items()}
    ours = theirs
    if features is not None:
        ours = {key: (one["dtype"], list(one["shape"])) for key, one in complete_features(features).items()}
    different = [key for key in ours | theirs if ours.get(key) != theirs.get(key) and key != SUCCESS]
    if different:
        raise UserError(f"{folder} has other features than asked for: {', '.join(different)}")
    for key, wanted in (("fps", fps), ("robot_type", robot_type)):
        if wanted is not None and info.get(key) != wanted:
            raise UserError(f"{folder} has {key} {info.get(key)!r}, not {wanted!r}")
    unknown = [key for key, (dtype, _) in theirs.items() if dtype not in (*IMAGES, *DTYPES, "string")]
    if unknown:
        raise UserError(
            f"{folder} has {unknown[0]} of dtype {theirs[unknown[0]][0]!r}, which this writer does not write"
        )
    for key, pattern in (("data_path", DATA_PATH), ("video_path", VIDEO_PATH)):
        if (info.get(key) or pattern) != pattern:
            raise UserError(f"{folder / INFO_PATH} has {key} {info[key]!r}; this writer appends to {pattern!r} only")


def row_schema(folder: Path) -> pa.Schema | None:
    """Columns of the rows in `meta/episodes`, those of the first file as in lerobot; None without rows."""
    files = numbered_files(folder / "meta/episodes", ".parquet")
    return read_schema(files[0]).remove_metadata() if files else None


def aligned_rows(table: pa.Table, schema: pa.Schema | None) -> pa.Table:
    """Rows with the columns and types of those that are there; missing columns are null."""
    import pyarrow as pa

    if schema is None:
        return table
    for column in schema:
        if column.name not in table.column_names:
            table = table.append_column(column.name, pa.nulls(len(table), column.type))
    return table.select(schema.names).cast(schema)


def remove_leftovers(series: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    """Remove files that no row points to: an interruption leaves them, and readers would take them for frames."""
    folder = series.folder / series.prefix
    used = {series.path(series.number_in(row)) for row in rows}
    for path in [*numbered_files(folder, series.suffix), *folder.glob("chunk-*/.*.partial.*")]:
        if path not in used:
            path.unlink()


def remove_joined(data: FileSeries, rows: Sequence[Mapping[str, Any]]) -> None:
    """Remove frames from joined files whose rows do not point there yet.

    Between a join and the rows that point to it, the episodes are in the joined file and in their own. Extra images in
    a video do no harm, but readers count on the index of a frame among all frames.
    """
    held: dict[Path, list[Mapping[str, Any]]] = {}
    for row in rows:
        held.setdefault(data.path(data.number_in(row)), []).append(row)
    for path, episodes in held.items():
        if count_rows(path) > sum(row["length"] for row in episodes):
            numbers = [row["episode_index"] for row in episodes]
            write_table(read_table(path, filters=[("episode_index", "in", numbers)]), path)
