"""Writes clips of 3D flow so that every added clip survives a kill.

Each clip is first appended to a journal; a full journal becomes a shard, then `info.json` and the card are updated.
Opening the folder again for writing turns what an interrupted writer left into shards.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from mmrl.files import expanded, is_file, remove_drafts, replaced, write_atomically
from mmrl.hub.tables import check_parquet
from robotics.data.layout import hold_folder, named_errors
from robotics.flow3d.clip import FlowClip
from robotics.flow3d.data.format import INFO, ClipTally, DatasetInfo, clip_schema, dataset_card, row_of, rows_of

if TYPE_CHECKING:
    import pyarrow as pa


FOLDER = "data"
SPLIT = re.compile(r"\w+")
SHARD = re.compile(r"(\w+)-(\d{5,})\.parquet")
JOURNAL = re.compile(r"\.(\w+)-(\d{5,})\.journal")
TALLY = b"flow3d"
COUNTED = ["split", "source", "task", "width", "height", "points", "flow", "K", "quality"]
"""Columns that `Tally.add` reads."""


def numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[str, int, Path]]:
    """Split, number and path of the files that match SHARD or JOURNAL, in order."""
    paths = (folder / FOLDER).iterdir() if (folder / FOLDER).is_dir() else ()
    found = [(pattern.fullmatch(path.name), path) for path in paths]
    return sorted((match[1], int(match[2]), path) for match, path in found if match)


def journal_batches(path: Path) -> list[pa.RecordBatch]:
    """Clips of a journal, one per batch, up to the point of interruption."""
    import pyarrow as pa

    batches: list[pa.RecordBatch] = []
    with path.open("rb") as file:
        try:
            stream = pa.ipc.open_stream(file)
            while True:
                batches.append(stream.read_next_batch())
        # the last batch may be cut off in the middle; all before it are whole
        except (StopIteration, pa.ArrowException, OSError):
            return batches


def write_shard(path: Path, batches: Sequence[pa.RecordBatch], tally: ClipTally, group_size: int) -> None:
    """Write a shard atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_batches(batches)
    # the counts are kept in each shard, so that they survive a lost info.json
    metadata = {**(table.schema.metadata or {}), TALLY: json.dumps(tally.to_json()).encode()}
    with replaced(path) as draft:
        pq.write_table(
            table.replace_schema_metadata(metadata),
            draft,
            row_group_size=group_size,
            compression="zstd",
            # pyarrow reads a flipped bit without an error otherwise
            write_page_checksum=True,
        )


def read_tally(path: Path) -> ClipTally:
    """Counts of a shard's clips, from its metadata."""
    with shard_errors(path):
        metadata = check_parquet(path).schema.to_arrow_schema().metadata or {}
        if TALLY not in metadata:
            raise UserError(f"{path} is parquet, but not a shard of 3D flow: its metadata has no {TALLY.decode()!r}")
        return ClipTally.from_json(json.loads(metadata[TALLY]))


