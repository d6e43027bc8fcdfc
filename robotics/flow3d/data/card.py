"""`README.md` of a data set of 3D flow, the card that the Hugging Face hub shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from robotics.flow3d.data.info import DatasetInfo


def dataset_card(info: DatasetInfo) -> str:
    """The card as Markdown with a YAML header."""
    tally, numbers = info.tally, info.tally.statistics()
    splits = tally.count_by("split")
    files = [line for split in splits for line in (f"  - split: {split}", f"    path: data/{split}-*.parquet")]
    configs = ["configs:", "- config_name: default", "  data_files:", *files] if splits else []
    quality = [f"| {name} | {mean:.4g} |" for name, mean in numbers["quality"].items()]
    lines = [
        *("---", *configs, "task_categories:", "- robotics", "tags:", "- 3d-flow", "---", ""),
        f"# {info.title}",
        "",
        f"{info.clips} clips of 3D flow: a first image with depth, camera and instruction, {info.grid} x {info.grid} "
        f"points of the object in it, and where these points are in each of {info.num_frames} future frames. No clip "
        "has robot actions.",
        "",
        *_table("split", splits),
        *_table("source", tally.count_by("source")),
        *_table("task", tally.count_by("task")),
        *_table("size in pixels", dict(sorted(tally.sizes.items()))),
        "| | min | 1 % | 50 % | 99 % | max |",
        "|---|---|---|---|---|---|",
        f"| depth of points, m | {_cells(numbers['depth_m'])} |",
        f"| displacement of the object, m | {_cells(numbers['moved_m'])} |",
        "",
        f"{100 * numbers['visible']:.1f} % of the future points are visible.",
        "",
        *(["| quality of the extraction | mean |", "|---|---|", *quality, ""] if quality else []),
        *READING,
    ]
    return "\n".join(lines) + "\n"


def _table(name: str, counts: Mapping[str, int]) -> list[str]:
    rows = [f"| {key or '-'} | {count} |" for key, count in counts.items()]
    return [f"| {name} | clips |", "|---|---|", *rows, ""] if rows else []


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
