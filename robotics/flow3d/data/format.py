"""Clips as rows of a table, their counts, and the description of a dataset.

| column | type | meaning |
|---|---|---|
| split, source, task, instruction | string | `source` is the origin of the clip |
| rgb | PNG | first frame, H x W x 3 |
| depth | PNG, 16 bit | depth along the camera's axis in units of `depth_unit_m`; 0 is a hole |
| depth_unit_m | float64 | metres of one unit of `depth` |
| mask | PNG or null | 255 on the object |
| width, height | int32 | pixels of the first frame |
| K | float64[9] | intrinsics in pixels, row-major |
| T_world_cam | float64[16] | pose of the camera, OpenCV axes, row-major |
| points | float32[N * N * 3] | query points: u, v in pixels, z in metres; grid rows first |
| flow | float32[T * N * N * 4] | future points: u, v, z, visibility |
| quality, meta | string | JSON objects: statistics of the extraction, and anything else |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.files import read_json_object
from mmrl.hub.cards import card_text, plain, table
from mmrl.hub.foreign import MalformedError, to_rgb
from mmrl.hub.images import ImageError, decode_image
from robotics.data.images import encode_png
from robotics.data.layout import named_errors, write_json
from robotics.data.tables import data_schema
from robotics.flow3d.clip import FlowClip, FlowEncoding, Observation
from robotics.flow3d.geometry import DepthArray, lift

if TYPE_CHECKING:
    import pyarrow as pa


LARGEST_CODE = 2**16 - 1
"""Maximum value of a 16-bit depth image."""
ARRAYS = ("points", "flow")
TEXTS = ("split", "source", "task", "instruction", "quality", "meta")
BIN_M = 1e-3
GROUPS = ("split", "source", "task")
FORMAT = "flow3d"
VERSION = 1
INFO = "info.json"


def clip_schema(num_frames: int, grid: int) -> pa.Schema:
    """Columns of a shard."""
    vector = {"K": 9, "T_world_cam": 16}
    cells = {"points": grid * grid * 3, "flow": num_frames * grid * grid * 4}
    features: dict[str, Any] = {name: {"dtype": "string", "shape": [1]} for name in TEXTS[:4]}
    features |= {name: {"dtype": "image"} for name in ("rgb", "depth", "mask")}
    features |= {"depth_unit_m": {"dtype": "float64", "shape": [1]}}
    features |= {name: {"dtype": "int32", "shape": [1]} for name in ("width", "height")}
    features |= {name: {"dtype": "float64", "shape": [length]} for name, length in vector.items()}
    features |= {name: {"dtype": "float32", "shape": [length]} for name, length in cells.items()}
    features |= {name: {"dtype": "string", "shape": [1]} for name in TEXTS[4:]}
    return data_schema(features)


def depth_unit(depth_m: DepthArray, finest_m: float) -> float:
    """The finest of 1, 2, 5, 10, ... times `finest_m` in which a 16-bit image can store the largest depth of (H, W)."""
    greatest = float(np.max(depth_m, initial=0.0, where=np.isfinite(depth_m)))
    for power in range(10):
        for factor in (1, 2, 5):
            if greatest <= LARGEST_CODE * finest_m * factor * 10**power:
                return finest_m * factor * 10**power
    raise UserError(f"depth_m goes up to {greatest:g}, which is not plausible; it must be in metres")


def row_of(clip: FlowClip, split: str, finest_unit_m: float) -> dict[str, Any]:
    """Write a clip as a row."""
    clip.check_finite()
    seen = clip.observation
    unit = depth_unit(seen.depth_m, finest_unit_m)
    # integers have no NaN: holes are stored as 0
    known = np.where(np.isfinite(seen.depth_m) & (seen.depth_m > 0), seen.depth_m, 0.0)
    mask = None if seen.mask is None else seen.mask.astype(np.uint8) * np.uint8(255)
    try:
        quality, meta = json.dumps(clip.quality), json.dumps(clip.meta)
    except (TypeError, ValueError) as error:
        raise UserError(f"quality and meta of a clip must be JSON-serialisable: {error}") from None
    return {
        "split": split,
        "source": clip.source,
        "task": str(clip.meta.get("task", "")),
        "instruction": seen.instruction,
        "rgb": _png(seen.rgb),
        "depth": _png(np.rint(known / unit).astype(np.uint16)),
        "mask": None if mask is None else _png(mask),
        "depth_unit_m": unit,
        "width": seen.size_px[0],
        "height": seen.size_px[1],
        "K": seen.K.ravel().tolist(),
        "T_world_cam": seen.T_world_cam.ravel().tolist(),
        "points": clip.points.astype(np.float32).ravel(),
        "flow": clip.flow.astype(np.float32).ravel(),
        "quality": quality,
        "meta": meta,
    }


def clip_of(row: Mapping[str, Any]) -> FlowClip:
    """Read a clip from a row."""
    for name, length in (("K", 9), ("T_world_cam", 16)):
        cell = row.get(name)
        # checked here and not by pyarrow: a list of another length is a valid cell
        if cell is None or len(cell) != length or not all(one is not None and math.isfinite(one) for one in cell):
            what = "intrinsics" if name == "K" else "pose of the camera"
            raise UserError(f"it has no {what}: {name} is {cell}; {length} finite numbers are needed to lift points")
    unit = float(row["depth_unit_m"])
    if not 0 < unit < math.inf:
        raise UserError(f"depth_unit_m is {unit}; must be the size of one depth unit in metres")
    points = np.asarray(row["points"], dtype=np.float64)
    # the schema stores flat lists, so N follows from their length
    grid = math.isqrt(len(points) // 3)
    observation = Observation(
        rgb=_pixels(row["rgb"], "rgb"),
        # holes were stored as 0 and stay 0, which readers of depth take as unknown
        depth_m=(_pixels(row["depth"], "depth") * unit).astype(np.float32),
        K=np.asarray(row["K"], dtype=np.float64).reshape(3, 3),
        T_world_cam=np.asarray(row["T_world_cam"], dtype=np.float64).reshape(4, 4),
        instruction=row["instruction"],
        mask=None if row["mask"] is None else _pixels(row["mask"], "mask") > 0,
    )
    # first, so that the clip's own entries win
    meta = {"split": row["split"]}
    if row["task"]:
        meta["task"] = row["task"]
    meta |= json.loads(row["meta"])
    flow = np.asarray(row["flow"], dtype=np.float64).reshape(-1, grid, grid, 4)
    quality = json.loads(row["quality"])
    clip = FlowClip(observation, points.reshape(grid, grid, 3), flow, row["source"], quality, meta)
    clip.check_finite()
    return clip


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table; points and flow stay arrays, which need an eighth of a list's memory."""
    # with missing cells the flat buffer would be too short, so such columns take the slow path
    arrays = [name for name in ARRAYS if name in table.column_names and not table[name].null_count]
    rows: list[dict[str, Any]] = table.drop_columns(arrays).to_pylist()
    for name in arrays if rows else []:
        column = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
        for row, values in zip(rows, column, strict=True):
            # a copy, because a view would keep the whole table in memory
            row[name] = values.copy()
    return rows


