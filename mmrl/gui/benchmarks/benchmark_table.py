"""The benchmarks by name and how each is published; BENCHMARKS is at the end of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.errors import UserError, did_you_mean
from mmrl.gui.benchmarks.annotations import (
    Annotation,
    Cells,
    RowContext,
    osworld_g_categories,
    read_i2e,
    read_mmbench_gui,
    read_osworld_g,
    read_screenspot,
    read_screenspot_parquet,
    read_screenspot_pro,
    read_ui_vision,
)
from mmrl.gui.grounding.conventions import BoxForm
from mmrl.gui.grounding.samples import TARGET_COLUMNS


@dataclass(frozen=True)
class BenchmarkLayout:
    """One of the layouts in which a benchmark is published."""

    files: tuple[str, ...]
    """Annotation files below the benchmark's folder, as patterns; all that exist are read, in this order."""
    images: tuple[str, ...]
    """Image folders below the benchmark's folder; the first one that has the images is used. Empty: the rows contain
    them."""
    form: BoxForm
    """Meaning of the boxes."""
    read: Callable[[Cells, RowContext], Annotation]
    """Reads a row; raises RowError if its format differs."""


@dataclass(frozen=True)
class Benchmark:
    """A published benchmark."""

    name: str
    """Name used in configurations."""
    title: str
    """Name used in papers."""
    source: str
    """Paper."""
    layouts: tuple[BenchmarkLayout, ...]
    roots: tuple[str, ...] = ("",)
    """Folders below the given folder that may contain the files."""
    known_by: tuple[str, ...] = ()
    """Columns that together occur only in its rows."""
    columns: tuple[str, ...] = ()
    """Columns by which its tables break down results."""
    crosses: tuple[tuple[str, str], ...] = ()
    """Pairs of columns whose combinations are shown in its tables."""
    details: tuple[str, ...] = ()
    """Additional columns with many values, for the written results only."""
    macro: tuple[str, ...] = ()
    """Columns whose cells the published average is a plain mean of. Empty: published averages are over samples."""
    size: int | None = None
    """Number of published samples; None if unknown."""
    companion: Callable[[Path], Mapping[str, tuple[str, ...]]] | None = None
    """Reads a second file of the benchmark's folder."""


