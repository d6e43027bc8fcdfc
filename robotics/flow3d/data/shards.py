"""Writes clips of 3D flow so that every added clip survives a kill.

A parquet file cannot be read before it is finished. Until then the clips of a shard are kept in a journal, an Arrow
stream that can be read after a kill. A full journal becomes a shard, whose metadata holds the counts of its clips, and
`info.json` and the card follow. Opening the folder for writing turns leftover journals into shards.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmrl.errors import UserError
from mmrl.files import replaced
from robotics.data.metadata import named_errors
from robotics.flow3d.data.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa

FOLDER = "data"
SPLIT = re.compile(r"\w+")
SHARD = re.compile(r"(\w+)-(\d{5,})\.parquet")
JOURNAL = re.compile(r"\.(\w+)-(\d{5,})\.journal")
TALLY = b"flow3d"


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[str, int, Path]]:
    """Split, number and path of the files that match SHARD or JOURNAL, in order."""
    paths = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    found = [(pattern.fullmatch(path.name), path) for path in paths]
    return sorted((match[1], int(match[2]), path) for match, path in found if match)


def journal_batches(path: Path) -> list[pa.RecordBatch]:
    """Clips of a journal, one a batch, up to the point of interruption."""
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    with path.open("rb") as file:
        try:
            stream = pa.ipc.open_stream(file)
            while True:
                batches.append(stream.read_next_batch())
        except (StopIteration, pa.ArrowException, OSError):
            return batches


def write_shard(path: Path, batches: Sequence[pa.RecordBatch], tally: Tally, group_size: int) -> None:
    """Write a shard atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_batches(batches)
    metadata = {**(table.schema.metadata or {}), TALLY: json.dumps(tally.to_json()).encode()}
    with replaced(path) as draft:
        pq.write_table(
            table.replace_schema_metadata(metadata),
            draft,
            row_group_size=group_size,
            compression="zstd",
            write_page_checksum=True,
        )


def read_tally(path: Path) -> Tally:
    """Counts of a shard's clips, from its metadata."""
    import pyarrow.parquet as pq

    with shard_errors(path):
        metadata = pq.read_schema(path).metadata or {}
        if TALLY not in metadata:
            raise UserError(f"{path} is parquet, but not a shard of 3D flow: its metadata has no {TALLY.decode()!r}")
        return Tally.from_json(json.loads(metadata[TALLY]))


def read_group(path: Path, number: int, columns: Sequence[str] | None = None) -> pa.Table:
    """One row group of a shard; raises UserError where it is damaged."""
    import pyarrow.parquet as pq

    with shard_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read_row_group(number, columns=None if columns is None else list(columns))


@contextmanager
def shard_errors(path: Path) -> Iterator[None]:
    """Name the file in the errors of a damaged one."""
    import pyarrow as pa

    try:
        with named_errors(f"the shard {path}"):
            yield
    except pa.ArrowException as error:
        raise UserError(f"the shard {path} cannot be read: {' '.join(str(error).split())[:300]}") from error