def _png(pixels: NDArray[Any]) -> dict[str, Any]:
    return {"bytes": encode_png(pixels), "path": None}


def _pixels(cell: Mapping[str, Any], name: str) -> NDArray[Any]:
    if cell is None or not cell.get("bytes"):
        raise UserError(f"it has no {name}")
    try:
        image = decode_image(cell["bytes"])
        return np.asarray(to_rgb(image) if name == "rgb" else image)
    except (ImageError, MalformedError) as error:
        raise UserError(f"its {name} cannot be decoded: {error}") from None


@dataclass
class ClipTally:
    """Counts over clips."""

    clips: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Clips by split, source and task."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Clips by image size, as width x height."""
    depth_mm: Counter[int] = field(default_factory=Counter)
    """Histogram of depths of query and future points."""
    moved_mm: Counter[int] = field(default_factory=Counter)
    """Histogram of the displacement of the median point between first and last frame."""
    visible: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and count of visibility."""
    quality: dict[str, list[float]] = field(default_factory=dict)
    """Sum and count of each finite number of `FlowClip.quality`."""

    def add(self, row: Mapping[str, Any], quality: Mapping[str, float]) -> None:
        """Count a clip."""
        self.clips[row["split"], row["source"], row["task"]] += 1
        self.sizes[f"{row['width']}x{row['height']}"] += 1
        points = np.asarray(row["points"], dtype=np.float64).reshape(-1, 3)
        flow = np.asarray(row["flow"], dtype=np.float64).reshape(-1, len(points), 4)
        # future points too: the encoding has to cover where objects go
        depths = np.concatenate([points[:, 2], flow[..., 2].ravel()])
        self.depth_mm.update(_bins(depths))
        K = np.asarray(row["K"], dtype=np.float64).reshape(3, 3)
        # the median point: some points of the query grid may be on the background
        moved = np.linalg.norm(lift(flow[-1, :, :3], K) - lift(points, K), axis=-1)
        self.moved_mm.update(_bins(np.array([np.median(moved)])))
        self.visible[0] += float(flow[..., 3].sum())
        self.visible[1] += flow[..., 3].size
        for name, value in quality.items():
            if np.isfinite(value):
                one = self.quality.setdefault(name, [0.0, 0.0])
                one[0] += float(value)
                one[1] += 1

    def merge(self, other: ClipTally) -> None:
        """Add the counts of other clips."""
        for name in ("clips", "sizes", "depth_mm", "moved_mm"):
            getattr(self, name).update(getattr(other, name))
        self.visible = [mine + theirs for mine, theirs in zip(self.visible, other.visible, strict=True)]
        for name, (total, count) in other.quality.items():
            one = self.quality.setdefault(name, [0.0, 0.0])
            one[0] += total
            one[1] += count

    def to_json(self) -> dict[str, Any]:
        """JSON that `from_json` reads."""
        return {
            "clips": [[*key, count] for key, count in sorted(self.clips.items())],
            "sizes": dict(self.sizes),
            "depth_mm": [list(pair) for pair in sorted(self.depth_mm.items())],
            "moved_mm": [list(pair) for pair in sorted(self.moved_mm.items())],
            "visible": self.visible,
            "quality": self.quality,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ClipTally:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError for other content."""
        return cls(
            Counter({(split, source, task): count for split, source, task, count in content["clips"]}),
            Counter(content["sizes"]),
            Counter(dict(map(tuple, content["depth_mm"]))),
            Counter(dict(map(tuple, content["moved_mm"]))),
            list(content["visible"]),
            {name: list(pair) for name, pair in content["quality"].items()},
        )

    def count_by(self, group: str) -> dict[str, int]:
        """Clips by `split`, `source` or `task`, sorted by name."""
        index, counts = GROUPS.index(group), Counter[str]()
        for key, count in self.clips.items():
            counts[key[index]] += count
        return dict(sorted(counts.items()))

    def statistics(self) -> dict[str, Any]:
        """Quantiles of depth and displacement in metres, fraction of visible points, means of quality."""
        marks = {"min": 0.0, "q01": 0.01, "q50": 0.5, "q99": 0.99, "max": 1.0}
        return {
            "depth_m": {name: quantile_of(self.depth_mm, share) for name, share in marks.items()},
            "moved_m": {name: quantile_of(self.moved_mm, share) for name, share in marks.items()},
            "visible": self.visible[0] / max(self.visible[1], 1.0),
            "quality": {name: total / count for name, (total, count) in sorted(self.quality.items())},
        }


