"""Writes clips of 3D flow, see `robotics.flow3d.data.shards`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mmrl.errors import UserError
from mmrl.fields import bounded, check_fields
from mmrl.files import expanded, is_file, remove_drafts, write_atomically
from robotics.flow3d.data.card import dataset_card
from robotics.flow3d.data.info import INFO, DatasetInfo
from robotics.flow3d.data.rows import batch_of, clip_schema, row_of, rows_of
from robotics.flow3d.data.shards import (
    FOLDER,
    JOURNAL,
    SHARD,
    SPLIT,
    journal_batches,
    numbered,
    read_tally,
    write_shard,
)
from robotics.flow3d.data.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from robotics.flow3d.clip import FlowClip


COUNTED = ["split", "source", "task", "width", "height", "points", "flow", "K", "quality"]
"""Columns that `Tally.add` reads."""


@dataclass(frozen=True)
class ShardSettings:
    """Sizes and units of the files."""

    clips_per_shard: int = bounded(256, at_least=1)
    """Clips a shard; the last one may have fewer."""
    clips_per_group: int = bounded(16, at_least=1)
    """Clips that are read together; with fewer, access to single clips is faster."""
    depth_unit_m: float = bounded(1e-4, above=0)
    """Finest unit of depth; a clip with depths above 65535 units gets a coarser one."""


class _Journal:
    """Clips of an unfinished shard."""

    def __init__(self, folder: Path, split: str, number: int, schema: pa.Schema) -> None:
        import pyarrow as pa

        self.split, self.number = split, number
        self.path, self.clips = folder / FOLDER / f".{split}-{number:05d}.journal", 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, schema)

    def add(self, batch: pa.RecordBatch) -> None:
        self._stream.write_batch(batch)
        self._file.flush()
        self.clips += 1

    def close(self) -> None:
        self._stream.close()
        self._file.close()


class FlowWriter:
    """Writes clips to a folder, which may hold some already; one writer a folder at a time.

        with FlowWriter("clips", num_frames=8, grid=4) as writer:
            writer.add(clip, split="train")

    Args:
        folder: of the data set.
        num_frames: T of all clips.
        grid: N of all clips.
        title: of the card; that of the data set, if there is one, when None.
        settings: of the files.

    Raises:
        UserError: the folder holds clips with another T or N, something else, or a damaged shard.
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
        self.info = self._open(num_frames, grid, title)
        self._schema = clip_schema(num_frames, grid)
        self._numbers: dict[str, int] = {}
        self._journals: dict[str, _Journal] = {}
        remove_drafts(self.folder)
        self._count_shards()
        self._recover()
        self._write_summary()

    def add(self, clip: FlowClip, *, split: str = "train") -> None:
        """Append a clip, which then survives a kill.

        Args:
            clip: with T and N of the data set. The task is its `meta["task"]`.
            split: letters, digits and underscores.

        Raises:
            UserError: T or N differ, the split has an invalid name, or the clip cannot be stored.
        """
        shape = (self.info.num_frames, self.info.grid, self.info.grid, 4)
        if clip.flow.shape != shape:
            raise UserError(f"the clip's flow has the shape {clip.flow.shape}; {self.folder} has flows of {shape}")
        if not SPLIT.fullmatch(split):
            raise UserError(f"split is {split!r}; must be letters, digits and underscores, such as train")
        row = row_of(clip, split, self.settings.depth_unit_m)
        journal = self._journals.get(split) or self._new_journal(split)
        journal.add(batch_of(row, self._schema))
        if journal.clips >= self.settings.clips_per_shard:
            self._finish(journal)
            self._write_summary()

    def close(self) -> None:
        """Finish the shards that are not full."""
        for journal in list(self._journals.values()):
            self._finish(journal)
        self._write_summary()

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
                    f"N={grid}; write these to another folder"
                )
            return DatasetInfo(num_frames, grid, there.title if title is None else title)
        if self.folder.exists() and (not self.folder.is_dir() or any(self.folder.iterdir())):
            raise UserError(f"{self.folder} is not empty and has no {INFO}; give a new folder or one of this format")
        return DatasetInfo(num_frames, grid) if title is None else DatasetInfo(num_frames, grid, title)

    def _count_shards(self) -> None:
        for split, number, path in numbered(self.folder, SHARD):
            self._count(split, number, path, read_tally(path))

    def _count(self, split: str, number: int, path: Path, tally: Tally) -> None:
        self.info.tally.merge(tally)
        self.info.shards[path.relative_to(self.folder).as_posix()] = tally.clips.total()
        self._numbers[split] = max(number + 1, self._numbers.get(split, 0))

    def _recover(self) -> None:
        for split, number, path in numbered(self.folder, JOURNAL):
            # The writer may have been killed after writing the shard and before removing its journal.
            if not self._shard_path(split, number).exists() and (batches := journal_batches(path)):
                self._seal(split, number, batches)
            path.unlink()

    def _new_journal(self, split: str) -> _Journal:
        journal = _Journal(self.folder, split, self._numbers.get(split, 0), self._schema)
        self._journals[split] = journal
        return journal

    def _finish(self, journal: _Journal) -> None:
        del self._journals[journal.split]
        journal.close()
        self._seal(journal.split, journal.number, journal_batches(journal.path))
        journal.path.unlink()

    def _seal(self, split: str, number: int, batches: Sequence[pa.RecordBatch]) -> None:
        import pyarrow as pa

        path, tally = self._shard_path(split, number), Tally()
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
