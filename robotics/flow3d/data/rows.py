"""Clips as rows of a table, their counts, and the description of a data set.

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
from typing import TYPE_CHECKING, Any

import numpy as np

from mmrl.errors import UserError
from mmrl.hub.images import ImageError, decode_image
from robotics.data.clips import encode_png
from robotics.data.tables import data_schema
from robotics.flow3d.clip import FlowClip, Observation
from robotics.flow3d.geometry import DepthArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa
    from numpy.typing import NDArray

LARGEST_CODE = 2**16 - 1
"""Greatest value of a 16-bit depth image."""
ARRAYS = ("points", "flow")
TEXTS = ("split", "source", "task", "instruction", "quality", "meta")


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
    """The finest of 1, 2, 5, 10, ... times `finest_m` in which a 16-bit image holds the greatest depth of (H, W)."""
    greatest = float(np.max(depth_m, initial=0.0, where=np.isfinite(depth_m)))
    for power in range(10):
        for factor in (1, 2, 5):
            if greatest <= LARGEST_CODE * finest_m * factor * 10**power:
                return finest_m * factor * 10**power
    raise UserError(f"depth_m goes up to {greatest:g}; no such camera: it must be in metres")


def row_of(clip: FlowClip, split: str, finest_unit_m: float) -> dict[str, Any]:
    """Write a clip as a row."""
    seen = clip.observation
    unit = depth_unit(seen.depth_m, finest_unit_m)
    known = np.where(np.isfinite(seen.depth_m) & (seen.depth_m > 0), seen.depth_m, 0.0)
    mask = None if seen.mask is None else seen.mask.astype(np.uint8) * np.uint8(255)
    try:
        quality, meta = json.dumps(clip.quality), json.dumps(clip.meta)
    except (TypeError, ValueError) as error:
        raise UserError(f"quality and meta of a clip must be what JSON can hold: {error}") from None
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
        if cell is None or len(cell) != length or not all(one is not None and math.isfinite(one) for one in cell):
            what = "intrinsics" if name == "K" else "pose of the camera"
            raise UserError(f"it has no {what}: {name} is {cell}; {length} finite numbers are needed to lift points")
    unit = float(row["depth_unit_m"])
    if not 0 < unit < math.inf:
        raise UserError(f"depth_unit_m is {unit}; must be the metres of one unit of depth")
    points = np.asarray(row["points"], dtype=np.float64)
    grid = math.isqrt(len(points) // 3)
    observation = Observation(
        rgb=_pixels(row["rgb"], "rgb"),
        depth_m=(_pixels(row["depth"], "depth") * unit).astype(np.float32),
        K=np.asarray(row["K"], dtype=np.float64).reshape(3, 3),
        T_world_cam=np.asarray(row["T_world_cam"], dtype=np.float64).reshape(4, 4),
        instruction=row["instruction"],
        mask=None if row["mask"] is None else _pixels(row["mask"], "mask") > 0,
    )
    meta = {"split": row["split"]} | ({"task": row["task"]} if row["task"] else {}) | json.loads(row["meta"])
    flow = np.asarray(row["flow"], dtype=np.float64).reshape(-1, grid, grid, 4)
    return FlowClip(observation, points.reshape(grid, grid, 3), flow, row["source"], json.loads(row["quality"]), meta)


def batch_of(row: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """One row as a batch."""
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([row], schema=schema)


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Rows of a table; points and flow stay arrays, which need an eighth of a list's memory."""
    arrays = [name for name in ARRAYS if name in table.column_names and not table[name].null_count]
    rows: list[dict[str, Any]] = table.drop_columns(arrays).to_pylist()
    for name in arrays if rows else []:
        column = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
        for row, values in zip(rows, column, strict=True):
            row[name] = values.copy()
    return rows


def _png(pixels: NDArray[Any]) -> dict[str, Any]:
    return {"bytes": encode_png(pixels), "path": None}


def _pixels(cell: Mapping[str, Any], name: str) -> NDArray[Any]:
    if cell is None or not cell.get("bytes"):
        raise UserError(f"it has no {name}")
    try:
        image = decode_image(cell["bytes"])
    except ImageError as error:
        raise UserError(f"its {name} cannot be decoded: {error}") from None
    return np.asarray(image.convert("RGB") if name == "rgb" else image)