def quantile_of(bins: Mapping[int, int], share: float) -> float | None:
    """Smallest length in metres that at least the given fraction of the counted ones do not exceed."""
    if not bins:
        return None
    lengths = np.array(sorted(bins))
    below = np.cumsum([bins[length] for length in lengths])
    index = min(int(np.searchsorted(below, max(share * below[-1], 1))), len(lengths) - 1)
    # the middle of the bin
    return round((float(lengths[index]) + 0.5) * BIN_M, 6)


def _bins(lengths_m: Any) -> Counter[int]:
    known = lengths_m[np.isfinite(lengths_m)]
    values, counts = np.unique(np.floor(known / BIN_M).astype(np.int64), return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


@dataclass
class DatasetInfo:
    """Shape, statistics and shards of a dataset."""

    num_frames: int
    """T, frames of a flow."""
    grid: int
    """N, query points per side."""
    title: str = "3D flow"
    """Title of the card."""
    tally: ClipTally = field(default_factory=ClipTally)
    """Counts over its clips."""
    shards: dict[str, int] = field(default_factory=dict)
    """Clips of each shard by its path within the folder."""

    @property
    def clips(self) -> int:
        """Number of clips."""
        return sum(self.shards.values())

    def encoding(self, **fields: Any) -> FlowEncoding:
        """The encoding of these flows: T and N of the data, depths from their 1% to their 99% quantile.

        Args:
            fields: fields of `FlowEncoding` that override these.

        Returns:
            The encoding.

        Raises:
            UserError: there are no clips yet.
        """
        low, high = (quantile_of(self.tally.depth_mm, share) for share in (0.01, 0.99))
        if low is None or high is None:
            raise UserError("the dataset has no clips, so their depth range is unknown")
        # A millimetre each way: all points may lie in one bin.
        known = {"num_frames": self.num_frames, "grid": self.grid, "z_min_m": low - 1e-3, "z_max_m": high + 1e-3}
        return FlowEncoding(**(known | fields))

    def check_encoding(self, encoding: FlowEncoding, where: str) -> None:
        """Raise UserError if T or N of a model differ."""
        for name in ("num_frames", "grid"):
            have, want = getattr(self, name), getattr(encoding, name)
            if have != want:
                raise UserError(
                    f"{where} has flows with {name}={have}, the model's encoding has {name}={want}; re-extract the "
                    f"clips with {name}={want}, or build a model with {name}={have}"
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
                f"{path} has format {content.get('format')!r}, version {content.get('version')!r}; this suite reads "
                f"format {FORMAT!r}, version {VERSION}"
            )
        with named_errors(str(path)):
            shards = {str(name): int(clips) for name, clips in content["shards"].items()}
            return cls(int(content["num_frames"]), int(content["grid"]), str(content["title"]), ClipTally(), shards)


def dataset_card(info: DatasetInfo) -> str:
    """The card as Markdown with a YAML header."""
    from huggingface_hub import DatasetCardData

    tally, numbers = info.tally, info.tally.statistics()
    splits = tally.count_by("split")
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in splits]
    configs = [{"config_name": "default", "data_files": files}] if splits else None
    quality = [[plain(name), f"{mean:.4g}"] for name, mean in numbers["quality"].items()]
    head = DatasetCardData(pretty_name=info.title, task_categories=["robotics"], tags=["3d-flow"], configs=configs)
    lines = [
        f"# {plain(info.title)}",
        "",
        f"{info.clips} clips of 3D flow. Each has a first image with depth, camera and instruction, {info.grid} x "
        f"{info.grid} points of the object in it, and the positions of these points in each of {info.num_frames} "
        "future frames. No clip has robot actions.",
        "",
        *_table("split", splits),
        *_table("source", tally.count_by("source")),
        *_table("task", tally.count_by("task")),
        *_table("size in pixels", dict(sorted(tally.sizes.items()))),
        "| | min | 1% | 50% | 99% | max |",
        "|---|---|---|---|---|---|",
        f"| depth of points, m | {_cells(numbers['depth_m'])} |",
        f"| displacement of the object, m | {_cells(numbers['moved_m'])} |",
        "",
        f"{100 * numbers['visible']:.1f}% of the future points are visible.",
        "",
        *table(["quality of the extraction", "mean"], quality),
        *READING,
    ]
    return card_text(head, lines)


def _table(name: str, counts: Mapping[str, int]) -> list[str]:
    return table([name, "clips"], [[plain(key) or "-", str(count)] for key, count in counts.items()])


def _cells(marks: Mapping[str, float | None]) -> str:
    return " | ".join("-" if mark is None else f"{mark:.3f}" for mark in marks.values())


READING = [
    "## Reading",
    "",
    "```python",
    "from robotics.flow3d.data import FlowReader",
    "",
    'for clip in FlowReader("this folder", split="train").shuffled(seed=0):',
    "    clip.points, clip.flow, clip.observation.rgb, clip.observation.depth_m, clip.observation.K",
    "```",
    "",
    'or `datasets.load_dataset("this folder")`. `points` holds u, v in pixels and z in metres of each query point, '
    "`flow` the same and a visibility from 0 to 1 by frame and point, both flat, rows of the grid first. `depth` is "
    "a 16-bit image in units of `depth_unit_m` metres, 0 where it is unknown. `K` and `T_world_cam` are the "
    "camera's matrices in row-major order; the camera looks along z, with x to the right and y down.",
]
