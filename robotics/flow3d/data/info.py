"""`info.json` of a data set of 3D flow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmrl.errors import UserError
from mmrl.files import read_json_object
from robotics.data.layout import write_json
from robotics.data.metadata import named_errors
from robotics.flow3d.data.tally import Tally, quantile_of
from robotics.flow3d.encoding import FlowEncoding

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "flow3d"
VERSION = 1
INFO = "info.json"


@dataclass
class DatasetInfo:
    """Shape, statistics and shards of a data set."""

    num_frames: int
    """T, frames of a flow."""
    grid: int
    """N, query points a side."""
    title: str = "3D flow"
    """Title of the card."""
    tally: Tally = field(default_factory=Tally)
    """Counts over its clips."""
    shards: dict[str, int] = field(default_factory=dict)
    """Clips of each shard by its path within the folder."""

    @property
    def clips(self) -> int:
        """Number of clips."""
        return sum(self.shards.values())

    def encoding(self, **fields: Any) -> FlowEncoding:
        """The encoding of these flows: T and N of the data, depths from their 1 % to their 99 % quantile.

        Args:
            fields: fields of `FlowEncoding` that override these.

        Returns:
            The encoding.

        Raises:
            UserError: there are no clips yet.
        """
        low, high = (quantile_of(self.tally.depth_mm, share) for share in (0.01, 0.99))
        if low is None or high is None:
            raise UserError("the data set has no clips; the range of their depths is not known")
        # A millimetre each way: all points may lie in one bin.
        known = {"num_frames": self.num_frames, "grid": self.grid, "z_min_m": low - 1e-3, "z_max_m": high + 1e-3}
        return FlowEncoding(**(known | fields))

    def check_encoding(self, encoding: FlowEncoding, where: str) -> None:
        """Raise UserError where T or N of a model differ."""
        for name in ("num_frames", "grid"):
            have, want = getattr(self, name), getattr(encoding, name)
            if have != want:
                raise UserError(
                    f"{where} has flows with {name}={have}, the model's encoding has {name}={want}; extract the clips "
                    f"again with {name}={want}, or build a model with {name}={have}"
                )

    def write(self, folder: Path) -> None:
        """Replace `info.json` of a folder."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "num_frames": self.num_frames,
            "grid": self.grid,
            "clips": self.clips,
            "splits": self.tally.count_by("split"),
            "sources": self.tally.count_by("source"),
            "tasks": self.tally.count_by("task"),
            "sizes_px": dict(self.tally.sizes),
            "units": {"uv": "pixel", "z": "metre", "depth": "depth_unit_m of the row", "T_world_cam": "metre"},
            "statistics": self.tally.statistics(),
            "shards": self.shards,
        }
        write_json(content, folder / INFO)

    @classmethod
    def read(cls, folder: Path) -> DatasetInfo:
        """Read `info.json`, with an empty tally, which the shards store; raises UserError for another version."""
        path = folder / INFO
        content = read_json_object(path)
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise UserError(
                f"{path} has format {content.get('format')!r}, version {content.get('version')!r}; "
                f"this reads format {FORMAT!r}, version {VERSION}"
            )
        with named_errors(str(path)):
            shards = {str(name): int(clips) for name, clips in content["shards"].items()}
            return cls(int(content["num_frames"]), int(content["grid"]), str(content["title"]), Tally(), shards)