def find_benchmark(name: str) -> Benchmark:
    """The benchmark with this name."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    raise UserError(f"unknown benchmark '{name}'; {did_you_mean(name, BENCHMARKS)}available: {', '.join(BENCHMARKS)}")


def recognise(file: Path, columns: Iterable[str]) -> Benchmark:
    """The benchmark that a file belongs to, by its name or else by the columns of its rows; `OWN` for custom data."""
    held = set(columns)
    for benchmark in BENCHMARKS.values():
        names = [Path(pattern).name for layout in benchmark.layouts for pattern in layout.files]
        # a bare "*.parquet" would claim every mirror; those are recognised by their columns
        if any(Path(file.name).match(name) for name in names if not name.startswith("*")):
            return benchmark
    for benchmark in BENCHMARKS.values():
        # after all names: columns of one benchmark may be among those of another
        if benchmark.known_by and held >= {*benchmark.known_by}:
            return benchmark
    if held & {*TARGET_COLUMNS} and held & {"image", "images"}:
        return OWN
    raise UserError(
        f"{file}: neither its name nor its columns ({', '.join(sorted(held)) or 'none'}) match a benchmark; specify "
        f"one with --benchmark: {', '.join(BENCHMARKS)}; custom grounding data needs an image and one of "
        f"{', '.join(TARGET_COLUMNS)}"
    )


def _parquet(form: BoxForm) -> BenchmarkLayout:
    """A mirror on a hub of data sets, with the images inside."""
    return BenchmarkLayout(("*.parquet", "data/*.parquet"), (), form, read_screenspot_parquet)


def _osworld_g(name: str, title: str, file: str, *more: BenchmarkLayout) -> Benchmark:
    return Benchmark(
        name=name,
        title=title,
        source="Xie et al., OSWorld-G and Jedi, arXiv 2505.13227",
        layouts=(BenchmarkLayout((file,), ("images",), BoxForm.XYWH, read_osworld_g), *more),
        roots=("", "benchmark"),
        known_by=("box_type", "box_coordinates"),
        columns=("target", "on_screen", "category"),
        details=("type",),
        size=564,
        companion=osworld_g_categories,
    )


_PUBLISHED = (
    Benchmark(
        name="screenspot",
        title="ScreenSpot",
        source="Cheng et al., SeeClick, arXiv 2401.10935",
        layouts=(
            BenchmarkLayout(
                ("screenspot_mobile.json", "screenspot_desktop.json", "screenspot_web.json"),
                ("screenspot_imgs",),
                BoxForm.XYWH,
                read_screenspot,
            ),
            _parquet(BoxForm.XYXY_RELATIVE),
        ),
        columns=("platform", "type"),
        crosses=(("platform", "type"),),
        details=("source",),
        macro=("platform", "type"),
        size=1272,
    ),
    Benchmark(
        name="screenspot_v2",
        title="ScreenSpot-v2",
        source="Wu et al., OS-Atlas, arXiv 2410.23218",
        layouts=(
            BenchmarkLayout(
                ("screenspot_mobile_v2.json", "screenspot_desktop_v2.json", "screenspot_web_v2.json"),
                ("screenspotv2_image", "screenspot_imgs"),
                BoxForm.XYWH,
                read_screenspot,
            ),
            _parquet(BoxForm.XYXY_RELATIVE),
        ),
        known_by=("img_filename", "instruction", "bbox", "data_type", "data_source"),
        columns=("platform", "type"),
        crosses=(("platform", "type"),),
        details=("source",),
        size=1272,
    ),
    Benchmark(
        name="screenspot_pro",
        title="ScreenSpot-Pro",
        source="Li et al., ScreenSpot-Pro, arXiv 2504.07981",
        layouts=(BenchmarkLayout(("annotations/*.json",), ("images",), BoxForm.XYXY, read_screenspot_pro),),
        known_by=("img_filename", "img_size", "ui_type", "application", "bbox"),
        columns=("group", "type"),
        crosses=(("group", "type"),),
        details=("application", "platform"),
        size=1581,
    ),
    Benchmark(
        name="mmbench_gui_l2",
        title="MMBench-GUI L2",
        source="Wang et al., MMBench-GUI, arXiv 2507.19478",
        layouts=(
            BenchmarkLayout(
                ("L2_annotations.json",),
                ("offline_images", "MMBench-GUI-OfflineImages/offline_images"),
                BoxForm.XYXY_RELATIVE,
                read_mmbench_gui,
            ),
        ),
        roots=("", "MMBench-GUI"),
        known_by=("grounding_type", "image_path", "bbox", "platform"),
        columns=("level", "platform", "type"),
        crosses=(("level", "platform"),),
        details=("application",),
        macro=("level",),
    ),
    Benchmark(
        name="ui_vision",
        title="UI-Vision element grounding",
        source="Nayak et al., UI-Vision, arXiv 2503.15661",
        layouts=(
            BenchmarkLayout(
                tuple(
                    f"annotations/element_grounding/element_grounding_{setting}.json"
                    for setting in ("basic", "functional", "spatial")
                ),
                ("images",),
                BoxForm.XYXY,
                read_ui_vision,
            ),
        ),
        known_by=("prompt_to_evaluate", "image_path", "bbox"),
        columns=("setting", "category"),
        crosses=(("setting", "category"),),
        details=("type", "application"),
        macro=("setting",),
        size=5479,
    ),
    _osworld_g(
        "osworld_g",
        "OSWorld-G",
        "OSWorld-G.json",
        BenchmarkLayout(("*.parquet", "data/*.parquet"), (), BoxForm.XYWH, read_osworld_g),
    ),
    _osworld_g("osworld_g_refined", "OSWorld-G, refined instructions", "OSWorld-G_refined.json"),
    Benchmark(
        name="ui_i2e",
        title="UI-I2E-Bench",
        source="Liu et al., UI-E2I-Synth, arXiv 2504.11257",
        layouts=(BenchmarkLayout(("I2E-bench-annotation.jsonl",), ("",), BoxForm.XYXY, read_i2e),),
        known_by=("bounding_box", "instruction", "annotations"),
        columns=("instruction", "source"),
        crosses=(("instruction", "source"),),
    ),
)
BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _PUBLISHED}
OWN = Benchmark(
    name="own",
    title="custom grounding data",
    source="",
    layouts=(),
)
"""Training data, which `mmrl gui validate` reads in the same way as training."""