def read_group(path: Path, number: int, columns: Sequence[str] | None = None) -> pa.Table:
    """One row group of a shard; raises UserError if it is damaged."""
    import pyarrow.parquet as pq

    with shard_errors(path):
        check_parquet(path)
    with shard_errors(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        return file.read_row_group(number, columns=None if columns is None else list(columns))


@contextmanager
def shard_errors(path: Path) -> Iterator[None]:
    """Add the file's name to errors about a damaged shard."""
    import pyarrow as pa

    try:
        with named_errors(f"the shard {path}"):
            yield
    except pa.ArrowException as error:
        raise UserError(f"the shard {path} cannot be read: {' '.join(str(error).split())[:300]}") from error


@dataclass(frozen=True)
class ShardSettings:
    """Sizes and units of the files."""

    clips_per_shard: int = bounded(256, at_least=1)
    """Number of clips per shard; the last one may have fewer."""
    clips_per_group: int = bounded(16, at_least=1)
    """Number of clips that are read together; smaller groups make access to single clips faster."""
    depth_unit_m: float = bounded(1e-4, above=0)
    """Finest unit of depth; a clip with depths above 65535 units gets a coarser one."""


class _Journal:
    """Clips of an unfinished shard."""

    def __init__(self, folder: Path, split: str, number: int, schema: pa.Schema) -> None:
        import pyarrow as pa

        self.split = split
        self.number = number
        self.path = folder / FOLDER / f".{split}-{number:05d}.journal"
        self.clips = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._schema = schema
        self._stream = pa.ipc.new_stream(self._file, schema)

    def add(self, row: dict[str, Any]) -> None:
        import pyarrow as pa

        self._stream.write_batch(pa.RecordBatch.from_pylist([row], schema=self._schema))
        # handed to the system after each clip: a kill of this process then loses nothing
        self._file.flush()
        self.clips += 1

    def close(self) -> None:
        self._stream.close()
        self._file.close()


class FlowWriter:
    """Writes clips to a folder, which may already have some; one writer per folder at a time.

        with FlowWriter("clips", num_frames=8, grid=4) as writer:
            writer.add(clip, split="train")

    Args:
        folder: folder of the data set.
        num_frames: T of all clips.
        grid: N of all clips.
        title: title of the card; None = the data set's, if it exists.
        settings: settings of the files.

    Raises:
        UserError: the folder holds clips with another T or N, something else, or a damaged shard, or another writer has
            it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        num_frames: int,
        grid: int,
        title: str | None = None,
        settings: ShardSettings | None = None,
    ) -> None:
        self.folder = expanded(Path(folder))
        self.settings = settings or ShardSettings()
        check_fields(self.settings, "shards")
        self._schema = clip_schema(num_frames, grid)
        self._numbers: dict[str, int] = {}
        self._journals: dict[str, _Journal] = {}
        self._closed = False
        self._open(num_frames, grid, title)  # before the lock, which makes the folder
        self._release = hold_folder(self, self.folder)
        try:
            self.info = self._open(num_frames, grid, title)  # another writer may have finished in between
            remove_drafts(self.folder)
            for split, number, path in numbered(self.folder, SHARD):
                self._count(split, number, path, read_tally(path))
            # after the shards are counted: a journal may belong to one of them
            self._recover()
            self._write_summary()
        except BaseException:
            self._release()
            raise

    def add(self, clip: FlowClip, *, split: str = "train") -> None:
        """Append a clip, which then survives a kill.

        Args:
            clip: with T and N of the data set. The task is its `meta["task"]`.
            split: letters, digits and underscores.

        Raises:
            UserError: T or N differ, the split has an invalid name, or the clip cannot be stored.
            ValueError: the writer is closed.
        """
        if self._closed:
            raise ValueError(f"the writer of {self.folder} is closed; create a new one to append clips")
        shape = (self.info.num_frames, self.info.grid, self.info.grid, 4)
        if clip.flow.shape != shape:
            raise UserError(f"the clip's flow has the shape {clip.flow.shape}; {self.folder} has flows of {shape}")
        if not SPLIT.fullmatch(split):
            raise UserError(f"split is {split!r}; must be letters, digits and underscores, such as train")
        # before the journal is opened: a clip that cannot be stored must not leave an empty one
        row = row_of(clip, split, self.settings.depth_unit_m)
        if split not in self._journals:
            self._journals[split] = _Journal(self.folder, split, self._numbers.get(split, 0), self._schema)
        journal = self._journals[split]
        journal.add(row)
        if journal.clips >= self.settings.clips_per_shard:
            self._finish(journal)
            self._write_summary()

    def close(self) -> None:
        """Finish the shards that are not full; called again it does nothing."""
        if self._closed:
            return
        self._closed = True
        for journal in list(self._journals.values()):
            self._finish(journal)
        self._write_summary()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self, num_frames: int, grid: int, title: str | None) -> DatasetInfo:
        if is_file(self.folder / INFO):
            there = DatasetInfo.read(self.folder)
            if (there.num_frames, there.grid) != (num_frames, grid):
                raise UserError(
                    f"{self.folder} has clips of T={there.num_frames} and N={there.grid}, not T={num_frames} and "
                    f"N={grid}; write the new clips to another folder"
                )
            return DatasetInfo(num_frames, grid, there.title if title is None else title)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder} is not empty and has no {INFO}; use a new folder or one in this format")
        return DatasetInfo(num_frames, grid) if title is None else DatasetInfo(num_frames, grid, title)

    def _count(self, split: str, number: int, path: Path, tally: ClipTally) -> None:
        self.info.tally.merge(tally)
        self.info.shards[path.relative_to(self.folder).as_posix()] = tally.clips.total()
        # numbers are never used twice, even if a shard was deleted by hand
        self._numbers[split] = max(number + 1, self._numbers.get(split, 0))

    def _recover(self) -> None:
        for split, number, path in numbered(self.folder, JOURNAL):
            # The writer may have been killed after writing the shard and before removing its journal.
            if not self._shard_path(split, number).exists() and (batches := journal_batches(path)):
                self._seal(split, number, batches)
            path.unlink()

    def _finish(self, journal: _Journal) -> None:
        del self._journals[journal.split]
        journal.close()
        self._seal(journal.split, journal.number, journal_batches(journal.path))
        # only once the shard is there
        journal.path.unlink()

    def _seal(self, split: str, number: int, batches: Sequence[pa.RecordBatch]) -> None:
        import pyarrow as pa

        path, tally = self._shard_path(split, number), ClipTally()
        for row in (row for batch in batches for row in rows_of(pa.table(batch.select(COUNTED)))):
            quality = {
                name: value for name, value in json.loads(row["quality"]).items() if isinstance(value, int | float)
            }
            tally.add(row, quality)
        write_shard(path, batches, tally, self.settings.clips_per_group)
        self._count(split, number, path, tally)

    def _shard_path(self, split: str, number: int) -> Path:
        return self.folder / FOLDER / f"{split}-{number:05d}.parquet"

    def _write_summary(self) -> None:
        self.info.write(self.folder)
        write_atomically(self.folder / "README.md", dataset_card(self.info))
