"""Reads clips of 3D flow one by one, in order or shuffled by a seed, with few in memory."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError, did_you_mean
from mmrl.files import expanded
from mmrl.hub.tables import check_parquet
from robotics.data.layout import named_errors
from robotics.flow3d.clip import FlowClip, FlowEncoding
from robotics.flow3d.data.format import DatasetInfo, clip_of, rows_of
from robotics.flow3d.data.writer import SHARD, numbered, read_group, read_tally, shard_errors

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("split", "source", "task")
KEPT_GROUPS = 4
"""Row groups kept in memory for access to single clips."""


class FlowReader(Sequence[FlowClip]):
    """Clips of a folder, by number, in their order or shuffled.

        reader = FlowReader("clips", split="train", encoding=model.encoding)
        for clip in reader.shuffled(seed=0):
            ...

    Args:
        folder: folder of the data set.
        split: only this split; None = all.
        sources: only these sources; None = all.
        tasks: only these tasks; None = all.
        encoding: encoding of the model to train, whose T and N must match; None skips this check.

    Raises:
        UserError: no such data set, a shard is missing or damaged, T or N are not the encoding's, or nothing is
            selected.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        split: str | None = None,
        sources: Sequence[str] | None = None,
        tasks: Sequence[str] | None = None,
        encoding: FlowEncoding | None = None,
    ) -> None:
        self.folder = expanded(Path(folder))
        self.info = DatasetInfo.read(self.folder)
        """The dataset's description, with counts over all its clips."""
        if encoding is not None:
            self.info.check_encoding(encoding, str(self.folder))
        self._shards = self._find_shards()
        wanted = {"split": None if split is None else (split,), "source": sources, "task": tasks}
        self._wanted = {group: set(names) for group, names in wanted.items() if names is not None}
        self._check_wanted()
        self._places = list(self._select())
        if not self._places:
            asked = ", ".join(f"{group} {' or '.join(sorted(names))}" for group, names in self._wanted.items())
            raise UserError(f"{self.folder} has no clips{f' of {asked} together' if asked else ''}")
        self._group = lru_cache(KEPT_GROUPS)(lambda shard, group: read_group(self._shards[shard], group))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        shard, group, row = self._places[index]
        return self._clip(rows_of(self._group(shard, group).slice(row, 1))[0], self._shards[shard])

    def __iter__(self) -> Iterator[FlowClip]:
        return (self._clip(row, path) for row, path in self._rows(range(len(self._shards))))

    def shuffled(self, seed: int, *, epoch: int = 0, buffer: int = 256, skip: int = 0) -> Iterator[FlowClip]:
        """Every selected clip once, in an order determined by seed, epoch and buffer.

        Shards come in random order; each clip is drawn from a buffer of undecoded clips.

        Args:
            seed: seed of the order.
            epoch: each epoch has another order.
            buffer: number of clips in memory; with 1 only the shards are shuffled.
            skip: number of clips to skip at the start, to resume an epoch.

        Returns:
            Iterator over the clips.

        Raises:
            UserError: `buffer` is less than 1, or a shard turns out to be damaged.
        """
        if buffer < 1:
            raise UserError(f"buffer is {buffer}; must be at least 1")
        rng = np.random.default_rng([seed, epoch])
        rows = self._rows(rng.permutation(len(self._shards)).tolist())
        # undecoded rows are drawn and skipped, so that resuming decodes nothing
        drawn = _draw(rows, buffer, rng)
        return (self._clip(row, path) for row, path in itertools.islice(drawn, skip, None))

    def fingerprint(self) -> str:
        """Digest of the selection and the sizes of the shards, to check that a run resumes on the same data."""
        sizes = [(path.name, path.stat().st_size) for path in self._shards]
        wanted = sorted((group, sorted(names)) for group, names in self._wanted.items())
        return hashlib.sha256(repr((sizes, wanted)).encode()).hexdigest()[:16]

    def instructions(self) -> list[str]:
        """The distinct instructions of the selected clips, in order, read without images."""
        tables = (table for path in self._shards for _, table in self._tables(path, [*COLUMNS, "instruction"]))
        rows = (cells for table in tables for cells in table.to_pylist())
        return list(dict.fromkeys(cells["instruction"] for cells in rows if self._is_wanted(cells)))

    def _find_shards(self) -> list[Path]:
        found = [path for _, _, path in numbered(self.folder, SHARD)]
        missing = [name for name in self.info.shards if self.folder / name not in found]
        if missing:
            raise UserError(f"{self.folder} lacks the shard {missing[0]} listed in info.json ({len(missing)} missing)")
        return found

    def _check_wanted(self) -> None:
        for path in self._shards:
            # counts come from the shards: info.json may be older than the newest of them
            self.info.tally.merge(read_tally(path))
        for group, names in self._wanted.items():
            known = self.info.tally.count_by(group)
            for name in names - set(known):
                hint = did_you_mean(name, known)
                raise UserError(f"{self.folder} has no {group} {name!r}; {hint}it has {', '.join(known) or 'no clips'}")

    def _select(self) -> Iterator[tuple[int, int, int]]:
        """Indices of shard, row group and row of each selected clip."""
        for number, path in enumerate(self._shards):
            for group, table in self._tables(path, list(COLUMNS)):
                for row, cells in enumerate(table.to_pylist()):
                    if self._is_wanted(cells):
                        yield number, group, row

    def _is_wanted(self, cells: dict[str, Any]) -> bool:
        return all(cells[group] in names for group, names in self._wanted.items())

    def _rows(self, order: Sequence[int]) -> Iterator[tuple[dict[str, Any], Path]]:
        for number in order:
            path = self._shards[number]
            for _, table in self._tables(path):
                yield from ((row, path) for row in rows_of(table) if self._is_wanted(row))

    def _tables(self, path: Path, columns: Sequence[str] | None = None) -> Iterator[tuple[int, pa.Table]]:
        with shard_errors(path):
            groups = check_parquet(path).num_row_groups
        return ((group, read_group(path, group, columns)) for group in range(groups))

    def _clip(self, row: dict[str, Any], path: Path) -> FlowClip:
        try:
            with named_errors("it"):
                clip = clip_of(row)
        except UserError as error:
            raise UserError(f"a clip of the shard {path} cannot be used: {error}") from error
        if clip.flow.shape[:2] != (self.info.num_frames, self.info.grid):
            raise UserError(
                f"a clip of the shard {path} has T={len(clip.flow)} and N={clip.flow.shape[1]}; info.json has "
                f"T={self.info.num_frames} and N={self.info.grid}"
            )
        return clip


def _draw(
    rows: Iterator[tuple[dict[str, Any], Path]], buffer: int, rng: np.random.Generator
) -> Iterator[tuple[dict[str, Any], Path]]:
    held: list[tuple[dict[str, Any], Path]] = []
    for row in rows:
        if len(held) < buffer:
            held.append(row)
            continue
        index = int(rng.integers(buffer))
        # the new row takes the place of the one that leaves
        out, held[index] = held[index], row
        yield out
    yield from (held[index] for index in rng.permutation(len(held)).tolist())
