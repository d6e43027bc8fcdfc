"""Clips of 3D flow as files: parquet shards that `pyarrow` and `datasets` read as well.

    from robotics.flow3d.data import FlowReader, FlowWriter

    with FlowWriter("clips", num_frames=8, grid=4) as writer:
        writer.add(clip, split="train")
    for clip in FlowReader("clips", split="train").shuffled(seed=0):
        ...

A data set is a folder: `info.json` with counts and statistics, `README.md` for people, and `data/SPLIT-00000.parquet`.
The columns are described in `robotics.flow3d.data.format`.
"""

from __future__ import annotations

from mmrl.entries import lazy_names

_NAMES = {
    "robotics.flow3d.data.format": ("DatasetInfo",),
    "robotics.flow3d.data.reader": ("FlowReader",),
    "robotics.flow3d.data.writer": ("FlowWriter", "ShardSettings"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
