"""The benchmarks by name; BENCHMARKS at the foot."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from mmrl.errors import UserError
from mmrl.gui.benchmarks.annotations import BoxForm
from mmrl.gui.benchmarks.desktops import (
    osworld_g_categories,
    read_i2e,
    read_mmbench_gui,
    read_osworld_g,
    read_ui_vision,
)
from mmrl.gui.benchmarks.layout import Benchmark, Layout
from mmrl.gui.benchmarks.screenspot import read_screenspot, read_screenspot_parquet, read_screenspot_pro


def find_benchmark(name: str) -> Benchmark:
    """The benchmark of that name."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    close = difflib.get_close_matches(name, BENCHMARKS, n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    raise UserError(f"unknown benchmark '{name}'; {hint}there are: {', '.join(BENCHMARKS)}")


def recognise(file: Path, columns: Iterable[str]) -> Benchmark:
    """The benchmark that a file belongs to, by its name, else by the columns of its rows."""
    named = [
        benchmark
        for benchmark in BENCHMARKS.values()
        if any(Path(file.name).match(Path(pattern).name) for pattern in _telling_names(benchmark))
    ]
    if named:
        return named[0]
    held = set(columns)
    fitting = [benchmark for benchmark in BENCHMARKS.values() if benchmark.known_by and held >= {*benchmark.known_by}]
    if fitting:
        return fitting[0]
    raise UserError(
        f"{file}: neither its name nor its columns ({', '.join(sorted(held)) or 'none'}) are those of a benchmark; "
        f"say which one with --benchmark: {', '.join(BENCHMARKS)}"
    )


def _telling_names(benchmark: Benchmark) -> list[str]:
    patterns = [pattern for layout in benchmark.layouts for pattern in layout.files]
    return [pattern for pattern in patterns if not Path(pattern).name.startswith("*")]


def _parquet(form: BoxForm) -> Layout:
    """A mirror on a hub of data sets, with the images inside."""
    return Layout(("*.parquet", "data/*.parquet"), (), form, read_screenspot_parquet)


def _osworld_g(name: str, title: str, file: str, *more: Layout) -> Benchmark:
    return Benchmark(
        name=name,
        title=title,
        source="Xie et al., OSWorld-G and Jedi, arXiv 2505.13227",
        layouts=(Layout((file,), ("images",), BoxForm.XYWH, read_osworld_g), *more),
        roots=("", "benchmark"),
        known_by=("box_type", "box_coordinates"),
        columns=("target", "on_screen", "category"),
        details=("type",),
        size=564,
        companion=osworld_g_categories,
    )


def _named(*benchmarks: Benchmark) -> dict[str, Benchmark]:
    return {benchmark.name: benchmark for benchmark in benchmarks}


BENCHMARKS: dict[str, Benchmark] = _named(
    Benchmark(
        name="screenspot",
        title="ScreenSpot",
        source="Cheng et al., SeeClick, arXiv 2401.10935",
        layouts=(
            Layout(
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
            Layout(
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
        layouts=(Layout(("annotations/*.json",), ("images",), BoxForm.XYXY, read_screenspot_pro),),
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
            Layout(
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
            Layout(
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
        sorts_corners=True,
    ),
    _osworld_g(
        "osworld_g",
        "OSWorld-G",
        "OSWorld-G.json",
        Layout(("*.parquet", "data/*.parquet"), (), BoxForm.XYWH, read_osworld_g),
    ),
    _osworld_g("osworld_g_refined", "OSWorld-G, refined instructions", "OSWorld-G_refined.json"),
    Benchmark(
        name="ui_i2e",
        title="UI-I2E-Bench",
        source="Liu et al., UI-E2I-Synth, arXiv 2504.11257",
        layouts=(Layout(("I2E-bench-annotation.jsonl",), ("",), BoxForm.XYXY, read_i2e),),
        known_by=("bounding_box", "instruction", "annotations"),
        columns=("instruction", "source"),
        crosses=(("instruction", "source"),),
    ),
)
