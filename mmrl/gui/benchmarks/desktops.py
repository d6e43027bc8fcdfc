"""Rows of MMBench-GUI L2, UI-Vision, OSWorld-G and UI-I2E-Bench."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmrl.files import is_file, read_json_object
from mmrl.gui.benchmarks.annotations import (
    Annotation,
    BoxForm,
    RowError,
    read_box,
    read_numbers,
    read_size,
    read_text,
)
from mmrl.gui.benchmarks.layout import Cells, RowContext
from mmrl.gui.samples import Refusal


def read_mmbench_gui(cells: Cells, context: RowContext) -> Annotation:
    """A row of L2_annotations.json.

    As in the official loader, a coordinate of -1 means 0, and a box with a number above 1 is in pixels.

    Source: open-compass/MMBench-GUI benchmarks/l2_element_grounding.py.
    """
    platform = read_text(cells, "platform")
    box = tuple(0 if number == -1 else number for number in read_box(cells, "bbox"))
    return Annotation(
        id=str(cells.get("index") or context.default_id),
        place=context.place,
        image=f"{platform}/{read_text(cells, 'image_path')}",
        instruction=read_text(cells, "instruction"),
        target=box,
        form=context.form if max(box) <= 1 else BoxForm.XYXY,
        size=read_size(cells, "image_size"),
        groups={
            "platform": (platform,),
            "level": (read_text(cells, "grounding_type"),),
            "type": (read_text(cells, "data_type"),),
            "application": (str(cells.get("app_name", "")),),
        },
    )


def read_ui_vision(cells: Cells, context: RowContext) -> Annotation:
    """A row of element_grounding_{basic,functional,spatial}.json; swapped corners are sorted, as the metric does.

    Source: uivision/UI-Vision eval/grounding/eval_uivision.py.
    """
    x1, y1, x2, y2 = read_box(cells, "bbox")
    optional = {name: (str(cells[key]),) for name, key in UI_VISION_COLUMNS.items() if cells.get(key)}
    return Annotation(
        id=context.default_id,
        place=context.place,
        image=read_text(cells, "image_path"),
        instruction=read_text(cells, "prompt_to_evaluate"),
        target=(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)),
        form=context.form,
        size=read_size(cells, "image_size"),
        groups={"setting": (_setting(context),), **optional},
    )


def read_osworld_g(cells: Cells, context: RowContext) -> Annotation:
    """A row of OSWorld-G.json, OSWorld-G_refined.json or the parquet form: a box, a polygon or nothing to be found.

    Source: showlab/FocusUI evaluation/os_world_g_eval.py; EvolvingLMMs-Lab/lmms-eval lmms_eval/tasks/osworld_g.
    """
    kind = read_text(cells, "box_type").lower()
    if kind not in TARGETS:
        raise RowError(f"box_type is {kind!r}; expected {', '.join(TARGETS)}")
    name = str(cells.get("id") or context.default_id)
    image = cells.get("image") if cells.get("image") is not None else read_text(cells, "image_path")
    kinds = cells.get("GUI_types")
    on_screen = ("absent",) if kind == "refusal" else ("present",)
    groups = {"target": (kind,), "on_screen": on_screen, "category": context.companion.get(name, ())}
    return Annotation(
        id=name,
        place=context.place,
        image=image,
        instruction=read_text(cells, "instruction"),
        target=TARGETS[kind](cells),
        form=context.form if kind == "bbox" else None,
        size=read_size(cells, "image_size"),
        groups={**groups, "type": tuple(map(str, kinds)) if isinstance(kinds, list | tuple) else ()},
    )


def osworld_g_categories(folder: Path) -> dict[str, tuple[str, ...]]:
    """Abilities of each sample by classification_result.json; empty where the file is not there."""
    file = folder / "classification_result.json"
    if not is_file(file):
        return {}
    found: dict[str, list[str]] = defaultdict(list)
    classified = read_json_object(file).get("classified")
    for category, samples in classified.items() if isinstance(classified, Mapping) else ():
        for sample in samples:
            found[str(sample.get("id"))].append(str(category))
    return {name: tuple(categories) for name, categories in found.items()}


def read_i2e(cells: Cells, context: RowContext) -> Annotation:
    """A line of I2E-bench-annotation.jsonl.

    Source: InfiXAI/InfiGUI-G1 eval/data.py (`standardize_sample`).
    """
    about = cells.get("annotations")
    kind = about.get("instr_type") if isinstance(about, Mapping) else None
    if not isinstance(kind, str):
        raise RowError("annotations.instr_type is missing; expected explicit or implicit")
    return Annotation(
        id=context.default_id,
        place=context.place,
        image=read_text(cells, "image"),
        instruction=read_text(cells, "instruction"),
        target=read_box(cells, "bounding_box"),
        form=context.form,
        groups={"instruction": (kind.lower(),), "source": (str(cells.get("source", "")).lower(),)},
    )


def _setting(context: RowContext) -> str:
    name = context.file.stem.lower()
    found = [setting for setting in ("basic", "functional", "spatial") if setting in name]
    if len(found) != 1:
        raise RowError(f"the file's name {context.file.name} says neither basic, functional nor spatial")
    return found[0]


def _polygon(cells: Cells) -> tuple[float, ...]:
    numbers = read_numbers(cells, "box_coordinates")
    if len(numbers) < 6 or len(numbers) % 2:
        raise RowError(f"box_coordinates has {len(numbers)} numbers; expected x, y of at least 3 corners")
    return numbers


TARGETS: dict[str, Any] = {
    "bbox": lambda cells: read_box(cells, "box_coordinates"),
    "polygon": _polygon,
    "refusal": lambda cells: Refusal(),
}
UI_VISION_COLUMNS = {"category": "category", "type": "element_type", "application": "platform"}
